"""The cross entropy of each token of a linear layer's outputs, without the outputs: for losses that are no
sum over tokens, such as those of preferences, whose gradients are known in the backward alone.

There the chunks' logits are made a second time: four products in place of three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.objectives.given_logits import FusedKernels
from pipeline.objectives.linear_cross_entropy import spread, sums_of
from pipeline.objectives.vocabulary_part import VocabularyPart


def linear_token_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    dtype: torch.dtype,
    part: VocabularyPart | None = None,
    kernels: FusedKernels | None = None,
) -> Tensor:
    """Minus the log-probability of each token's label; 0 where that is -100.

    Args:
        hidden_ND, weight_VD, bias_V, labels_N, dtype, part, kernels: See linear_cross_entropy_sum. With a
            part both the forward and the backward are collective, and all ranks' incoming gradients are the
            same.

    Returns:
        (N,), fp32 (fp64 in fp64), as `F.cross_entropy(F.linear(...).float(), labels, reduction="none")`.
    """
    losses_N: Tensor = _LinearTokenLosses.apply(hidden_ND, weight_VD, bias_V, labels_N, dtype, part, kernels)
    return losses_N


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        hidden_ND, weight_VD, bias_V, labels_N, dtype, part, kernels = given
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N)
        ctx.dtype, ctx.part, ctx.kernels = dtype, part, kernels
        sums, rows = sums_of(
            hidden_ND, weight_VD, bias_V, labels_N, dtype, part, [False] * 3, kernels=kernels
        )
        return spread(sums.losses_N, rows, len(labels_N))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, labels_N = ctx.saved_tensors
        given, needs = (hidden_ND, weight_VD, bias_V), list(ctx.needs_input_grad[:3])
        sums, rows = sums_of(*given, labels_N, ctx.dtype, ctx.part, needs, grad_N, ctx.kernels)
        found = sums.gradients(rows, len(labels_N))
        if ctx.part is not None and found[0] is not None:
            ctx.part.all_reduce_sum(found[0])
        gradients = [
            None if gradient is None else gradient.to(each.dtype)
            for gradient, each in zip(found, given, strict=True)
        ]
        return (*gradients, None, None, None, None)
