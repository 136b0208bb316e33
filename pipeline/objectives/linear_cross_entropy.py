"""Cross entropy of a linear layer's outputs without the outputs: no tensor of (tokens, vocabulary).

torch's F.linear_cross_entropy adds losses up in bf16 (1 % off over 1,024 tokens) and takes 2.5 to 5 times as
long on a CPU; DeepSpeed's computes logits twice (twice as long) and has the host read labels of the device.

Shapes: N tokens, D width of the hidden states, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.data.batches import IGNORE_INDEX

# Elements of a chunk's logits: products are fast from a few hundred tokens on, and adding up the weight's
# gradient costs a pass over it a chunk. 667 tokens on a CPU and 5,300 on a GPU with 50k words.
CPU_CHUNK = 1 << 25
GPU_CHUNK = 1 << 28
# fp32 elements that are worked on at once: 1 MiB stays in a core's cache; a GPU wants few, large kernels.
CPU_BLOCK = 1 << 18
GPU_BLOCK = 1 << 26
# What gradients are multiplied by in fp16 until the incoming one is known: probabilities down to 2^-22 keep
# all their bits, and a hidden state's gradient, at most 512 times a weight, stays below the largest number.
FP16_SCALE = 256.0


def linear_cross_entropy_sum(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, dtype: torch.dtype
) -> Tensor:
    """Sum over the labels that are not -100.

    Gradients are worked out in the forward, for an incoming gradient of 1: three products, as the layer
    and its backward take, in place of four. In fp16 they are FP16_SCALE times that, whatever the loss scale,
    and what the loss scale makes too large for fp16 is infinite in the backward, as it is for logits.

    Args:
        hidden_ND: What goes into the layer.
        labels_N: int64.
        dtype: What products are computed in: fp64, fp32, bf16 or fp16.

    Returns:
        0-dim, fp32 (fp64 in fp64), as `F.cross_entropy(F.linear(...).float(), labels, reduction="sum")`.
    """
    total: Tensor = _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, bias_V, labels_N, dtype, torch.is_grad_enabled()
    )
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> Tensor:
        needs = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        rows = _counted(labels_N)
        x_ND, own_N = hidden_ND.to(dtype), labels_N
        if rows is not None:
            x_ND, own_N = x_ND[rows], labels_N[rows]
        sums = _Sums(x_ND, weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype), needs)
        sums.add(own_N)
        grad_ND = sums.hidden_ND
        if rows is not None and grad_ND is not None:
            grad_ND = torch.zeros_like(hidden_ND, dtype=dtype).index_copy_(0, rows, grad_ND)
        ctx.save_for_backward(grad_ND, sums.weight_VD, sums.bias_V)
        ctx.scale = sums.scale
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden_ND, weight_VD, bias_V)]
        return sums.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Multiplied in fp32, into the sums themselves: a second backward is torch's error.
        grad = grad if ctx.scale == 1.0 else grad / ctx.scale
        found = [
            None if each is None else (each.mul_(grad) if each.dtype == grad.dtype else each * grad[None])
            for each in ctx.saved_tensors
        ]
        gradients = [
            None if each is None else each.to(dtype) for each, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None)


def _counted(labels_N: Tensor) -> Tensor | None:
    """The rows that count, where some do not. On a GPU the host would wait to know how many: all stay."""
    if labels_N.device.type != "cpu":
        return None
    is_counted = labels_N != IGNORE_INDEX
    return None if bool(is_counted.all()) else is_counted.nonzero().squeeze(1)


class _Sums:
    """The loss and its gradients, added up chunk by chunk: fp32 where products are in half precision."""

    def __init__(self, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needs: list[bool]):
        self._x_ND, self._weight_VD, self._bias_V = x_ND, weight_VD, bias_V
        self._dtype = torch.promote_types(x_ND.dtype, torch.float32)
        self._needs = any(needs)
        self.scale = FP16_SCALE if x_ND.dtype == torch.float16 else 1.0
        self.loss = x_ND.new_zeros((), dtype=self._dtype)
        self.hidden_ND = torch.empty_like(x_ND) if needs[0] else None
        self.weight_VD = torch.zeros_like(weight_VD, dtype=self._dtype) if needs[1] else None
        self.bias_V = torch.zeros_like(weight_VD[:, 0], dtype=self._dtype) if needs[2] else None

    def add(self, labels_N: Tensor) -> None:
        tokens, words = len(labels_N), len(self._weight_VD)
        size = max(1, (CPU_CHUNK if labels_N.device.type == "cpu" else GPU_CHUNK) // words)
        logits_CV = self._x_ND.new_empty(min(size, tokens), words)
        for start in range(0, tokens, size):
            chunk = slice(start, start + size)
            x_CD, labels_C = self._x_ND[chunk], labels_N[chunk]
            grad_CV = logits_CV[: len(labels_C)]
            if self._bias_V is None:
                torch.mm(x_CD, self._weight_VD.t(), out=grad_CV)
            else:
                torch.addmm(self._bias_V, x_CD, self._weight_VD.t(), out=grad_CV)
            self._loss_of(grad_CV, labels_C)
            if self.hidden_ND is not None:
                torch.mm(grad_CV, self._weight_VD, out=self.hidden_ND[chunk])
            if self.weight_VD is not None:
                _add_product(self.weight_VD, grad_CV.t(), x_CD)
            if self.bias_V is not None:
                self.bias_V += grad_CV.sum(0, dtype=self._dtype)

    def _loss_of(self, logits_CV: Tensor, labels_C: Tensor) -> None:
        """Adds the chunk's loss. Logits become gradients of it, where these are needed."""
        elements = CPU_BLOCK if labels_C.device.type == "cpu" else GPU_BLOCK
        size = max(1, elements // logits_CV.shape[1])
        for start in range(0, len(labels_C), size):
            block_RV, labels_R = logits_CV[start : start + size], labels_C[start : start + size]
            is_counted_R1 = (labels_R != IGNORE_INDEX)[:, None]
            label_R1 = labels_R.clamp(min=0)[:, None]
            z_RV = block_RV.to(self._dtype)
            own_R1, top_R1 = z_RV.gather(1, label_R1), z_RV.amax(1, keepdim=True)
            p_RV = torch.softmax(z_RV, 1)
            # The largest logit's probability is 1 / V or more, so its logarithm is exact.
            lost_R1 = top_R1 - p_RV.amax(1, keepdim=True).log() - own_R1
            self.loss += torch.where(is_counted_R1, lost_R1, 0.0).sum()
            if not self._needs:
                continue
            p_RV.scatter_add_(1, label_R1, torch.full_like(own_R1, -1.0))
            if labels_C.device.type != "cpu":  # there all of them count
                p_RV.mul_(is_counted_R1)
            if self.scale != 1.0:
                p_RV.mul_(self.scale)
            block_RV.copy_(p_RV)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added up in the total's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.float16:  # a sum over tokens may be too large for it
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        total += a @ b
