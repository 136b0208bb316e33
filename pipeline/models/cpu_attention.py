"""torch's attention kernel on a CPU, in fp32 also where bf16 comes and goes.

In bf16 it multiplies small blocks by a general product of half precision: forward and backward together take
1.6 to 2.2 times as long as in fp32, copies included. Shapes as in document_attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.models.block_attention import Scores

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """-> (B, heads, T, width). Causal, or as the mask says.

    Args:
        mask: (T, T), fp32: what is added to the scores.
        scores: Scaling and dropout count.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.dtype == torch.bfloat16 and scores.dropout == 0 and query.shape[-1] == value.shape[-1]:
        output: Tensor = _InFp32.apply(query, key, value, mask, scores.scaling)
        return output
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else mask.to(query.dtype),
        dropout_p=scores.dropout,
        is_causal=mask is None,
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class _InFp32(torch.autograd.Function):
    """Keeps what came, and no copy of it: these are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        wide, of_rows = _forward(
            query.float(), key.float(), value.float(), 0.0, mask is None, attn_mask=mask, scale=scaling
        )
        output: Tensor = wide.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, of_rows)
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, of_rows = ctx.saved_tensors
        wide = [t.float() for t in (of_output, query, key, value, output)]
        found = _backward(*wide, of_rows, 0.0, mask is None, attn_mask=mask, scale=ctx.scaling)
        return *(t.to(query.dtype) for t in found), None, None
