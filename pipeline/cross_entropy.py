"""Cross entropy in fp32 without an fp32 tensor of [tokens, vocabulary].

`F.cross_entropy(logits.float(), ...)` makes three such tensors; block by block they stay in the cache of a
CPU, or small beside the model on a GPU. benchmarks/throughput.py shows what that is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.batches import IGNORE_INDEX

# fp32 elements a block: 1 MiB stays in a core's cache; a GPU wants few, large kernels (256 MiB).
_CPU_BLOCK = 1 << 18
_GPU_BLOCK = 1 << 26


def cross_entropy_sum(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Sum over the labels that are not -100, in fp32.

    Args:
        logits_NV: (tokens, vocabulary), any floating dtype.
        labels_N: (tokens,), int64.

    Returns:
        A 0-dim fp32 tensor, as `F.cross_entropy(logits.float(), labels, reduction="sum")` gives.
    """
    total: Tensor = _BlockwiseCrossEntropy.apply(logits_NV, labels_N)
    return total


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    elements = _CPU_BLOCK if logits_NV.device.type == "cpu" else _GPU_BLOCK
    rows = max(1, elements // logits_NV.shape[1])
    for start in range(0, logits_NV.shape[0], rows):
        yield slice(start, start + rows)


class _BlockwiseCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits_NV.device)
        for block in _blocks(logits_NV):
            total += F.cross_entropy(
                logits_NV[block].float(), labels_N[block], ignore_index=IGNORE_INDEX, reduction="sum"
            )
        ctx.save_for_backward(logits_NV, labels_N)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """d loss / d logit = (softmax - one-hot of the label) x the incoming gradient; 0 in ignored rows."""
        logits_NV, labels_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        scale_N1 = torch.where(labels_N == IGNORE_INDEX, 0.0, grad_outputs[0])[:, None]
        target_N1 = labels_N.clamp(min=0)[:, None]
        minus_one = torch.full_like(scale_N1, -1.0)
        for block in _blocks(logits_NV):
            p_NV = torch.softmax(logits_NV[block].float(), dim=-1)
            p_NV.scatter_add_(-1, target_N1[block], minus_one[block])
            grad_NV[block] = p_NV.mul_(scale_N1[block])
        return grad_NV, None
