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
DESCRIPTION = """\
List the checkpoints of a run with their sizes and evaluation losses. With `verify`, also compare every byte
with the checksums. With `diff A B`, show which tensors differ between two checkpoints, and by how much."""
MAX_TENSORS_SHOWN = 20  # in a comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "action",
        nargs="*",
        default=[],
        metavar="verify | diff A B",
        help="what to do with the checkpoints (default: list them); A and B are steps, `last` or `best`",
    )


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        CheckpointError: The action is not known, RUN is no run, the run has no such checkpoint, or a
            checkpoint is damaged.
    """
    match arguments.action:
        case []:
            _print_checkpoints(find_run_directory(arguments.run), verify=False)
        case ["verify"]:
            _print_checkpoints(find_run_directory(arguments.run), verify=True)
        case ["diff", first, second]:
            _print_differences(find_run_directory(arguments.run), first, second)
        case other:
            raise CheckpointError(
                f"checkpoints RUN {' '.join(other)}: expected verify, or diff A B, after RUN"
            )


def _print_checkpoints(directory: Path, *, verify: bool) -> None:
    """Print a table of the checkpoints of a run directory, then a line for each damaged one.

    Args:
        directory: Run directory.
        verify: Whether to compare every byte with the checksums first.

    Raises:
        CheckpointError: There are no checkpoints, or some are damaged.
    """
    from pipeline.checkpoint.catalog import list_checkpoints, verify_checkpoint
    from pipeline.cli.screen import Screen

    rows = list_checkpoints(directory)
    if not rows:
        raise CheckpointError(
            f"{directory} has no checkpoints yet; a run saves one every checkpoint.every steps"
        )
    screen = Screen(no_color=False)
    if verify:
        with screen.progress("verifying", sum(row.num_bytes for row in rows)) as advance:
            rows = [verify_checkpoint(row, advance) for row in rows]
    best_metrics = {row.manifest.best_by.metric for row in rows if row.manifest and row.manifest.best_by}
    metrics = sorted(best_metrics - {"loss"})  # the loss has a column in any case
    intact_word = "verified" if verify else "complete"
    unit = _get_unit(rows)
    screen.table(
        ["step", unit, "size", "eval loss", *(f"eval {name}" for name in metrics), "state", "saved by"],
        [_format_cells(row, unit, metrics, intact_word) for row in rows],
        text_columns=["state", "saved by"],
    )
    damaged = [row for row in rows if row.problem is not None]
    for row in damaged:
        screen.line(f"{row.path.name}: {row.problem}")
    if damaged:
        verb = "are" if len(damaged) > 1 else "is"
        advice = "a run resumes from the newest intact one"
        if len(damaged) == len(rows):
            advice = "restore their files, or start a new run with checkpoint.resume=never"
        raise CheckpointError(
            f"{directory}: {len(damaged)} of {len(rows)} checkpoints {verb} damaged; {advice}"
        )


def _get_unit(rows: list[CheckpointStatus]) -> str:
    """Return the unit that the run's loss counts, from its newest checkpoint; "tokens" if not stated."""
    units = [str(row.manifest.state.get("unit", "tokens")) for row in rows if row.manifest]
    return units[-1] if units else "tokens"


def _format_cells(row: CheckpointStatus, unit: str, metrics: list[str], intact_word: str) -> list[str]:
    """Return the cells of a checkpoint's row.

    Args:
        row: Status of the checkpoint.
        unit: Unit of the second column.
        metrics: Metrics other than the loss that have a column. A checkpoint has a value for at most
            one of them.
        intact_word: Word for the state of a checkpoint without a problem.
    """
    manifest = row.manifest
    if manifest is None:
        return [f"{row.step:,}", "", "", "", *("" for _ in metrics), _format_state(row, intact_word), ""]
    # `tokens_seen` is what the loss counts, and it counts samples by their weights.
    count = manifest.state.get("samples_seen" if unit == "samples" else "tokens_seen")
    loss = manifest.eval_loss
    best_by = manifest.best_by
    return [
        f"{row.step:,}",
        f"{int(count):,}" if isinstance(count, int | float) else "",
        format_bytes(row.num_bytes) if row.num_bytes else "",
        "" if loss is None else f"{loss:.4f}",
        *(f"{best_by.value:.4f}" if best_by and best_by.metric == name else "" for name in metrics),
        _format_state(row, intact_word),
        f"{manifest.split}, {manifest.world_size} rank{'s' * (manifest.world_size > 1)}",
    ]


def _format_state(row: CheckpointStatus, intact_word: str) -> str:
    """Return the state of a checkpoint for the table: "damaged", or else `intact_word`.

    If other machines have some of the files, the number of files on this machine follows.
    """
    if row.problem is not None or row.manifest is None:
        return "damaged"
    num_files = len(row.manifest.files)
    return (
        intact_word
        if row.num_files_here == num_files
        else f"{intact_word}, {row.num_files_here} of {num_files} files here"
    )


def _print_differences(directory: Path, first: str, second: str) -> None:
    """Print a table of the tensors in which two checkpoints differ, in the order of `_importance_key`.

    Args:
        directory: Run directory.
        first: Step of the first checkpoint, `last` or `best`.
        second: Step of the second checkpoint, `last` or `best`.
    """
    from pipeline.checkpoint.catalog import diff_checkpoints
    from pipeline.cli.screen import Screen

    _, first_path, first_manifest = find_checkpoint(directory, first, "diff")
    _, second_path, second_manifest = find_checkpoint(directory, second, "diff")
    screen = Screen(no_color=False)
    num_values = sum(math.prod(shape) for shape in first_manifest.table.shapes.values())
    with screen.progress("comparing", num_values) as advance:
        differences = list(diff_checkpoints(first_manifest, second_manifest, advance))
    if not differences:
        print(f"{first_path.name} and {second_path.name} have the same values")
        return
    differences.sort(key=_importance_key)
    # Names of tensors have any length: in the last column they leave the others aligned.
    screen.table(
        ["kind", "changed", "max diff", "rel diff", "tensor"],
        [_format_difference(difference) for difference in differences[:MAX_TENSORS_SHOWN]],
        text_columns=["tensor"],
    )
    if len(differences) > MAX_TENSORS_SHOWN:
        print(f"and {len(differences) - MAX_TENSORS_SHOWN} more tensors")


def _format_difference(difference: TensorChange) -> list[str]:
    """Return the cells of a tensor's row: without numbers if the tensors cannot be compared."""
    if difference.remark is not None:
        return [difference.kind, "", "", "", f"{difference.name}: {difference.remark}"]
    return [
        difference.kind,
        f"{difference.share:.1%}",
        f"{difference.max_difference:.3g}",
        f"{difference.relative:.2e}",
        difference.name,
    ]


def _importance_key(difference: TensorChange) -> tuple[bool, float]:
    """Return a key that sorts weights and buffers of the model before optimizer states.

    Within each of the two, tensors that cannot be compared come first, then those that differ most.
    """
    is_model = difference.kind in ("weight", "buffer")
    return not is_model, -math.inf if math.isnan(difference.relative) else -difference.relative
