"""Random numbers of data sets: functions of a seed and a position, that leave those of the step alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mixed(*key: int) -> int:
    """64 random bits that stand for the key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


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
    seed_all(mixed(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
