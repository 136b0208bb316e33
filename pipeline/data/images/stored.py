"""What stored, labelled images have in common, wherever they are stored. Not decoded.

Class numbers follow the names of the training data; held-out images take theirs by name.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.config.loading import did_you_mean
from pipeline.errors import DataError

TAIL = 4096  # bytes


@dataclass(frozen=True)
class LabelledImages(ABC):
    """Images of one split."""

    class_names: tuple[str, ...]
    """By class number."""
    labels: NDArray[np.int64]
    """(N,) class numbers."""

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The image as stored. OSError where it cannot be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """What messages call it."""

    @abstractmethod
    def keys(self, indices: range) -> list[bytes]:
        """For each image what its hash is made of: its size and its end, which spares reading the whole."""

    @abstractmethod
    def digest(self) -> bytes:
        """Changes when images come, go or change places."""


def key_of(size: int, tail: bytes) -> bytes:
    """8 bytes, equal for equal files. Compressed pixels end as individually as they go on."""
    return hashlib.blake2b(size.to_bytes(8, "big") + tail, digest_size=8).digest()


def check_classes(names: Iterable[str], where: str) -> tuple[str, ...]:
    """The names, where there are at least two."""
    found = tuple(names)
    if len(found) < 2:
        raise DataError(f"{where}: one class only ({', '.join(found)}); telling classes apart takes two")
    return found


def check_known(names: Iterable[str], known: tuple[str, ...], where: str) -> None:
    """Held-out images are of the training images' classes."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise DataError(
            f"{where}: class {unknown[0]!r} is not among the training images' "
            f"{len(known)} classes{did_you_mean(unknown[0], known[:20])}; the class folders of both must be "
            "called the same"
        )
