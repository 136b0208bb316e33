"""Weights out of a checkpoint as safetensors, a stretch at a time: memory does not grow with the model.

They are the checkpoint's own, or an adapter's merged with its base. Beside them lies what transformers
needs to open the folder, where the run had a transformers model.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.checkpoint import adapters
from pipeline.checkpoint.adapters import MergedWeights
from pipeline.checkpoint.find import find_checkpoint
from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.reader import KINDS, VALUES_AT_ONCE, CheckpointReader, stretches, weights_of
from pipeline.checkpoint.shard_file import DTYPE_NAMES, as_bytes, hash_stretch, header_of, opened
from pipeline.checkpoint.shards import WEIGHT, Region
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import CheckpointError
from pipeline.files import CONFIGURATION_LIMIT, DESCRIPTION_LIMIT, format_bytes, publish_folder, read_plain
from pipeline.models.adapters import WEIGHTS as ADAPTER_FILE
from pipeline.models.transformers_facts import auto_class_for
from pipeline.redaction import redact_text

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


@phase(Phase.WEIGHTS)
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
        raise OSError(errno.ENOSPC, f"{format_bytes(total)} are needed and {format_bytes(free)} are free")
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


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5_000_000_000  # as transformers cuts its own
OF_A_MODEL = ("config.json", "generation_config.json")  # beside an adapter transformers would take it for one
DESCRIPTION = "model"  # folder of a run directory with config.json and the tokenizer


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: list[Path]
    num_bytes: int
    auto_class: str | None
    """That of transformers whose `from_pretrained` opens it as a model; None: it is none, or an adapter."""
    is_adapter: bool
    """peft opens it, over its base."""
    rounding_error: float | None = None
    """Of a base in 4 bits that was merged: ||W - W in 4 bits|| / ||W|| over its quantised layers."""

    @property
    def is_transformers(self) -> bool:
        """transformers opens it as a model."""
        return self.auto_class is not None


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: str | int = "last",
    dtype: str | None = None,
    merge: bool = False,
    advance: Callable[[int], object] = lambda count: None,
) -> Exported:
    """Write a checkpoint's weights, whatever its split, to a folder. transformers opens it where the model
    is one of its own, and peft where it is an adapter. By one process; needs neither a GPU nor the run's
    machines.

    Args:
        run: Run directory, or one of its checkpoints.
        out: Must not exist, or be empty.
        step: Which checkpoint of the run: a step, `last` or `best`.
        dtype: Of the weights: `fp32`, `bf16` or `fp16`. Buffers stay what they are. None: fp32, or, of an
            adapter that is merged, that of its base.
        merge: An adapter and its base become one model; the base must lie where the run had it.
        advance: Called with the number of values done: each is read once to verify it, once to write it.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged; `out` cannot be written.
    """
    directory, _, manifest = find_checkpoint(Path(run), str(step), "step")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r}: expected {', '.join(DTYPES)}")
    if merge and adapters.KEY not in manifest.state:
        raise CheckpointError(f"{run} is no adapter: its checkpoints hold the whole model; leave merge out")
    return write_export(directory, manifest, Path(out), dtype, advance, merge=merge)


def write_export(
    run: Path,
    manifest: Manifest,
    out: Path,
    dtype: str | None,
    advance: Callable[[int], object],
    shard_bytes: int = SHARD_BYTES,
    merge: bool = False,
) -> Exported:
    """As `export`, of a checkpoint that was found: beside `out` first, and then under its name.

    Args:
        shard_bytes: Most that a file of a transformers folder holds; a larger tensor has one of its own.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; choose another folder, or remove it")
    _verify(manifest, advance)
    partial = out.with_name(f"{out.name}.exporting")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        is_adapter = adapters.KEY in manifest.state and not merge
        with source_of(manifest, is_adapter, merge) as source:
            dtype = dtype or next((key for key, own in DTYPES.items() if own == source.dtype), "fp32")
            config = _copy_description(run / DESCRIPTION, partial, dtype)
            auto_class = None if config is None or is_adapter else auto_class_for(config)
            (partial / "README.md").write_text(model_card(run, manifest, dtype), "utf-8")
            most = None if auto_class is None else shard_bytes
            if is_adapter:
                adapters.refuse_changed_base_if_here(manifest, open_checkpoint)
                for name in OF_A_MODEL:
                    (partial / name).unlink(missing_ok=True)
                adapters.write_peft_config(manifest, partial)
            single = ADAPTER_FILE if is_adapter else SINGLE
            files = write_weights(
                source, partial, dtype=DTYPES[dtype], most=most, advance=advance, single=single
            )
            off = source.rounding_error
        sizes = [(partial / file).stat().st_size for file in files]
        publish_folder(partial, out, partial.iterdir())
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}; choose another") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    written = [out / file for file in files]
    return Exported(written, sum(sizes), auto_class, is_adapter, off)


def _verify(manifest: Manifest, advance: Callable[[int], object]) -> None:
    """Compares what will be read with its checksums. Not Adam's moments: they are twice as much.

    Raises:
        CheckpointError: a value is not what was written, or cannot be read.
    """
    for file in manifest.files:
        path, about = manifest.folder / file.name, f"rank {file.rank} wrote it on {file.host}"
        layout = manifest.layout_of(file)
        wanted = [
            (shard, offset)
            for shard, offset in zip(layout.shards, layout.offsets, strict=True)
            if shard.kind in KINDS
        ]
        try:
            with opened(path) if wanted else nullcontext(-1) as descriptor:
                for shard, offset in wanted:
                    checksum = hash_stretch(descriptor, offset, shard.num_bytes)
                    if checksum.hexdigest() != shard.checksum:
                        raise CheckpointError(
                            f"{path} is damaged: {shard.title} is not what was written, by its checksum "
                            f"({about}); nothing is exported; choose another step with --step"
                        )
                    advance(shard.region.length)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror or error}; {about}; bring it here"
            ) from None


def _copy_description(source: Path, folder: Path, dtype: str) -> dict[str, Any] | None:
    """config.json (returned), generation config, tokenizer; None: the run had no transformers model."""
    if not (source / "config.json").is_file():
        return None
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.is_symlink():
            shutil.copyfile(file, folder / file.name)
    try:
        config: dict[str, Any] = json.loads(read_plain(folder / "config.json", DESCRIPTION_LIMIT))
        config["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{source / 'config.json'} is no JSON ({error}); bring it back") from None
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return config


def model_card(run: Path, manifest: Manifest, dtype: str) -> str:
    """What the weights are, in words and numbers of the run."""
    state = manifest.state
    loss = manifest.eval_loss
    values = sum(math.prod(shape) for kind, shape, _ in weights_of(manifest).values() if kind == WEIGHT)
    ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}"
    rows = [
        ("parameters", f"{values:,}"),
        ("steps", f"{manifest.global_step:,}"),
        ("tokens or samples seen", f"{int(state.get('tokens_seen') or state.get('samples_seen') or 0):,}"),
        ("evaluation loss", "not measured" if loss is None else f"{loss:.4f}"),
        ("trained as", f"{manifest.split}, {ranks}"),
        ("weights", dtype),
    ]
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    try:  # a link may lead anywhere
        content = read_plain(run / "recipe.yaml", CONFIGURATION_LIMIT, follow_links=False)
        recipe = redact_text(content.decode(errors="replace"))
    except OSError:
        recipe = ""
    return f"# {run.name}\n\n| | |\n|---|---|\n{table}\n\nThe recipe:\n\n```yaml\n{recipe}```\n"
