"""Where each shard of a rank lies in its safetensors file, known before any of them is written.

The header follows from the shards' names, dtypes and lengths alone: a file is checked against its manifest
to the last byte. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.shards import Shard

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8


@dataclass(frozen=True)
class Layout:
    """A whole file: its header, and its shards with the byte of the file at which each begins."""

    header: bytes
    shards: tuple[Shard, ...]
    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @staticmethod
    def of(shards: Iterable[Shard]) -> Layout:
        """Lays the shards out one after the other. Memory: names and numbers, no values.

        Raises:
            TypeError: a dtype has no name in safetensors.
        """
        shards = tuple(shard.described(shard.checksum) for shard in shards)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        seen: Counter[tuple[str, str]] = Counter()
        keys: list[str] = []
        begins: list[int] = []
        end = 0
        for shard in shards:
            if shard.dtype not in DTYPE_NAMES:
                raise TypeError(f"{shard.title}: {shard.dtype} for {shard.region}")
            # The format has no holes, and readers want a tensor at a multiple of its element's size.
            if gap := -end % shard.dtype.itemsize:
                entries[f"padding/{len(entries)}"] = _entry("U8", gap, end, gap)
                end += gap
            key = f"{shard.kind}/{shard.name}/{seen[shard.kind, shard.name]}"
            seen[shard.kind, shard.name] += 1
            entries[key] = _entry(DTYPE_NAMES[shard.dtype], shard.region.length, end, shard.num_bytes)
            keys.append(key)
            begins.append(end)
            end += shard.num_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        offsets = tuple(len(header) + begin for begin in begins)
        return Layout(header, shards, tuple(keys), offsets, len(header) + end)


def _entry(dtype: str, length: int, begin: int, num_bytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [length], "data_offsets": [begin, begin + num_bytes]}
