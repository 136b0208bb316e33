"""Where each fragment of a rank lies in its safetensors file, known before any of them is written.

The header follows from the fragments' names, dtypes and lengths alone: a file is checked against its manifest
to the last byte. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.engine.fragments import Fragment, Region

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
class Slot:
    """One fragment's place in a file."""

    name: str
    kind: str
    dtype: str
    region: Region

    @property
    def num_bytes(self) -> int:
        return self.region.length * DTYPES[self.dtype].itemsize

    @staticmethod
    def of(fragment: Fragment) -> Slot:
        """The place that a fragment asks for.

        Raises:
            TypeError: its dtype has no name in safetensors, or it is not 1-D of the region's length.
        """
        tensor, region = fragment.tensor, fragment.region
        if tensor.dtype not in DTYPE_NAMES or tuple(tensor.shape) != (region.length,):
            raise TypeError(
                f"{fragment.kind} of {fragment.name}: {tuple(tensor.shape)} {tensor.dtype} for {region}"
            )
        return Slot(fragment.name, fragment.kind, DTYPE_NAMES[tensor.dtype], region)


@dataclass(frozen=True)
class Layout:
    """A whole file: its header, and the slots with the byte of the file at which each begins."""

    header: bytes
    slots: tuple[Slot, ...]
    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @staticmethod
    def of(slots: Iterable[Slot]) -> Layout:
        """Lays the slots out one after the other. Memory: names and numbers, no values."""
        slots = tuple(slots)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        seen: Counter[tuple[str, str]] = Counter()
        keys: list[str] = []
        begins: list[int] = []
        end = 0
        for slot in slots:
            # The format has no holes, and readers want a tensor at a multiple of its element's size.
            if gap := -end % DTYPES[slot.dtype].itemsize:
                entries[f"padding/{len(entries)}"] = _entry("U8", gap, end, gap)
                end += gap
            key = f"{slot.kind}/{slot.name}/{seen[slot.kind, slot.name]}"
            seen[slot.kind, slot.name] += 1
            entries[key] = _entry(slot.dtype, slot.region.length, end, slot.num_bytes)
            keys.append(key)
            begins.append(end)
            end += slot.num_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        offsets = tuple(len(header) + begin for begin in begins)
        return Layout(header, slots, tuple(keys), offsets, len(header) + end)


def _entry(dtype: str, length: int, begin: int, num_bytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [length], "data_offsets": [begin, begin + num_bytes]}
