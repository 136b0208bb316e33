"""Describes a model to the planner's formulas: parameters by name and shape, and the sizes of its blocks.

Also chooses the chunk sizes of losses and attention. The computing code imports these sizes from here, so
that the plan counts the bytes that the code takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal


@dataclass(frozen=True)
class ParameterSpec:
    """Name and shape of one tensor of the whole model, before any split."""

    name: str
    """Name in `named_parameters`; a tied weight is listed once."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    trains: bool = True
    """Whether it is trained."""
    layer: Literal["linear", "transposed"] | None = None
    """Layout of a linear layer's weight: `linear` is (outputs, inputs), `transposed` (inputs, outputs) as in
    GPT-2. `None` for any other parameter, and for the output layer."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class DecoderDimensions:
    """Sizes of a decoder's blocks, as transformers' config has them."""

    family: str
    """transformers' `model_type`, such as `llama`."""
    layers: int
    """Number of blocks; of this pipeline stage if the model is divided into stages."""
    hidden: int
    """Width of the hidden states."""
    intermediate: int
    """Width of the MLP, or of one expert in a mixture of experts."""
    heads: int
    """Number of query heads."""
    key_value_heads: int
    """Number of heads of keys and values; several query heads may share one."""
    head_dim: int
    """Width of a head."""
    vocabulary: int
    """Number of rows of the embedding."""
    tied: bool
    """Whether the output layer is the input embedding."""
    experts: int = 0
    """Number of experts of a layer; 0 in a model without."""
    experts_per_token: int = 0
    """Number of experts that compute each token."""
    window: int | None = None
    """Number of tokens in the sliding window of attention; `None` if any layer attends to the whole row."""
    first_layer: int = 0
    """Index in the whole model of this pipeline stage's first block."""


@dataclass(frozen=True)
class ModelSpec:
    """Model that a run trains, by its parameters and sizes."""

    name: str
    """Name for messages: folder or hub name, architecture, or type of the model."""
    parameters: tuple[ParameterSpec, ...]
    """All parameters. In a model from shapes.py, the first is the input embedding."""
    dimensions: DecoderDimensions | None = None
    """Sizes of the blocks; `None` if it is no language model of a known family."""

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters; a tied weight counts once."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trained(self) -> int:
        """Number of elements of the trained parameters."""
        return sum(p.numel for p in self.parameters if p.trains)


# (bytes of a chunk's logits, least number of tokens in a chunk). A matrix product is fast from a few hundred
# tokens on, and each chunk costs one pass over the weight's gradient. On a GPU in bf16 with a vocabulary of
# 50k, a chunk has 5,300 tokens. On a CPU a chunk of up to 15,360 words in fp32 stays below 32 MiB, from which
# on glibc maps an allocation anew in every step; with more words the minimum of tokens takes more. Huge pages
# (torch's THP_MEM_ALLOC_ENABLE) do not help: with 50k words a step has 2,900 page faults instead of 122,000
# and is 3 % faster. But on virtual machines that return free huge pages to their host (free page reporting)
# every second step waits 300 ms for them.
CPU_LOGITS_CHUNK = (30 << 20, 512)
GPU_LOGITS_CHUNK = (1 << 29, 1)
# Number of fp32 elements of a softmax that are computed at once. 1 MiB fits into a core's cache; a GPU is
# faster with few, large kernels.
CPU_SOFTMAX_ELEMENTS = 1 << 18
GPU_SOFTMAX_ELEMENTS = 1 << 26
# Multiple to which the output layer's rows are padded, by type of device. Tensor cores multiply matrices with
# an odd number of rows, such as a vocabulary of 50,257, at a fraction of their rate.
VOCABULARY_MULTIPLES = {"cuda": 64}
# Number of elements of the weight's gradient that a CPU adds at once (at least 256 rows). Each partial
# product stays in the cache, and no second copy of the whole weight is allocated.
CPU_GRADIENT_ELEMENTS = 1 << 19
# Number of queries in a block where no fused kernel computes the attention. Smaller blocks mean more calls;
# larger ones compute more pairs outside of a window.
QUERIES_PER_BLOCK = 256


def choose_chunk_tokens(tokens: int, vocabulary: int, element_size: int, on_cpu: bool) -> int:
    """Return the number of tokens in a chunk, whose logits exist at once.

    Args:
        tokens: Number of tokens in all.
        vocabulary: Number of rows of the output layer.
        element_size: Bytes of a logit.
        on_cpu: Whether a CPU computes the loss.
    """
    chunk_bytes, min_tokens = CPU_LOGITS_CHUNK if on_cpu else GPU_LOGITS_CHUNK
    chunks = math.ceil(tokens / max(min_tokens, chunk_bytes // (vocabulary * element_size)))
    # Chunks of equal size: a short last one would cost as many passes as a full one.
    return max(1, math.ceil(tokens / max(1, chunks)))


def choose_block_rows(vocabulary: int, on_cpu: bool) -> int:
    """Return the number of tokens whose softmax over the vocabulary is computed in fp32 at once."""
    return max(1, (CPU_SOFTMAX_ELEMENTS if on_cpu else GPU_SOFTMAX_ELEMENTS) // vocabulary)


def compute_padded_vocabulary(vocabulary: int, device_type: str) -> int:
    """Return the number of rows of an output layer after padding for this type of device."""
    return vocabulary + -vocabulary % VOCABULARY_MULTIPLES.get(device_type, 1)
