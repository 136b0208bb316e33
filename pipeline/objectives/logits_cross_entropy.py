"""The cross entropy of given logits, computed in fp32 without an fp32 tensor of (N, V).

`F.cross_entropy(logits.float(), ...)` makes three such tensors. Here the loss is computed in blocks that stay
in the cache of a CPU, or by two compiled kernels in a run that compiles. One kernel reads the logits and
keeps two numbers a token; the other reads them and writes the gradient. On a GPU, blocks move 42 bytes a
logit in bf16, and the kernels move 6.

The kernels are formulas for torch.compile, not Triton, so the same ones run and are tested on a CPU. Their
backward is our own, since autograd's may keep fp32 logits.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import TorchDynamoException
from torch.autograd.function import once_differentiable

from pipeline.data.batches import IGNORE_INDEX
from pipeline.models.blocks import describe_compile_error
from pipeline.planner.model import choose_block_rows

log = logging.getLogger(__name__)


class FusedKernels:
    """Compiles the loss of logits and its gradient to one kernel each, for any number of tokens.

    If they cannot be compiled, one line of the log says so, and callers compute in blocks.

    Args:
        backend: A backend of torch.compile.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor"):
        # fullgraph: a part that ran uncompiled would make tensors of (N, V).
        self._compiled = {
            each: torch.compile(each, backend=backend, fullgraph=True)
            for each in (_compute_loss, _compute_gradient, _replace_by_gradient)
        }

    @property
    def is_compiled(self) -> bool:
        """Return whether the kernels run; they are compiled at their first call."""
        return bool(self._compiled)

    def loss(self, logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
        """Return each row's loss, largest logit and sum of exponentials; empty if they cannot be compiled."""
        return self._call(_compute_loss, logits_NV, labels_N) or ()

    def gradient(self, *of_loss: Tensor) -> Tensor | None:
        """Return the gradient of the logits; `None` if the kernel cannot be compiled.

        Args:
            *of_loss: Logits, labels, the second and third result of `loss`, and the incoming gradient.
        """
        return self._call(_compute_gradient, *of_loss)

    def replace_by_gradient(self, logits_CV: Tensor, *of_loss: Tensor) -> bool:
        """Write the gradient over the logits, and return `False` if the kernel cannot be compiled.

        Args:
            logits_CV: The logits of a chunk of tokens, overwritten.
            *of_loss: The other arguments of `gradient`.
        """
        return self._call(_replace_by_gradient, logits_CV, *of_loss) is not None

    def _call(self, function: Callable[..., Any], *given: Tensor) -> Any:
        if not self._compiled:
            return None
        # Detached, since torch.compile would compile again for tensors that require a gradient.
        tensors = [each.detach() for each in given]
        for each in tensors:
            if each.dim():
                maybe_mark_dynamic(each, 0)
        try:
            return self._compiled[function](*tensors)
        except TorchDynamoException as error:
            self._compiled.clear()
            log.warning("compile: the loss of logits runs uncompiled: %s", describe_compile_error(error))
            return None


def cross_entropy_sum(logits_NV: Tensor, labels_N: Tensor, kernels: FusedKernels | None = None) -> Tensor:
    """Return the loss summed over the labels that are not -100; see cross_entropy_per_token.

    Returns:
        A 0-dim fp32 tensor, as `F.cross_entropy(logits.float(), labels, reduction="sum")` gives.
    """
    return cross_entropy_per_token(logits_NV, labels_N, kernels).sum()


def cross_entropy_per_token(
    logits_NV: Tensor, labels_N: Tensor, kernels: FusedKernels | None = None
) -> Tensor:
    """Return the loss of each token, in fp32; 0 where the label is -100.

    Args:
        logits_NV: (tokens, vocabulary), any floating dtype.
        labels_N: (tokens,), int64.
        kernels: Compiled kernels; `None`: the loss is computed in blocks.

    Returns:
        (N,), as `F.cross_entropy(logits.float(), labels, reduction="none")` gives.
    """
    losses_N: Tensor = _CrossEntropy.apply(logits_NV, labels_N, kernels)
    return losses_N


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, kernels: FusedKernels | None) -> Tensor:
        fused = () if kernels is None else kernels.loss(logits_NV, labels_N)
        losses_N, *of_rows = fused or (_compute_losses_in_blocks(logits_NV, labels_N),)
        ctx.save_for_backward(logits_NV, labels_N, *of_rows)
        ctx.kernels = kernels if of_rows else None
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, labels_N, *of_rows = ctx.saved_tensors
        grad_N = grad_N.contiguous()  # the gradient of a sum is one expanded number, another shape to compile
        grad_NV = ctx.kernels and ctx.kernels.gradient(logits_NV, labels_N, *of_rows, grad_N)
        return (
            _compute_gradient_in_blocks(logits_NV, labels_N, grad_N) if grad_NV is None else grad_NV,
            None,
            None,
        )


def _widen(logits_NV: Tensor) -> Tensor:
    """Return the logits in fp32, or in fp64 if they are fp64."""
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def _compute_loss(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z_NV = _widen(logits_NV)
    top_N = z_NV.amax(1)
    sum_N = (z_NV - top_N[:, None]).exp().sum(1)
    label_N = z_NV.gather(1, labels_N.clamp(min=0)[:, None])[:, 0]
    lost_N = (top_N - label_N) + sum_N.log()
    return torch.where(labels_N == IGNORE_INDEX, 0.0, lost_N), top_N, sum_N


def _compute_gradient(
    logits_NV: Tensor, labels_N: Tensor, top_N: Tensor, sum_N: Tensor, grad_N: Tensor
) -> Tensor:
    p_NV = (_widen(logits_NV) - top_N[:, None]).exp() / sum_N[:, None]
    is_label_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == labels_N[:, None]
    scale_N = torch.where(labels_N == IGNORE_INDEX, 0.0, grad_N)
    return ((p_NV - is_label_NV.to(p_NV.dtype)) * scale_N[:, None]).to(logits_NV.dtype)


def _replace_by_gradient(logits_NV: Tensor, *of_loss: Tensor) -> bool:
    logits_NV.copy_(_compute_gradient(logits_NV, *of_loss))
    return True


def _compute_losses_in_blocks(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    losses_N = torch.empty_like(labels_N, dtype=torch.float32)
    for block in iterate_blocks(logits_NV):
        losses_N[block] = F.cross_entropy(
            logits_NV[block].float(), labels_N[block], ignore_index=IGNORE_INDEX, reduction="none"
        )
    return losses_N


def _compute_gradient_in_blocks(logits_NV: Tensor, labels_N: Tensor, grad_N: Tensor) -> Tensor:
    """Return the gradient of the logits: (softmax - one-hot) x the incoming gradient; 0 in ignored rows."""
    grad_NV = torch.empty_like(logits_NV)
    scale_N1 = torch.where(labels_N == IGNORE_INDEX, 0.0, grad_N)[:, None]
    target_N1 = labels_N.clamp(min=0)[:, None]
    minus_one = torch.full_like(scale_N1, -1.0)
    for block in iterate_blocks(logits_NV):
        p_NV = torch.softmax(logits_NV[block].float(), dim=-1)
        p_NV.scatter_add_(-1, target_N1[block], minus_one[block])
        grad_NV[block] = p_NV.mul_(scale_N1[block])
    return grad_NV


def iterate_blocks(logits_NV: Tensor) -> Iterator[slice]:
    """Yield the slices of rows that are computed in fp32 at once."""
    rows = choose_block_rows(logits_NV.shape[1], logits_NV.device.type == "cpu")
    for start in range(0, logits_NV.shape[0], rows):
        yield slice(start, start + rows)
