"""Tokens in memory, in the form that prepared ones have on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass
class Part:
    """Documents one behind the other; see pipeline.data.prepared.part_files.TokenPart."""

    tokens: NDArray[Any]
    ends: NDArray[Any]
    loss_mask: NDArray[Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class Store:
    parts: list[Part]
