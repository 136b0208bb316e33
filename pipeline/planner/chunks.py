"""How large the pieces are in which losses and attention are computed: for the code that does and for the
planner. Imports no torch.
"""

from __future__ import annotations

import math

# Bytes of a chunk's logits, and tokens where these are more: products are fast from a few hundred tokens on,
# and adding up the weight's gradient costs a pass over it a chunk. 5,300 tokens on a GPU in bf16 with 50k
# words; on a CPU less than the 32 MiB from which on glibc maps a block anew in each step.
CPU_CHUNK = (30 << 20, 512)
GPU_CHUNK = (1 << 29, 1)
# fp32 elements that are worked on at once: 1 MiB stays in a core's cache; a GPU wants few, large kernels.
CPU_BLOCK = 1 << 18
GPU_BLOCK = 1 << 26
# By kind of device, what a layer's words are filled up to a multiple of: tensor cores take rows of logits of
# an odd length, such as 50,257 words', at a fraction of their rate.
MULTIPLE = {"cuda": 64}
# Elements of the weight's gradient that are added up at once on a CPU, 256 words or more: the product is
# still cached, and neither it nor its fp32 copy is as large as the weight.
CPU_PART = 1 << 19
# Queries of a block of attention that no kernel computes: fewer are more calls, more are more pairs beside a
# window.
QUERIES = 256


def chunk_of_tokens(tokens: int, words: int, element_size: int, on_cpu: bool) -> int:
    """Tokens whose logits are there at once."""
    most, least = CPU_CHUNK if on_cpu else GPU_CHUNK
    chunks = math.ceil(tokens / max(least, most // (words * element_size)))
    return max(1, math.ceil(tokens / max(1, chunks)))  # alike: a remnant would cost as many passes


def block_of_rows(words: int, on_cpu: bool) -> int:
    """Rows of logits that are worked on in fp32 at once."""
    return max(1, (CPU_BLOCK if on_cpu else GPU_BLOCK) // words)


def filled_up(words: int, kind: str) -> int:
    """Words of a layer with those that only fill it up; kind: of the device."""
    return words + -words % MULTIPLE.get(kind, 1)
