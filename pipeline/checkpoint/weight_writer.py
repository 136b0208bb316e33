"""Weights into safetensors, a stretch at a time: a checkpoint's own, or of an adapter with its base."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.checkpoint import adapters
from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.merged_weights import MergedWeights
from pipeline.checkpoint.reader import VALUES_AT_ONCE, CheckpointReader, stretches, weights_of
from pipeline.checkpoint.shard_file import DTYPE_NAMES, as_bytes, header_of
from pipeline.errors import CheckpointError
from pipeline.shards import WEIGHT, Region

SINGLE = "model.safetensors"
Wanted = tuple[str, tuple[int, ...], torch.dtype]  # kind, shape, dtype


class Source(Protocol):
    """Tensors to write."""

    wanted: Mapping[str, Wanted]
    """By the names they will have."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, where nobody asks for another."""
        ...

    @property
    def rounding_error(self) -> float | None:
        """Of what was read of a base in 4 bits, see MergedWeights; None: there is none."""
        ...

    def read(self, name: str, kind: str, region: Region, out: Tensor) -> None: ...


class Saved:
    """See Source: a checkpoint's own."""

    dtype = torch.float32
    rounding_error: float | None = None

    def __init__(self, reader: CheckpointReader, names: Mapping[str, str] | None = None):
        """
        Args:
            names: Name to write -> name in the checkpoint; None: they are the same.
        """
        self._reader = reader
        weights = weights_of(reader.manifest)
        self._names = names or {name: name for name in weights}
        self.wanted: Mapping[str, Wanted] = {new: weights[name] for new, name in self._names.items()}

    def read(self, name: str, kind: str, region: Region, out: Tensor) -> None:
        self._reader.read(self._names[name], kind, region, out)


class Merged:
    """See Source: of an adapter with its base, one tensor at a time."""

    def __init__(self, weights: MergedWeights):
        self._weights = weights
        self._name, self._values = "", torch.empty(0)
        entries = weights.entries.items()
        self.wanted: Mapping[str, Wanted] = {
            name: (WEIGHT, entry.shape, adapters.dtype_of(entry)) for name, entry in entries
        }

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def rounding_error(self) -> float | None:
        return self._weights.rounding_error

    def read(self, name: str, kind: str, region: Region, out: Tensor) -> None:
        if name != self._name:
            self._name, self._values = name, self._weights.read(name).flatten()
        out.copy_(self._values[region.start : region.start + region.length])


@contextmanager
def source_of(manifest: Manifest, is_adapter: bool, merge: bool) -> Iterator[Source]:
    if merge:
        with closing(MergedWeights(manifest, open_checkpoint)) as weights:
            yield Merged(weights)
        return
    with CheckpointReader(manifest) as reader:
        yield Saved(reader, adapters.peft_names(manifest) if is_adapter else None)


def write_weights(
    source: Source,
    folder: Path,
    dtype: torch.dtype,
    most: int | None,
    advance: Callable[[int], object],
    single: str,
) -> list[str]:
    """The files: one, or several and their index, by the names that transformers looks for."""
    wanted = {
        name: (kind, shape, dtype if kind == WEIGHT else saved)
        for name, (kind, shape, saved) in source.wanted.items()
    }
    sizes = {name: math.prod(shape) * of.itemsize for name, (_, shape, of) in wanted.items()}
    total, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if total > free:
        raise OSError(errno.ENOSPC, f"{total / 1e9:.3g} GB are needed and {free / 1e9:.3g} GB are free")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if most is not None and filled and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = [single]
    if len(shards) > 1:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), "utf-8")
    for file, names in zip(files, shards, strict=True):
        _write_shard(source, folder / file, {name: wanted[name] for name in names}, advance)
    return files


def _write_shard(
    source: Source,
    path: Path,
    wanted: Mapping[str, Wanted],
    advance: Callable[[int], object],
) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (_, shape, dtype) in wanted.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        entries[name] = entry
    # One for all: where each stretch takes memory of its own, glibc's heap is left with holes that the next,
    # aligned, does not fit into, and grows by ten of them.
    sizes = (min(math.prod(shape), VALUES_AT_ONCE) * dtype.itemsize for _, shape, dtype in wanted.values())
    buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8)
    with path.open("wb") as file:
        file.write(header_of(entries))
        for name, (kind, shape, dtype) in wanted.items():
            for region in stretches(shape):
                values = buffer[: region.length * dtype.itemsize].view(dtype)
                source.read(name, kind, region, values)
                if dtype == torch.float16 and not values.isfinite().all():
                    raise CheckpointError(f"{name} has values that fp16 cannot hold; export bf16 or fp32")
                file.write(as_bytes(values).numpy().data)
                advance(region.length)
