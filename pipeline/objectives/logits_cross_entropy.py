"""The cross entropy of a model's logits, computed in fp32 without an fp32 tensor of (N, V).

`F.cross_entropy(logits.float(), ...)` makes three such tensors. Here the loss is computed in blocks of rows
that fit the cache of a CPU, or by two compiled kernels in a run that uses torch.compile. One kernel reads the
logits and saves two numbers for each token; the other reads the logits again and writes their gradient. On a
GPU, blocks move 42 bytes for each logit in bf16, and the kernels move 6.

The kernels are formulas for torch.compile, not Triton, so the same kernels run and are tested on a CPU. Their
backward is written by hand, since autograd may save fp32 logits for it.

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

    If torch.compile fails, it logs one warning, and from then on callers compute in blocks.

    Args:
        backend: A backend of torch.compile.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor"):
        # fullgraph: a part that ran uncompiled would make tensors of (N, V).
        self._compiled = {
            function: torch.compile(function, backend=backend, fullgraph=True)
            for function in (_compute_loss, _compute_gradient, _replace_by_gradient)
        }

    @property
    def is_compiled(self) -> bool:
        """Return whether callers can use the kernels. Their first call compiles them, which may fail."""
        return bool(self._compiled)

    def compute_loss(self, logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
        """Return each row's loss, largest logit and sum of exponentials; empty if compilation fails."""
        return self._call(_compute_loss, logits_NV, labels_N) or ()

    def compute_gradient(
        self, logits_NV: Tensor, labels_N: Tensor, top_N: Tensor, sum_N: Tensor, grad_N: Tensor
    ) -> Tensor | None:
        """Return the gradient of the logits; `None` if compilation fails.

        Args:
            logits_NV: The logits.
            labels_N: The labels.
            top_N: The largest logit of each row, from compute_loss.
            sum_N: The sum of exponentials of each row, from compute_loss.
            grad_N: The incoming gradient of each row's loss.
        """
        return self._call(_compute_gradient, logits_NV, labels_N, top_N, sum_N, grad_N)

    def replace_by_gradient(
        self, logits_CV: Tensor, labels_C: Tensor, top_C: Tensor, sum_C: Tensor, grad_C: Tensor
    ) -> bool:
        """Overwrite the logits with their gradient, and return `False` if compilation fails.

        The arguments are those of compute_gradient, for a chunk of C tokens.
        """
        return self._call(_replace_by_gradient, logits_CV, labels_C, top_C, sum_C, grad_C) is not None

    def _call(self, function: Callable[..., Any], *args: Tensor) -> Any:
        """Return the result of the compiled function; `None` if it cannot be compiled."""
        if not self._compiled:
            return None
        # Detached, since torch.compile would compile again for tensors that require a gradient.
        tensors = [arg.detach() for arg in args]
        for tensor in tensors:
            if tensor.dim():
                maybe_mark_dynamic(tensor, 0)
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
        fused = () if kernels is None else kernels.compute_loss(logits_NV, labels_N)
        losses_N, *top_and_sum = fused or (_compute_losses_in_blocks(logits_NV, labels_N),)
        ctx.save_for_backward(logits_NV, labels_N, *top_and_sum)
        ctx.kernels = kernels if top_and_sum else None
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, labels_N, *top_and_sum = ctx.saved_tensors
        # The gradient of a sum is an expanded scalar. For its strides of 0 a kernel would be compiled again.
        grad_N = grad_N.contiguous()
        grad_NV = None
        if ctx.kernels is not None:
            grad_NV = ctx.kernels.compute_gradient(logits_NV, labels_N, *top_and_sum, grad_N)
        if grad_NV is None:
            grad_NV = _compute_gradient_in_blocks(logits_NV, labels_N, grad_N)
        return grad_NV, None, None


def _widen(logits_NV: Tensor) -> Tensor:
    """Return the logits in fp32, or in fp64 if they are fp64."""
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def _compute_loss(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's loss, largest logit, and sum of exponentials of the differences from it."""
    z_NV = _widen(logits_NV)
    top_N = z_NV.amax(1)
    sum_N = (z_NV - top_N[:, None]).exp().sum(1)
    label_logit_N = z_NV.gather(1, labels_N.clamp(min=0)[:, None])[:, 0]
    losses_N = (top_N - label_logit_N) + sum_N.log()
    return torch.where(labels_N == IGNORE_INDEX, 0.0, losses_N), top_N, sum_N


def _compute_gradient(
    logits_NV: Tensor, labels_N: Tensor, top_N: Tensor, sum_N: Tensor, grad_N: Tensor
) -> Tensor:
    """Return the gradient of the logits in their dtype; see FusedKernels.compute_gradient."""
    p_NV = (_widen(logits_NV) - top_N[:, None]).exp() / sum_N[:, None]
    is_label_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == labels_N[:, None]
    scale_N = torch.where(labels_N == IGNORE_INDEX, 0.0, grad_N)
    return ((p_NV - is_label_NV.to(p_NV.dtype)) * scale_N[:, None]).to(logits_NV.dtype)


def _replace_by_gradient(
    logits_NV: Tensor, labels_N: Tensor, top_N: Tensor, sum_N: Tensor, grad_N: Tensor
) -> bool:
    logits_NV.copy_(_compute_gradient(logits_NV, labels_N, top_N, sum_N, grad_N))
    return True  # unlike the None of a failed compilation


def _compute_losses_in_blocks(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Return each row's loss in fp32; 0 in ignored rows."""
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
    """Yield slices of rows, each small enough for temporary tensors in fp32."""
    rows = choose_block_rows(logits_NV.shape[1], logits_NV.device.type == "cpu")
    for start in range(0, logits_NV.shape[0], rows):
        yield slice(start, start + rows)
