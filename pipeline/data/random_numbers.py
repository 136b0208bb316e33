"""Random numbers of steps and data sets, as functions of a seed and a position.

Generators are reseeded each step. So no generator state is saved, and a resumed run draws the same numbers as
the uninterrupted one.
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
    """Return 64 random bits that follow from the key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def seed_step(seed: int, step: int, seed_rank: int) -> None:
    """Seed all generators, so that a step's random numbers (dropout) depend on seed, step and rank alone.

    Therefore no checkpoint stores the state of a generator, and a resumed run draws the same numbers as one
    that was never interrupted.
    """
    bits = derive_seed(seed, step, seed_rank) % 2**32
    torch.manual_seed(bits)
    np.random.seed(bits)
    random.seed(bits)


def scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele, Lea & Flood 2014) to each value, modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_seeds(seed: int, position: int, count: int) -> list[int]:
    """Return 64 random bits for each of `count` positions from `position` on."""
    positions = np.arange(position, position + count, dtype=np.uint64)
    return scramble(positions ^ np.uint64(derive_seed(seed))).tolist()


def seed_all(bits: int) -> None:
    """Seed every host generator that a data set may draw from: those of torch, numpy and Python."""
    seed = bits % 2**32  # numpy accepts at most 32 bits
    # torch.manual_seed would also seed the GPUs' generators, from which dropout draws.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def isolate_random_numbers(*key: int) -> Iterator[None]:
    """Seed the host generators with `key` inside of the context, and restore their states afterwards."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    seed_all(derive_seed(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def derive_token_keys(batch: Mapping[str, Any], *key: int) -> Tensor:
    """Return 32 random bits for each token, and the number of tokens in its document.

    The noise of NEFTune is made of these keys. The bits are a hash of `key`, all ids of the document and the
    position in it. So a document has the same bits on any rank, in any row and micro-batch, with or without
    padding, and no sample number is needed, which packed rows do not have. The price is that equal documents
    have equal bits.

    Args:
        batch: Batch with `input_ids` (B, T). A document begins with each row, and where `position_ids` do not
            count up by 1. With an `attention_mask` (B, T), each row is a document without the masked tokens.
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
    counts, begins = _find_documents(host, ids)
    starts = np.flatnonzero(begins)
    document = np.cumsum(begins.reshape(-1)) - 1
    before = np.cumsum(counts) - counts
    places = (before - before[starts][document]).astype(np.uint64)
    words = scramble(ids.cpu().numpy().reshape(-1).astype(np.uint64) ^ (places << np.uint64(32))) * counts
    of_document = scramble(np.add.reduceat(words, starts) ^ np.uint64(derive_seed(*key)))
    bits = scramble(of_document[document] + places) >> np.uint64(32)
    lengths = np.add.reduceat(counts, starts)[document].astype(np.uint64)
    keys = (bits << np.uint64(32)) | lengths
    return torch.from_numpy(keys.view(np.int64).reshape(tuple(ids.shape)))


def _find_documents(host: Mapping[str, Any], ids: Tensor) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return (B * T,) 0 for masked tokens and 1 for others, and (B, T) whether a document begins."""
    begins = np.zeros(tuple(ids.shape), np.bool_)
    begins[:, 0] = True
    mask = host.get("attention_mask")
    positions = host.get("position_ids")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return (mask.cpu().numpy() != 0).reshape(-1).astype(np.uint64), begins
    if mask is None and isinstance(positions, Tensor) and positions.shape == ids.shape:
        counted = positions.cpu().numpy()
        begins[:, 1:] = counted[:, 1:] != counted[:, :-1] + 1
    return np.ones(ids.numel(), np.uint64), begins
