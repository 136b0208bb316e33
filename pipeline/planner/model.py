"""A model as the planner's formulas see it: parameters by name and shape, and the numbers of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal


@dataclass(frozen=True)
class Parameter:
    """One tensor of the whole model, before any split."""

    name: str
    """As `named_parameters` says it; a tied weight stands once."""
    shape: tuple[int, ...]
    trains: bool = True
    layer: Literal["linear", "transposed"] | None = None
    """The weight of a linear layer that is not the output layer, (outputs, inputs), or as GPT-2 has it,
    (inputs, outputs)."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Dimensions:
    """Of a decoder's blocks, as transformers' config has them."""

    family: str
    """transformers' `model_type`: `llama`."""
    layers: int
    hidden: int
    intermediate: int
    """Of the MLP; of one expert where there are several."""
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Whether the output layer is the input embedding."""
    experts: int = 0
    experts_per_token: int = 0
    window: int | None = None
    """Tokens that attention looks back, where all layers have that limit."""
    first: int = 0
    """Of a pipeline stage: how many blocks stand before its own."""


@dataclass(frozen=True)
class Trial:
    """Bytes of activations at the most in forward and backward, in fp32, as they were tried."""

    fixed: float
    a_row: float


@dataclass(frozen=True)
class Model:
    """What is trained."""

    name: str
    parameters: tuple[Parameter, ...]
    dimensions: Dimensions | None = None
    """None: not a language model whose family is known."""
    trial: Trial | None = None
    """Of a module that no formula knows."""

    @cached_property
    def numel(self) -> int:
        """Parameters, each once."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trained(self) -> int:
        """Those of them that are trained."""
        return sum(p.numel for p in self.parameters if p.trains)
