"""Weights out of a checkpoint as safetensors, a stretch at a time: memory does not grow with the model.

Beside them what transformers needs to open the folder, where the run had a transformers model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import foreign
from pipeline.checkpoint import adapters
from pipeline.checkpoint.find import find_checkpoint
from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.reader import KINDS, weights_of
from pipeline.checkpoint.shard_file import hash_stretch, opened
from pipeline.checkpoint.weight_writer import SINGLE, source_of, write_weights
from pipeline.durable import synchronise
from pipeline.errors import CheckpointError
from pipeline.models import adapter_files
from pipeline.models.transformers_folder import auto_class_for
from pipeline.redaction import redact_text
from pipeline.shards import WEIGHT

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
            single = adapter_files.WEIGHTS if is_adapter else SINGLE
            files = write_weights(source, partial, DTYPES[dtype], most, advance, single)
            off = source.rounding_error
        for path in [*partial.iterdir(), partial]:
            synchronise(path)
        sizes = [(partial / file).stat().st_size for file in files]
        partial.rename(out)  # takes the place of an empty folder
        synchronise(out.parent)
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
        config: dict[str, Any] = json.loads(foreign.read_plain(folder / "config.json", foreign.DESCRIPTION))
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
        content = foreign.read_plain(run / "recipe.yaml", foreign.CONFIGURATION, follow_links=False)
        recipe = redact_text(content.decode(errors="replace"))
    except OSError:
        recipe = ""
    return f"# {run.name}\n\n| | |\n|---|---|\n{table}\n\nThe recipe:\n\n```yaml\n{recipe}```\n"
