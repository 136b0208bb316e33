"""Tokens in memory, in the form that prepared ones have on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass
class Part:
    """Documents one behind the other; see pipeline.data.packing.TokenPart."""

    tokens: NDArray[Any]
    ends: NDArray[Any]
    learned: NDArray[Any] | None = None


@dataclass
class Store:
    parts: list[Part]
