"""Products of matrices in half precision, added up in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.planning.chunks import CPU_PART


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added up in the total's dtype, fp32 or more."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.float16:  # a sum over tokens may be too large for it
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif total.device.type == "cpu" and len(total) > (size := max(256, CPU_PART // b.shape[1])):
        half, whole = (b.new_empty(size, b.shape[1], dtype=dtype) for dtype in (b.dtype, total.dtype))
        for part, rows in zip(total.split(size), a.split(size), strict=True):
            product = torch.mm(rows, b, out=half[: len(rows)])
            part.add_(whole[: len(rows)].copy_(product))  # the sum of two types would allocate the copy
    else:
        total += a @ b
