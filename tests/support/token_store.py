"""Holds tokens in memory, in the form of prepared tokens on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass
class Part:
    """Documents, one after the other; has the fields of pipeline.data.prepared.part_files.TokenPart."""

    tokens: NDArray[Any]
    ends: NDArray[Any]
    loss_mask: NDArray[Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class Store:
    """Parts of one source; has the field of pipeline.data.prepared.part_files.TokenStore."""

    parts: list[Part]
