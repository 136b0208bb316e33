"""What the commands that look at a run have in common: which checkpoint is meant, and how a mistake ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError, PipelineError

if TYPE_CHECKING:
    from pipeline.checkpoint.manifest import Manifest


def find_run(path: Path) -> Path:
    """The run directory that is meant.

    Raises:
        CheckpointError: there is none.
    """
    for candidate in (path, path.parent.parent):
        if (candidate / "checkpoints").is_dir():
            return candidate
    what = "does not exist" if not path.exists() else "is no run directory: it has no folder checkpoints/"
    raise CheckpointError(f"{path} {what}")


def find_checkpoint(path: Path, which: str) -> tuple[Path, Path, Manifest]:
    """(run directory, checkpoint, its manifest) of a run directory and a step, `last` or `best`.

    Raises:
        CheckpointError: there is no such checkpoint, or it is not complete.
    """
    from pipeline.checkpoint.folders import check
    from pipeline.checkpoint.inspection import list_checkpoints

    directory = find_run(path)
    rows = list_checkpoints(directory)
    if path != directory:
        rows = [row for row in rows if row.path.name == path.name]
    elif which not in ("last", "best"):
        if not which.isdigit():
            raise CheckpointError(f"--step {which}: expected a step, `last` or `best`")
        known = ", ".join(str(row.step) for row in rows) or "none"
        rows = [row for row in rows if row.step == int(which)]
        if not rows:
            raise CheckpointError(f"{directory} has no checkpoint of step {which}; it has {known}")
    whole = [row for row in rows if row.problem is None]
    if not whole:
        why = f": {rows[-1].problem}" if rows else ""
        raise CheckpointError(f"{path} holds no complete checkpoint{why}")
    chosen = whole[-1]
    if which == "best":
        measured = [(row.eval_loss, -row.step, row) for row in whole if row.eval_loss is not None]
        if not measured:
            raise CheckpointError(f"{directory}: no checkpoint knows its evaluation loss; use --step last")
        chosen = min(measured, key=lambda entry: entry[:2])[2]
    return directory, chosen.path, check(chosen.path)


def report_errors(work: Callable[[], None]) -> int:
    """Exit code: 0 done, 2 bad input, 130 Ctrl-C."""
    try:
        work()
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0
