"""Random numbers of steps and data sets, as functions of a seed and a position.

Generators are seeded anew in each step and for each sample. So no checkpoint stores the state of a generator,
and a resumed run draws the same numbers as a run that was never interrupted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.data.batches import format_batch, get_host_batch
from pipeline.errors import DataError


def derive_seed(*key: int) -> int:
    """Return a random 64-bit number that follows from the numbers in `key`, such as seed and position."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def seed_step(seed: int, step: int, seed_rank: int) -> None:
    """Seed all generators, so that a step's random numbers (dropout) depend on the arguments alone.

    Args:
        seed: Seed of the run.
        step: Number of the step.
        seed_rank: `Engine.seed_rank` of this rank; ranks with equal values draw the same numbers.
    """
    seed_of_step = derive_seed(seed, step, seed_rank) % 2**32  # numpy accepts at most 32 bits
    torch.manual_seed(seed_of_step)  # also seeds the generators of the GPUs
    np.random.seed(seed_of_step)
    random.seed(seed_of_step)


def scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele, Lea & Flood 2014) to each value, modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_seeds(seed: int, position: int, count: int) -> list[int]:
    """Return a random 64-bit number for each of `count` positions from `position` on.

    One call is much faster than `count` calls of `derive_seed`, whose values are different ones.
    """
    positions = np.arange(position, position + count, dtype=np.uint64)
    return scramble(positions ^ np.uint64(derive_seed(seed))).tolist()


def seed_host_generators(seed: int) -> None:
    """Seed the generators from which a data set may draw: those of torch on the host, numpy and Python."""
    seed_32 = seed % 2**32  # numpy accepts at most 32 bits
    # torch.manual_seed would also seed the GPUs' generators, from which dropout draws.
    torch.default_generator.manual_seed(seed_32)
    np.random.seed(seed_32)
    random.seed(seed_32)


@contextmanager
def isolate_random_numbers(*key: int) -> Iterator[None]:
    """Seed the host generators with `key` inside of the context, and restore their states afterwards."""
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    seed_host_generators(derive_seed(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def derive_token_keys(batch: Mapping[str, Any], *key: int) -> Tensor:
    """Return 32 random bits for each token, and the number of tokens in its document.

    The noise of NEFTune is made of these keys. A token's bits are a hash of `key`, all ids of its document
    and its position in the document. So a document has the same bits on any rank, in any row and micro-batch,
    with or without padding. No sample number is needed, which packed rows do not have. The price is that
    equal documents have equal bits.

    Args:
        batch: Batch with `input_ids` (B, T). With an `attention_mask` (B, T), each row is one document, to
            which the masked tokens do not belong. Otherwise a document begins with each row, and where
            `position_ids` do not count up by 1.
        *key: Numbers that the bits depend on, such as seed and step.

    Returns:
        (B, T) int64 in host memory: the bits in the upper half, the number of tokens in the lower half.

    Raises:
        DataError: The batch has no `input_ids` of two dimensions.
    """
    host = get_host_batch(batch)
    ids = host.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise DataError(
            f"model.neftune_alpha: the batch has no input_ids (rows, tokens), but {format_batch(batch)}"
        )
    is_unmasked, is_begin = _find_documents(host, ids)  # is_unmasked has the values 0 and 1
    # Arrays have a value for each of the B * T tokens; `starts` and `document_hashes`, for each document.
    starts = np.flatnonzero(is_begin)
    document = np.cumsum(is_begin.reshape(-1)) - 1
    tokens_before = np.cumsum(is_unmasked) - is_unmasked
    places = (tokens_before - tokens_before[starts][document]).astype(np.uint64)  # in the token's document
    flat_ids = ids.cpu().numpy().reshape(-1).astype(np.uint64)
    token_hashes = scramble(flat_ids ^ (places << np.uint64(32))) * is_unmasked
    # A document's hash is made of the sum of its tokens' hashes, to which masked tokens add 0.
    document_hashes = scramble(np.add.reduceat(token_hashes, starts) ^ np.uint64(derive_seed(*key)))
    bits = scramble(document_hashes[document] + places) >> np.uint64(32)
    lengths = np.add.reduceat(is_unmasked, starts)[document].astype(np.uint64)
    keys = (bits << np.uint64(32)) | lengths
    return torch.from_numpy(keys.view(np.int64).reshape(tuple(ids.shape)))


def _find_documents(host: Mapping[str, Any], ids: Tensor) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return which tokens are not masked, and where documents begin.

    Returns:
        (B * T,) 1 for tokens, 0 for masked ones; (B, T) whether a document begins with the token.
    """
    is_begin = np.zeros(tuple(ids.shape), np.bool_)
    is_begin[:, 0] = True
    mask = host.get("attention_mask")
    positions = host.get("position_ids")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return (mask.cpu().numpy() != 0).reshape(-1).astype(np.uint64), is_begin
    if mask is None and isinstance(positions, Tensor) and positions.shape == ids.shape:
        numbers = positions.cpu().numpy()
        is_begin[:, 1:] = numbers[:, 1:] != numbers[:, :-1] + 1
    return np.ones(ids.numel(), np.uint64), is_begin
