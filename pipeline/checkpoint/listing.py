"""Looks into the checkpoints of a run: what there is, whether it verifies, what changed between two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.catalog import manifest_of, named_in, steps_in
from pipeline.checkpoint.manifest import MANIFEST, BestBy, Manifest
from pipeline.checkpoint.reader import CheckpointReader, stretches
from pipeline.checkpoint.verify import THREADS, Damage, check_content, check_sizes, look
from pipeline.errors import CheckpointError
from pipeline.shards import Region


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a run. Of one whose manifest cannot be read, only step and path are known."""

    step: int
    path: Path
    problem: str | None
    """Why it does not count, in one line: the file, and where it is known the tensor; None: it counts."""
    num_files: int = 0
    num_here: int = 0
    """Fewer than num_files: other machines have the rest."""
    num_bytes: int = 0
    """Of the files here."""
    tokens: int | None = None
    """Seen until then; None: not known."""
    split: str | None = None
    eval_loss: float | None = None
    best_by: BestBy | None = None


def list_checkpoints(run: Path) -> list[CheckpointRow]:
    """The checkpoints of a run directory, oldest first. Only manifests and sizes are looked at."""
    folder = run / "checkpoints"
    counted = steps_in(folder)
    rows = [_row(step, path) for step, path in counted.items()]
    for step, path in named_in(folder).items():
        if step not in counted:
            why = "it is a link, and what lies outside the run is not read"
            rows.append(CheckpointRow(step, path, why if path.is_symlink() else f"it has no {MANIFEST}"))
    return sorted(rows, key=lambda row: row.step)


def _row(step: int, path: Path) -> CheckpointRow:
    try:
        manifest = manifest_of(path)
    except CheckpointError as error:
        return CheckpointRow(step, path, str(error))
    damages = check_sizes(manifest)
    _, absent = look(manifest)
    here = [file for file in manifest.files if file.name not in absent]
    tokens = manifest.state.get("tokens_seen")
    return CheckpointRow(
        step=step,
        path=path,
        problem=_problem(damages),
        num_files=len(manifest.files),
        num_here=len(here),
        num_bytes=sum(file.bytes for file in here),
        tokens=int(tokens) if isinstance(tokens, (int, float)) else None,
        split=f"{manifest.split}, {manifest.world_size} rank{'s' * (manifest.world_size > 1)}",
        eval_loss=manifest.eval_loss,
        best_by=manifest.best_by,
    )


def read_through(row: CheckpointRow, advance: Callable[[int], object]) -> CheckpointRow:
    """The row once every byte here has been compared with its checksum.

    Args:
        advance: Called with the number of bytes read, a few files at a time.
    """
    if row.problem is not None:
        return row
    try:
        manifest = manifest_of(row.path)
    except CheckpointError as error:
        return replace(row, problem=str(error))
    damages: list[Damage] = []
    for start in range(0, len(manifest.files), THREADS):
        few = manifest.files[start : start + THREADS]
        damages += check_content(manifest, [file.name for file in few])
        advance(sum(file.bytes for file in few))
    return replace(row, problem=_problem(damages))


def _problem(damages: Sequence[Damage]) -> str | None:
    if not damages:
        return None
    others = len(damages) - 1
    return f"{damages[0]}; and {others} more file{'s' * (others > 1)}" if others else str(damages[0])


@dataclass(frozen=True)
class TensorChange:
    """How one tensor of two checkpoints differs."""

    name: str
    kind: str
    num_values: int
    num_changed: int
    max_difference: float
    """Largest absolute difference."""
    relative: float
    """Norm of the difference over the norm of the first."""
    remark: str | None
    """Where the two cannot be compared: only in one, or other shapes."""


def diff(first: Manifest, second: Manifest, advance: Callable[[int], object]) -> Iterator[TensorChange]:
    """Every tensor that differs, in the first checkpoint's order. Memory: some MB, however large they are.

    Args:
        advance: Called with the number of values of the first that are done.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        shapes_a, shapes_b = a.names(), b.names()
        for name, kind in {**shapes_a, **shapes_b}:
            shape_a, shape_b = shapes_a.get((name, kind)), shapes_b.get((name, kind))
            if shape_a is None or shape_b is None:
                only = first if shape_b is None else second
                size = math.prod(shape_a or shape_b or ())
                yield TensorChange(name, kind, size, size, math.nan, math.nan, f"only in {only.folder.name}")
            elif shape_a != shape_b:
                size = math.prod(shape_a)
                remark = f"{list(shape_a)} became {list(shape_b)}"
                yield TensorChange(name, kind, size, size, math.nan, math.nan, remark)
            else:
                change = _compare(a, b, name, kind, shape_a)
                if change.num_changed:
                    yield change
            advance(0 if shape_a is None else math.prod(shape_a))


def _compare(
    a: CheckpointReader, b: CheckpointReader, name: str, kind: str, shape: tuple[int, ...]
) -> TensorChange:
    size, changed, largest = math.prod(shape), 0, 0.0
    squares_of_difference = squares = 0.0
    for region in stretches(shape):
        one, other = (_values(reader, name, kind, region) for reader in (a, b))
        differs = ~((one == other) | (one.isnan() & other.isnan()))
        changed += int(differs.sum())
        # Where both are infinite alike, or both NaN, the difference is none.
        difference = torch.where(differs, (other - one).abs(), 0.0)
        # What cannot be measured, from or to NaN, is infinitely far.
        largest = max(largest, float(difference.nan_to_num(math.inf, math.inf).max()))
        squares_of_difference += float(difference.square().sum())
        squares += float(one.square().sum())
    relative = math.sqrt(squares_of_difference / squares) if squares else math.inf
    return TensorChange(name, kind, size, changed, largest, relative, None)


def _values(reader: CheckpointReader, name: str, kind: str, region: Region) -> Tensor:
    values = torch.empty(region.length, dtype=torch.float64)
    reader.read(name, kind, region, values)
    return values
