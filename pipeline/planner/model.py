"""A model as the planner's formulas see it: parameters by name and shape, and the numbers of its blocks.

Also the sizes of the pieces in which losses and attention are computed, which the computing code imports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal


@dataclass(frozen=True)
class ParameterSpec:
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
class DecoderDimensions:
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
class ModelSpec:
    """What is trained."""

    name: str
    parameters: tuple[ParameterSpec, ...]
    dimensions: DecoderDimensions | None = None
    """None: not a language model whose family is known."""

    @cached_property
    def numel(self) -> int:
        """Parameters, each once."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trained(self) -> int:
        """Those of them that are trained."""
        return sum(p.numel for p in self.parameters if p.trains)


# Bytes of a chunk's logits, and tokens where these are more: products are fast from a few hundred tokens on,
# and adding up the weight's gradient costs a pass over it a chunk. 5,300 tokens on a GPU in bf16 with 50k
# words; on a CPU less than the 32 MiB from which on glibc maps a block anew in each step.
CPU_LOGITS_CHUNK = (30 << 20, 512)
GPU_LOGITS_CHUNK = (1 << 29, 1)
# fp32 elements that are worked on at once: 1 MiB stays in a core's cache; a GPU wants few, large kernels.
CPU_SOFTMAX_ELEMENTS = 1 << 18
GPU_SOFTMAX_ELEMENTS = 1 << 26
# By kind of device, what a layer's words are filled up to a multiple of: tensor cores take rows of logits of
# an odd length, such as 50,257 words', at a fraction of their rate.
VOCABULARY_MULTIPLES = {"cuda": 64}
# Elements of the weight's gradient that are added up at once on a CPU, 256 words or more: the product is
# still cached, and neither it nor its fp32 copy is as large as the weight.
CPU_GRADIENT_ELEMENTS = 1 << 19
# Queries of a block of attention that no kernel computes: fewer are more calls, more are more pairs beside a
# window.
QUERIES_PER_BLOCK = 256


def choose_chunk_tokens(tokens: int, words: int, element_size: int, on_cpu: bool) -> int:
    """Tokens whose logits are there at once."""
    most, least = CPU_LOGITS_CHUNK if on_cpu else GPU_LOGITS_CHUNK
    chunks = math.ceil(tokens / max(least, most // (words * element_size)))
    return max(1, math.ceil(tokens / max(1, chunks)))  # alike: a remnant would cost as many passes


def choose_block_rows(words: int, on_cpu: bool) -> int:
    """Rows of logits that are worked on in fp32 at once."""
    return max(1, (CPU_SOFTMAX_ELEMENTS if on_cpu else GPU_SOFTMAX_ELEMENTS) // words)


def pad_vocabulary(words: int, kind: str) -> int:
    """Words of a layer with those that only fill it up; kind: of the device."""
    return words + -words % VOCABULARY_MULTIPLES.get(kind, 1)
