"""python -m pipeline checkpoints RUN [verify | diff A B]: what a run has saved, and whether it is whole."""

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
MOST = 20  # tensors of a comparison that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = HELP
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "what",
        nargs="*",
        default=[],
        metavar="verify | diff A B",
        help="`verify` reads every byte; `diff A B` compares two steps, or `last`, or `best`",
    )


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Run the command; raise a CheckpointError also if a checkpoint is damaged."""
    match arguments.what:
        case []:
            _list(find_run_directory(arguments.run), contents=False)
        case ["verify"]:
            _list(find_run_directory(arguments.run), contents=True)
        case ["diff", first, second]:
            _diff(find_run_directory(arguments.run), first, second)
        case other:
            raise CheckpointError(f"checkpoints RUN {' '.join(other)}: expected verify, or diff A B")


def _list(directory: Path, contents: bool) -> None:
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
    """Return the cells of a checkpoint's row."""
    manifest = row.manifest
    if manifest is None:
        return [f"{row.step:,}", "", "", "", *("" for _ in metrics), _state(row, whole), ""]
    tokens, loss, best_by = manifest.state.get("tokens_seen"), manifest.eval_loss, manifest.best_by
    return [
        f"{row.step:,}",
        f"{int(tokens):,}" if isinstance(tokens, int | float) else "",
        format_bytes(row.num_bytes) if row.num_bytes else "",
        "" if loss is None else f"{loss:.4f}",
        *(f"{best_by.value:.4f}" if best_by and best_by.metric == name else "" for name in metrics),
        _state(row, whole),
        f"{manifest.split}, {manifest.world_size} rank{'s' * (manifest.world_size > 1)}",
    ]


def _state(row: CheckpointStatus, whole: str) -> str:
    if row.problem is not None or row.manifest is None:
        return "damaged"
    num_files = len(row.manifest.files)
    return whole if row.num_here == num_files else f"{whole}, {row.num_here} of {num_files} files"


def _diff(directory: Path, first: str, second: str) -> None:
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
            for change in changes[:MOST]
        ],
        words=["tensor"],
    )
    if len(changes) > MOST:
        print(f"and {len(changes) - MOST} more tensors")


def _importance(change: TensorChange) -> tuple[bool, float]:
    """Sort the model before the optimizer's state, unmeasured changes first, then large before small ones."""
    is_model = change.kind in ("weight", "buffer")
    return not is_model, -math.inf if math.isnan(change.relative) else -change.relative
