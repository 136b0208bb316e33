"""python -m pipeline checkpoints RUN [verify | diff A B]: what a run has saved, and whether it is whole."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from pipeline.commands.run_argument import find_checkpoint, find_run, report_errors
from pipeline.errors import CheckpointError

HELP = "list a run's checkpoints, verify them, or compare two"
MOST = 20  # tensors of a comparison that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = HELP
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "what",
        nargs="*",
        metavar="verify | diff A B",
        help="`verify` reads every byte; `diff A B` compares the checkpoints of two steps",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0 all is well, 2 bad input or a checkpoint that is damaged, 130 interrupted."""

    def work() -> None:
        match arguments.what:
            case []:
                _list(find_run(arguments.run), contents=False)
            case ["verify"]:
                _list(find_run(arguments.run), contents=True)
            case ["diff", first, second]:
                _diff(arguments.run, first, second)
            case other:
                raise CheckpointError(f"checkpoints RUN {' '.join(other)}: expected verify, or diff A B")

    return report_errors(work)


def _list(directory: Path, contents: bool) -> None:
    from pipeline.checkpoint.inspection import list_checkpoints
    from pipeline.inspection.screen import Screen

    rows = list_checkpoints(directory, contents)
    if not rows:
        print(f"{directory} has no checkpoints")
        return
    whole = "every byte verified" if contents else "complete"
    Screen(no_color=False).table(
        ["step", "tokens", "MB", "evaluation loss", "saved by", ""],
        [
            [
                f"{row.step:,}",
                "" if row.tokens is None else f"{row.tokens:,}",
                "" if row.num_bytes is None else f"{row.num_bytes / 1e6:,.1f}",
                "" if row.eval_loss is None else f"{row.eval_loss:.4f}",
                row.split or "",
                whole if row.problem is None else "damaged",
            ]
            for row in rows
        ],
    )
    damaged = [row for row in rows if row.problem is not None]
    if damaged:
        raise CheckpointError("\n".join(f"{row.path.name}: {row.problem}" for row in damaged))


def _diff(path: Path, first: str, second: str) -> None:
    from pipeline.checkpoint.inspection import diff
    from pipeline.inspection.screen import Screen

    one, other = (find_checkpoint(path, step)[1] for step in (first, second))
    changes = sorted(diff(one, other), key=lambda change: -(math.inf if change.remark else change.relative))
    if not changes:
        print(f"{one.name} and {other.name} hold the same values")
        return
    Screen(no_color=False).table(
        ["tensor", "values changed", "largest change", "relative"],
        [
            [
                f"{change.kind} of {change.name}",
                change.remark or f"{change.num_changed / max(1, change.num_values):.1%}",
                "" if change.remark else f"{change.max_difference:.3g}",
                "" if change.remark else f"{change.relative:.2e}",
            ]
            for change in changes[:MOST]
        ],
    )
    if len(changes) > MOST:
        print(f"and {len(changes) - MOST} more tensors")
