"""Command `python -m pipeline checkpoints RUN [verify | diff A B]`: lists or compares checkpoints."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.find import find_checkpoint, find_run_directory
from pipeline.cli.inputs import report_file_errors
from pipeline.errors import CheckpointError
from pipeline.files import format_bytes

if TYPE_CHECKING:
    from pipeline.checkpoint.catalog import CheckpointStatus, TensorChange

HELP = "list a run's checkpoints, verify them, or compare two"
MAX_TENSORS = 20  # number of tensors that a comparison shows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = HELP
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "what",
        nargs="*",
        default=[],
        metavar="verify | diff A B",
        help="`verify` reads every byte of all checkpoints; `diff A B` compares two: steps, `last` or `best`",
    )


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        CheckpointError: A checkpoint is damaged, or there is none.
    """
    match arguments.what:
        case []:
            _list(find_run_directory(arguments.run), contents=False)
        case ["verify"]:
            _list(find_run_directory(arguments.run), contents=True)
        case ["diff", first, second]:
            _diff(find_run_directory(arguments.run), first, second)
        case other:
            raise CheckpointError(
                f"checkpoints RUN {' '.join(other)}: expected verify, or diff A B, behind the run"
            )


def _list(directory: Path, contents: bool) -> None:
    """Print a table of the checkpoints; with `contents`, read and verify every byte first."""
    from pipeline.checkpoint.catalog import list_checkpoints, verify_checkpoint
    from pipeline.cli.screen import Screen

    rows = list_checkpoints(directory)
    if not rows:
        raise CheckpointError(f"{directory} has no checkpoints yet; a run saves every checkpoint.every steps")
    screen = Screen(no_color=False)
    if contents:
        with screen.progress("verifying", sum(row.num_bytes for row in rows)) as advance:
            rows = [verify_checkpoint(row, advance) for row in rows]
    measured = {row.manifest.best_by.metric for row in rows if row.manifest and row.manifest.best_by}
    others = sorted(measured - {"loss"})
    screen.table(
        ["step", "tokens", "size", "eval loss", *(f"eval {name}" for name in others), "state", "saved by"],
        [_cells(row, others, "verified" if contents else "complete") for row in rows],
        words=["state", "saved by"],
    )
    damaged = [row for row in rows if row.problem is not None]
    for row in damaged:
        screen.line(f"{row.path.name}: {row.problem}")
    if damaged:
        are = "are" if len(damaged) > 1 else "is"
        raise CheckpointError(f"{directory}: {len(damaged)} of {len(rows)} checkpoints {are} damaged")


def _cells(row: CheckpointStatus, metrics: list[str], whole: str) -> list[str]:
    """Return the cells of a checkpoint's row; `whole` is the state of one that has all its files."""
    manifest = row.manifest
    if manifest is None:
        return [f"{row.step:,}", "", "", "", *("" for _ in metrics), _format_state(row, whole), ""]
    tokens = manifest.state.get("tokens_seen")
    loss = manifest.eval_loss
    best_by = manifest.best_by
    return [
        f"{row.step:,}",
        f"{int(tokens):,}" if isinstance(tokens, int | float) else "",
        format_bytes(row.num_bytes) if row.num_bytes else "",
        "" if loss is None else f"{loss:.4f}",
        *(f"{best_by.value:.4f}" if best_by and best_by.metric == name else "" for name in metrics),
        _format_state(row, whole),
        f"{manifest.split}, {manifest.world_size} rank{'s' * (manifest.world_size > 1)}",
    ]


def _format_state(row: CheckpointStatus, whole: str) -> str:
    if row.problem is not None or row.manifest is None:
        return "damaged"
    num_files = len(row.manifest.files)
    return whole if row.num_files_here == num_files else f"{whole}, {row.num_files_here} of {num_files} files"


def _diff(directory: Path, first: str, second: str) -> None:
    """Print a table of the tensors in which two checkpoints differ, the most important first."""
    from pipeline.checkpoint.catalog import diff_checkpoints
    from pipeline.cli.screen import Screen

    _, one, of_one = find_checkpoint(directory, first, "diff")
    _, other, of_other = find_checkpoint(directory, second, "diff")
    screen = Screen(no_color=False)
    total = sum(math.prod(shape) for shape in of_one.table.shapes.values())
    with screen.progress("comparing", total) as advance:
        changes = sorted(diff_checkpoints(of_one, of_other, advance), key=_importance)
    if not changes:
        print(f"{one.name} and {other.name} hold the same values")
        return
    screen.table(
        ["tensor", "values changed", "largest change", "relative"],
        [
            [
                f"{change.kind} of {change.name}",
                change.remark or f"{change.share:.1%}",
                "" if change.remark else f"{change.max_difference:.3g}",
                "" if change.remark else f"{change.relative:.2e}",
            ]
            for change in changes[:MAX_TENSORS]
        ],
        words=["tensor"],
    )
    if len(changes) > MAX_TENSORS:
        print(f"and {len(changes) - MAX_TENSORS} more tensors")


def _importance(change: TensorChange) -> tuple[bool, float]:
    """Return a sort key: the model before optimizer states, unmeasured changes first, then large ones."""
    is_model = change.kind in ("weight", "buffer")
    return not is_model, -math.inf if math.isnan(change.relative) else -change.relative
