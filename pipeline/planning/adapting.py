"""How the base under an adapter is held, and what its matrices add to a block's activations."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from pipeline.config.adapter_schema import AdapterConfig
from pipeline.planning.model import Model, Parameter

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


@dataclass(frozen=True)
class LowRank:
    """An adapter's matrices in a block of a rank: widths are summed over the linear layers that have some, as
    AutoTP has cut them: with its layer one of the two, of which the other one keeps the layer's whole width.
    """

    rank: int
    inputs: float
    outputs: float
    everywhere: bool
    """All linear layers of a block have some."""
    drops: bool = False
    """Values of their inputs."""
    is_dora: bool = False
    largest: int = 0
    """Elements of the largest matrix beside them,"""
    in_4_bits: bool = False
    """which is held so, and made whole to be multiplied with."""


def low_rank(own: Model, adapter: AdapterConfig | None) -> LowRank | None:
    """None: the run has no adapter. A stage of which no layer has one has matrices of rank 0.

    Args:
        own: What the rank has of the model (cutting.py).
    """
    if adapter is None:
        return None
    layers = 1 if own.dimensions is None else own.dimensions.layers
    inner = [p for p in own.parameters if p.name.endswith(".lora_A.default.weight")]
    outer = [p for p in own.parameters if p.name.endswith(".lora_B.default.weight")]
    beside = [p for p in own.parameters if p.layer is not None]
    return LowRank(
        inner[0].shape[0] if inner else 0,
        sum(p.shape[1] for p in inner) / layers,
        sum(p.shape[0] for p in outer) / layers,
        len(inner) >= len(beside),
        adapter.dropout > 0,
        adapter.kind == "dora",
        max(p.numel for p in beside) if beside else 0,
        adapter.quantize is not None,
    )
