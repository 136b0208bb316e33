"""metrics.jsonl, the record of the run: one JSON object a line, there as soon as the row was written.

Non-finite numbers are the strings "NaN", "Infinity" and "-Infinity", so that any JSON reader takes the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

METRICS_FILE = "metrics.jsonl"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFileError(PipelineError):
    """The record of the run cannot be written or read."""


class JsonlSink:
    """Appends rows to one file; each is handed to the operating system before `write` returns."""

    def __init__(self, path: Path, *, start_step: int) -> None:
        """Open the file for appending, with no row in it that this run has yet to write.

        Args:
            path: The file; made where it is missing.
            start_step: Rows of later steps are removed, and so is a line a killed process left torn.
                0 removes all rows.

        Raises:
            MetricsFileError: The file cannot be written.
        """
        self._path = path
        try:
            if start_step > 0 and path.exists():
                _keep_rows(path, last_step=start_step)
            # Unbuffered: a row is either with the operating system or an error here, never in between.
            self._file = path.open("ab" if start_step > 0 else "wb", buffering=0)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Append one row.

        Raises:
            MetricsFileError: Full disk, quota, lost mount: training ends, since its record would have holes.
        """
        data = encode_row(step, row)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self, exit_code: int) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise _cannot_write(self._path, error) from error


def encode_row(step: int, row: Mapping[str, float]) -> bytes:
    """One line of the file, newline included."""
    fields: dict[str, Any] = {"step": step}
    for key, value in row.items():
        number = value if isinstance(value, int) else float(value)  # numpy's own floats end here
        fields[key] = number if math.isfinite(number) else json.dumps(number)
    return (json.dumps(fields, allow_nan=False) + "\n").encode()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All rows of a metrics.jsonl, also while a run writes to it: a torn last line is left out.

    Returns:
        The rows in file order: `step` and the metrics, non-finite numbers as floats again.

    Raises:
        MetricsFileError: The file cannot be read, or a line before the last is no row.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise MetricsFileError(f"{path}: cannot read the metrics ({error.strerror})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        row = _decode(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise MetricsFileError(f"{path}:{number}: not a row of metrics: {line[:60]!r}")
    return rows


def _decode(line: bytes) -> dict[str, float] | None:
    """The row in a line, or None where the line is torn or something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
        return None
    row = {key: _NON_FINITE.get(value) if isinstance(value, str) else value for key, value in row.items()}
    return row if all(isinstance(value, int | float) for value in row.values()) else None


def _keep_rows(path: Path, *, last_step: int) -> None:
    """Remove rows after `last_step` and lines that are no rows, in one step: a kill leaves old or new."""
    kept = []
    for line in path.read_bytes().splitlines():
        row = _decode(line)
        if row is not None and row["step"] <= last_step:
            kept.append(line + b"\n")
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself, against a power cut
    finally:
        os.close(folder)


def _cannot_write(path: Path, error: OSError) -> MetricsFileError:
    return MetricsFileError(f"{path}: cannot write the run's metrics ({error.strerror or error})")
