"""metrics.jsonl, the record of a run with a line per row and event: its tracker and its readers."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from pipeline.errors import PipelineError
from pipeline.files import atomic_write, sync_to_disk
from pipeline.monitoring.events import CORRUPTION, ROLLBACK, Event
from pipeline.redaction import redact

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TAIL = 1 << 20  # bytes at the end of the file that `read_newest` reads
_NUMBERS = frozenset((int, float))
_NUMBERS_AND_TEXT = _NUMBERS | {str}
RecordLine = dict[str, Any]


class MetricsFileError(PipelineError):
    """Raised if metrics.jsonl cannot be written or read."""


class JsonlTracker:
    """Appends rows and events to metrics.jsonl.

    The operating system has each line before `write` returns. The line of each rollback has the running
    totals of rollbacks and of the steps that they dropped, from which W&B's step offset follows.
    """

    def __init__(self, path: Path, *, start_step: int, redo_evaluation: bool = False) -> None:
        """Open the file for appending, and remove the rows that this run will write again.

        Args:
            path: The file; created if it is missing.
            start_step: Rows of later steps are removed, and incomplete lines of a killed process. 0 removes
                all rows.
            redo_evaluation: Whether the evaluation of `start_step` is repeated, so its row is removed.

        Raises:
            MetricsFileError: The file cannot be written.
        """
        self.path = path
        self._rewinds = 0
        self._steps_given_up = 0
        try:
            if start_step > 0 and not path.exists():
                log.warning(
                    "%s is missing, with the rows up to step %d; the run continues without them",
                    path,
                    start_step,
                )
            elif start_step > 0:
                rollback = _truncate(path, start_step, redo_evaluation)
                self._rewinds = int(rollback.get("rewinds", 0))
                self._steps_given_up = int(rollback.get("steps_given_up", 0))
            if start_step == 0:
                path.open("wb").close()
            # Unbuffered: a write either reaches the operating system or raises here.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Append one row.

        Raises:
            MetricsFileError: The disk is full, a quota is reached or a mount is lost. Training ends, since
                the record would have holes.
        """
        self._append(encode_row(step, row))

    def tell(self, step: int, event: Event) -> None:
        """Append an event.

        Before a rollback, the rows that it drops are moved to a separate file. Its line also has the number
        of rollbacks so far, `rewinds`, and of the steps that they dropped, `steps_given_up`.

        Raises:
            MetricsFileError: See `write`.
        """
        columns = event.columns
        if event.name == ROLLBACK:
            from_step = int(event.fields["from_step"])
            self._rewinds += 1
            self._steps_given_up += from_step - step
            columns |= {"rewinds": self._rewinds, "steps_given_up": self._steps_given_up}
            try:
                _move_rows(self.path, step, from_step)
            except OSError as error:
                raise _cannot_write(self.path, error) from error
        self._append(encode_row(step, columns))

    def _append(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def close(self, exit_code: int) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise _cannot_write(self.path, error) from error


def encode_row(step: int, row: Mapping[str, str | float]) -> bytes:
    """Return one line of the file, including the newline."""
    fields: dict[str, Any] = {"step": step}
    for key, value in row.items():
        if isinstance(value, str):
            fields[key] = value
            continue
        number = value if isinstance(value, int) else float(value)  # converts numpy's floats
        fields[key] = number if math.isfinite(number) else json.dumps(number)
    return (json.dumps(fields, allow_nan=False) + "\n").encode()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all rows of a metrics.jsonl, without the events. See `iterate_metrics`."""
    return list(iterate_metrics(path))


def read_newest(path: Path, key: str) -> dict[str, Any] | None:
    """Return the last row or event with this key within the last MiB; `None` if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return None
    return next((row for row in map(_decode, reversed(lines)) if row is not None and key in row), None)


def iterate_metrics(path: Path) -> Iterator[dict[str, float]]:
    """Iterate over the rows of a metrics.jsonl, without the events. See `iterate_record`."""
    return (row for row in iterate_record(path) if "event" not in row)


def iterate_record(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over rows and events of a metrics.jsonl, also while a run writes to it.

    An incomplete last line is skipped.

    Yields:
        Lines in file order: `step` and the metrics, with non-finite numbers as floats, or the fields of an
        event.

    Raises:
        MetricsFileError: The file cannot be read, or a line before the last is invalid.
    """
    torn: tuple[int, bytes] | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if torn is not None:
                    raise MetricsFileError(f"{path}:{torn[0]}: not a row of metrics: {torn[1][:60]!r}")
                row = _decode(line)
                if row is None:
                    torn = (number, line.rstrip(b"\n"))
                else:
                    yield redact(row) if "event" in row else row
    except OSError as error:
        raise MetricsFileError(f"{path}: cannot read the metrics ({error.strerror})") from error


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the row or event of a line; `None` if the line is incomplete or invalid."""
    try:
        row = from_json(line)  # four times as fast as json.loads
    except ValueError:
        return None
    if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
        return None
    if _NUMBERS.issuperset(map(type, row.values())):
        return row
    if isinstance(row.get("event"), str):
        return row if _NUMBERS_AND_TEXT.issuperset(map(type, row.values())) else None
    row = {key: _NON_FINITE.get(value) if isinstance(value, str) else value for key, value in row.items()}
    return row if _NUMBERS.issuperset(map(type, row.values())) else None


def _truncate(path: Path, last_step: int, redo_evaluation: bool) -> RecordLine:
    """Remove damaged lines and those after `last_step`, atomically: a kill leaves the old or the new file.

    Reads one row at a time, since a long run has hundreds of thousands. The file is truncated. It is
    rewritten if a line in its middle is damaged, or if an event about corruption after `last_step` must stay.

    Returns:
        The last rollback of `replay`, or an empty dictionary.
    """

    def select(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["step"] <= last_step:
            return None if redo_evaluation and _is_evaluation(row, last_step) else row
        if row.get("event") != CORRUPTION:
            return None
        return {"from_step": row["step"], **row, "step": last_step}  # steps must not decrease in a record

    prefix = 0  # bytes before the first removed line
    size = 0  # bytes read
    num_damaged = 0
    has_holes = False
    was_torn = False
    rollback: RecordLine = {}
    with path.open("rb") as file:
        for line in file:
            num_damaged += was_torn  # the last line does not count: a kill may cut it
            row = _decode(line)
            was_torn = row is None
            if row is not None and (selected := select(row)) is not None:
                has_holes |= prefix < size or not line.endswith(b"\n") or selected is not row
                prefix += len(line)
                if is_rollback(row) and row["step"] < last_step:
                    rollback = row
            size += len(line)
    if has_holes:
        _rewrite(path, select)
    elif prefix < size:
        os.truncate(path, prefix)
        sync_to_disk(path)
    if num_damaged:
        log.warning("%s had damaged lines (%d); the run continues without them", path, num_damaged)
    return rollback


def _rewrite(path: Path, select: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    with atomic_write(path) as partial, path.open("rb") as old, partial.open("wb") as new:
        for line in old:
            row = _decode(line)
            if row is not None and (selected := select(row)) is not None:
                new.write(encode_row(selected.pop("step"), selected))


def _move_rows(path: Path, last_step: int, until: int) -> None:
    """Move the lines after `last_step` to `metrics-until-step-<until>.jsonl` in the same directory.

    The lines are at the end of the file, and are copied before the file is truncated. A kill in between
    leaves them in both files, and the resumed run truncates the first.
    """
    prefix = 0
    with path.open("rb") as file:
        for line in file:
            record = _decode(line)
            if record is not None and record["step"] > last_step:
                break
            prefix += len(line)
        file.seek(prefix)
        target = path.with_name(f"{path.stem}-until-step-{until}{path.suffix}")
        with target.open("ab") as copy:
            shutil.copyfileobj(file, copy)
    sync_to_disk(target)
    os.truncate(path, prefix)
    sync_to_disk(path)


def _is_evaluation(row: Mapping[str, float], step: int) -> bool:
    return row["step"] == step and any(key.startswith("eval/") for key in row)


def _cannot_write(path: Path, error: OSError) -> MetricsFileError:
    return MetricsFileError(
        f"{path}: cannot write the run's metrics ({error.strerror or error}); free some space, then the same "
        "command resumes from the newest checkpoint"
    )


def is_rollback(record: Mapping[str, Any]) -> bool:
    """Return whether a line of the record is a rollback event."""
    return record.get("event") == ROLLBACK


def replay(path: Path, start_step: int) -> Iterator[RecordLine]:
    """Iterate over the rows and events of a run that resumes from a step.

    A rollback to `start_step` itself is skipped: the checkpoint of that step is older than the rollback, so
    the run repeats it, and it must count once.

    Args:
        path: metrics.jsonl without lines of later steps.
        start_step: Step of the checkpoint that the run resumes from.

    Raises:
        MetricsFileError: The file cannot be read.
    """
    return (line for line in iterate_record(path) if not is_rollback(line) or line["step"] < start_step)
