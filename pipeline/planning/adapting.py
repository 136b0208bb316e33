"""How the base under an adapter is held."""

from __future__ import annotations

from math import ceil, prod

from pipeline.planning.model import Parameter

_BLOCK, _BLOCKS = 64, 256  # bitsandbytes: values that share a scale, scales that share one
_TABLES = 16 * 4 + 256 * 4  # bytes: of values, and of scales


def is_held_apart(p: Parameter) -> bool:
    """Whether it is a frozen linear layer's under an adapter, which is held in half precision or in 4 bits
    where the rest is not.
    """
    return p.layer is not None and not p.trains and ".lora_" not in p.name


def bytes_in_4_bits(shape: tuple[int, ...]) -> int:
    """Of a matrix in NF4: codes, a byte of scale a block, the scales of those, a mean and two tables."""
    values = prod(shape)
    blocks = ceil(values / _BLOCK)
    return ceil(values / 2) + blocks + ceil(blocks / _BLOCKS) * 4 + 4 + _TABLES
