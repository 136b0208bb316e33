"""Random numbers of a step and of data sets: functions of a seed and a position; a step's are its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray


def derive_seed(*key: int) -> int:
    """64 random bits that stand for the key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def seed_step(seed: int, step: int, seed_rank: int) -> None:
    """Makes a step's random numbers (dropout) a pure function of seed, step and rank.

    No generator state needs to be saved, and a resumed run draws what the unbroken one would have drawn.
    """
    bits = derive_seed(seed, step, seed_rank) % 2**32
    torch.manual_seed(bits)
    np.random.seed(bits)
    random.seed(bits)


def scrambled(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014), of each; arithmetic is modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seeds_at(seed: int, position: int, count: int) -> list[int]:
    """64 random bits for each of the positions from `position` on: a call for a batch, not for a sample."""
    positions = np.arange(position, position + count, dtype=np.uint64)
    return scrambled(positions ^ np.uint64(derive_seed(seed))).tolist()


def seed_all(bits: int) -> None:
    """Every generator that a data set may draw from on the host, by these random bits."""
    seed = bits % 2**32  # numpy takes no more
    # torch.manual_seed would seed the GPUs' generators too, which dropout draws from.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def own_random_numbers(*key: int) -> Iterator[None]:
    """What is drawn inside depends on `key` alone, and leaves a step's dropout outside as it is."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    seed_all(derive_seed(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
