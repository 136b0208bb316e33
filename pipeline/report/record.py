"""A metrics.jsonl -> curves of at most 2,000 points, what was told, and sums."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.events import TIME
from pipeline.sinks.jsonl import MetricsFileError, iterate_record

MOST_POINTS = 2000  # of a curve: more than a screen has columns
MOST_CURVES = 400  # columns of a file
MOST_EVENTS = 400  # and samples; of more, the first and the last ones

Array = NDArray[np.float64]


@dataclass
class Record:
    """What a metrics.jsonl says."""

    curves: dict[str, Array] = field(default_factory=dict)
    """By column, (4, points): step, tokens, hours and value."""
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """As told, with their place: step, tokens and hours."""
    num_left_out: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    """What the time went into, in seconds."""
    sources: dict[str, float] = field(default_factory=dict)
    """Samples taken of each."""
    step: int = 0
    seconds: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)
    """Its last line."""


def read_record(path: Path) -> Record:
    """Reads it; a run that failed while it was built may have none.

    Raises:
        MetricsFileError: it cannot be read, or is damaged.
    """
    record, tokens = Record(), 0.0  # samples where no tokens are counted
    # The numbers of rows with the same keys, end to end: Python's own floats would take gigabytes.
    rows: dict[tuple[str, ...], array[float]] = {}
    for number, row in enumerate(iterate_record(path) if path.exists() else ()):
        record.last = row
        place = (row["step"], tokens, round(record.seconds / 3600, 6))
        if "event" in row:
            told = record.samples if row["event"] == "sample" else record.events
            told.append(row | {"place": place})
            if len(told) > MOST_EVENTS:
                del told[MOST_EVENTS // 2]
                record.num_left_out += 1
            if row["event"] == TIME and isinstance(seconds := row.get("elapsed_seconds"), float):
                record.seconds = seconds  # to the end of the process, behind its last row
            continue
        record.step = int(row["step"])
        record.seconds = row.get("perf/elapsed_seconds", record.seconds)
        tokens = row.get("train/tokens_seen", row.get("train/samples_seen", tokens))
        place = (row["step"], tokens, round(record.seconds / 3600, 6))
        try:
            rows.setdefault(tuple(row), array("d")).extend((number, *place, *row.values()))
        except OverflowError:  # a whole number of more than 308 digits
            raise MetricsFileError(f"{path}: a number is larger than a float can be") from None
    tables = {keys: np.frombuffer(flat).reshape(-1, 4 + len(keys)).T for keys, flat in rows.items()}
    columns = dict.fromkeys(key for keys in tables for key in keys if key != "step")
    for key in list(columns)[:MOST_CURVES]:
        found = [table[[0, 1, 2, 3, 4 + keys.index(key)]] for keys, table in tables.items() if key in keys]
        points = np.hstack(found)
        points = points[1:, points[0].argsort()]  # in the order of the file
        record.curves[key] = thin(points)
        if key.startswith("time/"):
            record.phases[key.removeprefix("time/").removesuffix("_seconds")] = float(np.nansum(points[-1]))
        elif key.startswith("data/"):
            record.sources[key.removeprefix("data/").removesuffix("_samples")] = float(points[-1, -1])
    if record.phases:
        record.phases["start, end, steps undone"] = max(0.0, record.seconds - sum(record.phases.values()))
    record.phases = {phase: seconds for phase, seconds in record.phases.items() if seconds}
    return record


def thin(points: Array) -> Array:
    """Of each bucket of neighbours the first, last, lowest and highest, and the first that is not finite.

    So no spike and no NaN is lost, and every point that stays is one of the file.
    """
    total = points.shape[1]
    if total <= MOST_POINTS:
        return points
    width = -(-total // (MOST_POINTS // 5))
    buckets = np.pad(points[-1], (0, -total % width), mode="edge").reshape(-1, width)
    finite = np.isfinite(buckets)
    lowest = np.where(finite, buckets, np.inf).argmin(1)
    highest = np.where(finite, buckets, -np.inf).argmax(1)
    starts = np.arange(0, buckets.size, width)
    kept = [starts, starts + width - 1, *(starts + each for each in (lowest, highest, finite.argmin(1)))]
    return points[:, np.unique(np.minimum(kept, total - 1))]
