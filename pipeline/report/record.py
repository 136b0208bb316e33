"""A metrics.jsonl -> curves that fit on a screen, what was told, and sums."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.events import SAMPLE, TIME
from pipeline.report.curve import Curve, curve_of
from pipeline.sinks.jsonl import MetricsFileError, iterate_record

MOST_CURVES = 400  # columns of a file
MOST_EVENTS = 400  # and alerts, and samples; of more, the first and the last ones


@dataclass
class Record:
    """What a metrics.jsonl says."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """By column."""
    alerts: list[dict[str, Any]] = field(default_factory=list)
    """Warnings and errors, as told, with their place: step, tokens and hours."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The same for information."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    num_left_out: Counter[str] = field(default_factory=Counter)
    """By the name of one of these lists."""
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
            name = "events" if row.get("level") == "info" else "alerts"
            name = "samples" if row["event"] == SAMPLE else name
            told = getattr(record, name)
            told.append(row | {"place": place})
            if len(told) > MOST_EVENTS:
                del told[MOST_EVENTS // 2]
                record.num_left_out[name] += 1
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
        record.curves[key] = curve_of(points, has_stalls=key.endswith("_seconds"))
        if key.startswith("time/"):
            record.phases[key.removeprefix("time/").removesuffix("_seconds")] = float(np.nansum(points[-1]))
        elif key.startswith("data/"):
            record.sources[key.removeprefix("data/").removesuffix("_samples")] = float(points[-1, -1])
    if record.phases:
        record.phases["start, end, steps undone"] = max(0.0, record.seconds - sum(record.phases.values()))
    record.phases = {phase: seconds for phase, seconds in record.phases.items() if seconds}
    return record
