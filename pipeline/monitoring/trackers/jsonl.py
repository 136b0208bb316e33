"""metrics.jsonl, the record of a run: a line for each row and event, and readers of it."""

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
_TAIL = 1 << 20  # bytes
_NUMBERS = frozenset((int, float))
_NUMBERS_AND_TEXT = _NUMBERS | {str}
RecordLine = dict[str, Any]


class MetricsFileError(PipelineError):
    """The record of the run cannot be written or read."""


class JsonlTracker:
    """Appends rows to one file; each is handed to the operating system before `write` returns."""

    def __init__(self, path: Path, *, start_step: int, redo_evaluation: bool = False) -> None:
        """Open the file for appending, with no row in it that this run has yet to write.

        Args:
            path: The file; made where it is missing.
            start_step: Rows of later steps are removed, and so is a line a killed process left torn.
                0 removes all rows.
            redo_evaluation: The evaluation of `start_step` comes again: a row of it is removed.

        Raises:
            MetricsFileError: The file cannot be written.
        """
        self.path = path
        self._rewinds = 0
        self._steps_given_up = 0
        try:
            if start_step > 0 and not path.exists():
                log.warning("%s is gone, with the rows up to step %d; the run goes on", path, start_step)
            elif start_step > 0:
                rollback = _take_back(path, start_step, redo_evaluation)
                self._rewinds = int(rollback.get("rewinds", 0))
                self._steps_given_up = int(rollback.get("steps_given_up", 0))
            if start_step == 0:
                path.open("wb").close()
            # Unbuffered: a row is either with the operating system or an error here, never in between.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Append one row.

        Raises:
            MetricsFileError: Full disk, quota, lost mount: training ends, since its record would have holes.
        """
        self._append(encode_row(step, row))

    def tell(self, step: int, event: Event) -> None:
        """Append an event. Before a rollback, the rows that it gives up are moved to a file of their own.

        Its line also has the number of rollbacks so far, `rewinds`, and of the steps that they gave up.

        Raises:
            MetricsFileError: see `write`.
        """
        columns = event.columns
        if event.name == ROLLBACK:
            from_step = int(event.fields["from_step"])
            self._rewinds += 1
            self._steps_given_up += from_step - step
            columns |= {"rewinds": self._rewinds, "steps_given_up": self._steps_given_up}
            try:
                _set_aside(self.path, step, from_step)
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
    """Return one line of the file, newline included."""
    fields: dict[str, Any] = {"step": step}
    for key, value in row.items():
        if isinstance(value, str):
            fields[key] = value
            continue
        number = value if isinstance(value, int) else float(value)  # numpy's own floats end here
        fields[key] = number if math.isfinite(number) else json.dumps(number)
    return (json.dumps(fields, allow_nan=False) + "\n").encode()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all rows of a metrics.jsonl. See `iterate_metrics`."""
    return list(iterate_metrics(path))


def read_newest(path: Path, key: str) -> dict[str, Any] | None:
    """Return the last row with this key in the last megabyte; `None` if there is none, or no file."""
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

    A torn last line is left out.

    Yields:
        In file order: `step` and the metrics, non-finite numbers as floats again; or the fields of an event.

    Raises:
        MetricsFileError: The file cannot be read, or a line before the last is no row.
    """
    torn: tuple[int, bytes] | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if torn is not None:
                    raise MetricsFileError(f"{path}:{torn[0]}: not a row of metrics: {torn[1][:60]!r}")
                row = _decode(line)
                if row is None:
                    torn = number, line.rstrip(b"\n")
                else:
                    yield redact(row) if "event" in row else row
    except OSError as error:
        raise MetricsFileError(f"{path}: cannot read the metrics ({error.strerror})") from error


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the row or event in a line; `None` if the line is torn or something else."""
    try:
        row = from_json(line)  # a quarter of json.loads' time
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


def _take_back(path: Path, last_step: int, redo_evaluation: bool) -> RecordLine:
    """Remove lines after `last_step` and damaged ones, in one step: a kill leaves the old file or the new.

    It reads a row at a time: a long run has hundreds of thousands. The file is cut off at its end, or written
    anew if it was damaged in between or has a line about corruption, which stays.

    Returns:
        The last rollback of `replay`, or an empty record.
    """

    def kept(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["step"] <= last_step:
            return None if redo_evaluation and _is_evaluation(row, last_step) else row
        if row.get("event") != CORRUPTION:
            return None
        return {"from_step": row["step"], **row, "step": last_step}  # steps do not fall in a record

    prefix = size = num_damaged = 0  # bytes up to the first line that goes, and bytes seen
    has_holes = was_torn = False
    rollback: RecordLine = {}
    with path.open("rb") as file:
        for line in file:
            num_damaged += was_torn  # but the last one, which a kill may tear
            row = _decode(line)
            was_torn = row is None
            if row is not None and (stays := kept(row)) is not None:
                has_holes |= prefix < size or not line.endswith(b"\n") or stays is not row
                prefix += len(line)
                if is_rollback(row) and row["step"] < last_step:
                    rollback = row
            size += len(line)
    if has_holes:
        _rewrite(path, kept)
    elif prefix < size:
        os.truncate(path, prefix)
        sync_to_disk(path)
    if num_damaged:
        log.warning("%s had damaged lines (%d); the run goes on without", path, num_damaged)
    return rollback


def _rewrite(path: Path, kept: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    with atomic_write(path) as partial, path.open("rb") as old, partial.open("wb") as new:
        for line in old:
            row = _decode(line)
            if row is not None and (stays := kept(row)) is not None:
                new.write(encode_row(stays.pop("step"), stays))


def _set_aside(path: Path, last_step: int, until: int) -> None:
    """Move the lines after `last_step` to `metrics-until-step-<until>.jsonl` beside the file.

    They are at the end, and copied before they are cut off: a kill in between leaves them in both files, and
    the resumed run cuts them off.
    """
    prefix = 0
    with path.open("rb") as file:
        for line in file:
            record = _decode(line)
            if record is not None and record["step"] > last_step:
                break
            prefix += len(line)
        file.seek(prefix)
        kept = path.with_name(f"{path.stem}-until-step-{until}{path.suffix}")
        with kept.open("ab") as aside:
            shutil.copyfileobj(file, aside)
    sync_to_disk(kept)
    os.truncate(path, prefix)
    sync_to_disk(path)


def _is_evaluation(row: Mapping[str, float], step: int) -> bool:
    return row["step"] == step and any(key.startswith("eval/") for key in row)


def _cannot_write(path: Path, error: OSError) -> MetricsFileError:
    return MetricsFileError(
        f"{path}: cannot write the run's metrics ({error.strerror or error}); once there is room, the same "
        "command goes on from the newest checkpoint"
    )


def is_rollback(record: Mapping[str, Any]) -> bool:
    """Return whether a line of the record is the event of a rollback."""
    return record.get("event") == ROLLBACK


def replay(path: Path, start_step: int) -> Iterator[RecordLine]:
    """Iterate over rows and events of a run that resumes from a step, without what rollbacks gave up.

    A rollback to `start_step` itself is left out: the checkpoint of that step is older than the rollback, so
    the run does it again.

    Args:
        path: metrics.jsonl, without anything of later steps.
        start_step: Step of the checkpoint that the run resumes from.

    Raises:
        MetricsFileError: The file cannot be read.
    """
    return (line for line in iterate_record(path) if not is_rollback(line) or line["step"] < start_step)
