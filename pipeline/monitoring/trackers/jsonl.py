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
"""String in the file -> its number: JSON has no such numbers."""
_TAIL_BYTES = 1 << 20  # bytes at the end of the file that `read_newest` reads
_NUMBERS = frozenset((int, float))
_NUMBERS_AND_TEXT = _NUMBERS | {str}
RecordLine = dict[str, Any]
"""Row or event of the file: `step`, and the columns of the row or the fields of the event."""


class MetricsFileError(PipelineError):
    """Raised if metrics.jsonl cannot be written or read."""


class JsonlTracker:
    """Appends rows and events to metrics.jsonl.

    Each line reaches the operating system before `write` returns. The line of each rollback has the running
    totals of rollbacks and of the steps that they dropped; W&B computes the offset of its steps from them.
    """

    def __init__(self, path: Path, *, start_step: int, redo_evaluation: bool = False) -> None:
        """Open the file for appending, and remove the rows that this run will write again.

        Args:
            path: The file; created if it is missing.
            start_step: Optimizer steps done before this process. Rows of later steps and incomplete lines of
                a killed process are removed; 0 removes all rows.
            redo_evaluation: Whether the evaluation of `start_step` is repeated; if so, its row is removed.

        Raises:
            MetricsFileError: The file cannot be read or written.
        """
        self.path = path
        self._rewinds = 0  # number of rollbacks of the run so far
        self._steps_given_up = 0  # number of steps that these rollbacks dropped
        try:
            if start_step > 0 and not path.exists():
                log.warning(
                    "%s does not exist, so the rows up to step %d are lost; the run continues without them",
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
            raise _build_write_error(path, error) from error

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Append one row.

        Raises:
            MetricsFileError: The line cannot be written, for example because the disk is full. Training ends,
                since the record would have holes.
        """
        self._append(encode_row(step, row))

    def tell(self, step: int, event: Event) -> None:
        """Append an event.

        A rollback first moves the rows that it drops to a separate file. Its line also has the number of
        rollbacks so far, `rewinds`, and the number of steps that they dropped, `steps_given_up`.

        Raises:
            MetricsFileError: See `write`; or the rows cannot be moved.
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
                raise _build_write_error(self.path, error) from error
        self._append(encode_row(step, columns))

    def _append(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise _build_write_error(self.path, error) from error

    def close(self, exit_code: int) -> None:
        """Close the file.

        Raises:
            MetricsFileError: The file system reports an error only now.
        """
        try:
            self._file.close()
        except OSError as error:
            raise _build_write_error(self.path, error) from error


def encode_row(step: int, row: Mapping[str, str | float]) -> bytes:
    """Return one line of the file, including the newline. Numbers that are not finite become strings."""
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
    """Return the last row or event that has a column or field `key`.

    Returns:
        The line; `None` if no line within the last MiB has the key, or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    return next((row for row in map(_decode, reversed(lines)) if row is not None and key in row), None)


def iterate_metrics(path: Path) -> Iterator[dict[str, float]]:
    """Iterate over the rows of a metrics.jsonl, without the events. See `iterate_record`."""
    return (row for row in iterate_record(path) if "event" not in row)


def iterate_record(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over rows and events of a metrics.jsonl, even while a run writes to it.

    An invalid last line is skipped, since its writing may not be complete.

    Yields:
        Lines in file order: `step` and the metrics, with non-finite numbers as floats; or `step` and the
        fields of an event, without secrets.

    Raises:
        MetricsFileError: The file cannot be read, or a line before the last is invalid.
    """
    invalid: tuple[int, bytes] | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if invalid is not None:
                    raise MetricsFileError(
                        f"{path}:{invalid[0]}: not a row of metrics: {invalid[1][:60]!r}; delete this line"
                    )
                row = _decode(line)
                if row is None:
                    invalid = (number, line.rstrip(b"\n"))
                    continue
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

    Reads one row at a time, since a long run has hundreds of thousands. The file is truncated if only lines
    at its end are removed, else rewritten. An event CORRUPTION after `last_step` stays in the file with
    `last_step` as its step, and its original step as `from_step`.

    Returns:
        The last rollback that `replay` yields; an empty dictionary if there is none.
    """

    def select(row: RecordLine) -> RecordLine | None:
        """Return the line that replaces a line of the file; `None` to remove it."""
        if row["step"] <= last_step:
            return None if redo_evaluation and _is_evaluation(row, last_step) else row
        if row.get("event") != CORRUPTION:
            return None
        return {"from_step": row["step"], **row, "step": last_step}  # steps must not decrease in a record

    kept_bytes = 0
    read_bytes = 0
    num_damaged = 0
    must_rewrite = False  # the new file is not a prefix of the old one
    is_last_damaged = False
    rollback: RecordLine = {}
    with path.open("rb") as file:
        for line in file:
            num_damaged += is_last_damaged  # the file's last line does not count: a kill may cut it
            row = _decode(line)
            is_last_damaged = row is None
            selected = None if row is None else select(row)
            if row is not None and selected is not None:
                follows_removed = kept_bytes < read_bytes
                must_rewrite |= follows_removed or not line.endswith(b"\n") or selected is not row
                kept_bytes += len(line)
                if is_rollback(row) and row["step"] < last_step:
                    rollback = row
            read_bytes += len(line)
    if must_rewrite:
        _rewrite(path, select)
    elif kept_bytes < read_bytes:
        os.truncate(path, kept_bytes)
        sync_to_disk(path)
    if num_damaged:
        log.warning("%s had damaged lines (%d); the run continues without them", path, num_damaged)
    return rollback


def _rewrite(path: Path, select: Callable[[RecordLine], RecordLine | None]) -> None:
    """Replace each line of the file by the result of `select`; remove it if that is `None`."""
    with atomic_write(path) as partial, path.open("rb") as old, partial.open("wb") as new:
        for line in old:
            row = _decode(line)
            selected = None if row is None else select(row)
            if selected is not None:
                new.write(encode_row(selected.pop("step"), selected))


def _move_rows(path: Path, last_step: int, from_step: int) -> None:
    """Move the lines after `last_step` to `metrics-until-step-<from_step>.jsonl` in the same directory.

    The lines are at the end of the file, and are copied before the file is truncated. A kill in between
    leaves them in both files, and the resumed run truncates metrics.jsonl.

    Args:
        path: metrics.jsonl.
        last_step: Step to which the run rolls back.
        from_step: Step at which it rolls back.
    """
    kept_bytes = 0
    with path.open("rb") as file:
        for line in file:
            row = _decode(line)
            if row is not None and row["step"] > last_step:
                break
            kept_bytes += len(line)
        file.seek(kept_bytes)
        target = path.with_name(f"{path.stem}-until-step-{from_step}{path.suffix}")
        with target.open("ab") as copy:
            shutil.copyfileobj(file, copy)
    sync_to_disk(target)
    os.truncate(path, kept_bytes)
    sync_to_disk(path)


def _is_evaluation(row: Mapping[str, float], step: int) -> bool:
    return row["step"] == step and any(key.startswith("eval/") for key in row)


def _build_write_error(path: Path, error: OSError) -> MetricsFileError:
    return MetricsFileError(
        f"{path}: cannot write the run's metrics ({error.strerror or error}); free some space or make the "
        "file writable, then the same command resumes from the newest checkpoint"
    )


def is_rollback(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl is a ROLLBACK event."""
    return line.get("event") == ROLLBACK


def replay(path: Path, start_step: int) -> Iterator[RecordLine]:
    """Iterate over the rows and events of a run that resumes from a step.

    A rollback to `start_step` itself is skipped. The checkpoint of that step does not include the rollback,
    so the run repeats the rollback, which must count once.

    Args:
        path: metrics.jsonl without lines of later steps.
        start_step: Step of the checkpoint that the run resumes from.

    Raises:
        MetricsFileError: See `iterate_record`.
    """
    return (line for line in iterate_record(path) if not is_rollback(line) or line["step"] < start_step)
