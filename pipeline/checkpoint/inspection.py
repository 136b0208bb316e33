"""Looks into the checkpoints of a run: what there is, whether it verifies, what changed between two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.folders import check, steps_in
from pipeline.checkpoint.manifest import read_manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.verify import verify
from pipeline.engine.fragments import Region
from pipeline.errors import CheckpointError

VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a run."""

    step: int
    path: Path
    tokens: int | None
    """Seen until then; None: not known."""
    num_bytes: int | None
    split: str | None
    eval_loss: float | None
    problem: str | None
    """Why it does not verify; None: it does."""


def list_checkpoints(run: Path, contents: bool = False) -> list[CheckpointRow]:
    """The checkpoints of a run directory, oldest first.

    Args:
        contents: Read all of them; else only manifests and sizes are looked at.
    """
    return [_row(step, path, contents) for step, path in reversed(steps_in(run / "checkpoints").items())]


def _row(step: int, path: Path, contents: bool) -> CheckpointRow:
    problem = None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return CheckpointRow(step, path, None, None, None, None, str(error))
    try:
        check(path)
        damages = verify(path) if contents else []
        problem = str(damages[0]) if damages else None
    except CheckpointError as error:
        problem = str(error)
    tokens, loss = manifest.state.get("tokens_seen"), manifest.state.get("eval_loss")
    return CheckpointRow(
        step=step,
        path=path,
        tokens=int(tokens) if isinstance(tokens, (int, float)) else None,
        num_bytes=manifest.num_bytes,
        split=manifest.split,
        eval_loss=float(loss) if isinstance(loss, (int, float)) else None,
        problem=problem,
    )


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


def diff(first: Path, second: Path) -> Iterator[TensorChange]:
    """Every tensor that differs, in the first checkpoint's order. Memory: some MB, however large they are.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    with (
        CheckpointReader(first, read_manifest(first)) as a,
        CheckpointReader(second, read_manifest(second)) as b,
    ):
        shapes_a, shapes_b = a.names(), b.names()
        for name, kind in {**shapes_a, **shapes_b}:
            shape_a, shape_b = shapes_a.get((name, kind)), shapes_b.get((name, kind))
            if shape_a is None or shape_b is None:
                only = first if shape_b is None else second
                size = math.prod(shape_a or shape_b or ())
                yield TensorChange(name, kind, size, size, math.nan, math.nan, f"only in {only.name}")
            elif shape_a != shape_b:
                size = math.prod(shape_a)
                remark = f"{list(shape_a)} became {list(shape_b)}"
                yield TensorChange(name, kind, size, size, math.nan, math.nan, remark)
            else:
                change = _compare(a, b, name, kind, shape_a)
                if change.num_changed:
                    yield change


def _compare(
    a: CheckpointReader, b: CheckpointReader, name: str, kind: str, shape: tuple[int, ...]
) -> TensorChange:
    size, changed, largest = math.prod(shape), 0, 0.0
    squares_of_difference = squares = 0.0
    for start in range(0, size, VALUES_AT_ONCE):
        region = Region(shape, None, start, min(VALUES_AT_ONCE, size - start))
        one, other = (_values(reader, name, kind, region) for reader in (a, b))
        differs = ~((one == other) | (one.isnan() & other.isnan()))
        changed += int(differs.sum())
        # Where both are infinite alike, or both NaN, the difference is none.
        difference = torch.where(differs, (other - one).abs(), 0.0)
        largest = max(largest, float(difference.max()))
        squares_of_difference += float(difference.square().sum())
        squares += float(one.square().sum())
    relative = math.sqrt(squares_of_difference / squares) if squares else math.inf
    return TensorChange(name, kind, size, changed, largest, relative, None)


def _values(reader: CheckpointReader, name: str, kind: str, region: Region) -> Tensor:
    values = torch.empty(region.length, dtype=torch.float64)
    reader.read(name, kind, region, values)
    return values
