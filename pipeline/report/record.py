"""A metrics.jsonl -> curves of at most 2,000 points, events and sums: in one pass, in little memory.

A longer curve is divided into buckets of neighbours. A bucket keeps its first, last, lowest and highest point
and the first and last that is not finite, so no spike and no NaN is lost, and all that is kept stands in the
file. The mean of each bucket stands beside them, for smoothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.sinks.jsonl import MetricsFileError, iterate_record

MOST_POINTS = 2000  # of a curve: more than a screen has columns
MOST_CURVES = 400  # keys of a file
MOST_EVENTS, MOST_SAMPLES = 400, 40  # of more, the first and the last ones
LONGEST_TEXT = 4000  # characters of an event's field
CHUNK = 16_384  # rows
ORDINAL, STEP, TOKENS, HOURS, VALUE = range(5)

Array = NDArray[np.float64]


class Curve:
    """One column of the file, thinned while it is read."""

    def __init__(self) -> None:
        self.points = np.empty((0, 5))
        """Ordinal, step, tokens, hours and value of the points that are kept."""
        self.width, self.count = 1, 0
        """Points of a bucket, and of the column."""
        self._sums = np.empty((0, 2))

    def extend(self, at: Array, values: Array) -> None:
        """Takes further points: where they stand (n, 3), step, tokens and hours, and their values (n,)."""
        ordinals = np.arange(self.count, self.count + len(values))
        self.count += len(values)
        buckets, finite = ordinals // self.width, np.isfinite(values)
        self._resize(buckets[-1] + 1)
        np.add.at(self._sums, buckets, np.column_stack([np.where(finite, values, 0.0), finite]))
        self.points = thin(np.vstack([self.points, np.column_stack([ordinals, at, values])]), self.width)
        while len(self.points) > MOST_POINTS:
            self.width *= 2
            self._resize(len(self._sums) + len(self._sums) % 2)
            self._sums = self._sums.reshape(-1, 2, 2).sum(1)
            self.points = thin(self.points, self.width)

    def _resize(self, size: int) -> None:
        self._sums = np.vstack([self._sums, np.zeros((size - len(self._sums), 2))])

    @property
    def values(self) -> Array:
        """Of the kept points."""
        return self.points[:, VALUE]

    @property
    def finite(self) -> Array:
        """Those that are finite."""
        return self.values[np.isfinite(self.values)]

    def mean(self) -> float:
        """Of all finite points, kept or not; NaN where there are none."""
        total, count = self._sums.sum(0)
        return float(total / count) if count else math.nan

    def bucket_means(self) -> Array:
        """(n,) the mean of a bucket at its last point, NaN at its others."""
        buckets = self.points[:, ORDINAL].astype(np.int64) // self.width
        is_last = np.append(np.diff(buckets) > 0, True)
        totals, counts = self._sums[buckets].T
        return np.where(is_last & (counts > 0), totals / np.maximum(counts, 1), np.nan)


def thin(points: Array, width: int) -> Array:
    """Of each `width` neighbours the first, last, lowest, highest, and first and last that is not finite.

    Of points that were thinned with a smaller width it keeps what it would keep of all of them.
    """
    if width == 1 or not len(points):
        return points
    values = points[:, VALUE]
    starts = np.flatnonzero(np.diff(points[:, ORDINAL] // width, prepend=-1))
    bucket = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(points)))
    finite = np.isfinite(values)
    lowest = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    highest = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)

    def first_of_each(places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places[np.flatnonzero(np.diff(bucket[places], prepend=-1))]

    odd = np.flatnonzero(~finite)
    kept = [starts, np.append(starts[1:], len(points)) - 1]
    kept += [first_of_each(np.flatnonzero(values == extreme[bucket])) for extreme in (lowest, highest)]
    kept += [first_of_each(odd), first_of_each(odd[::-1])]
    return points[np.unique(np.concatenate(kept))]


class Record:
    """What a metrics.jsonl says."""

    def __init__(self, path: Path):
        """Reads it.

        Raises:
            MetricsFileError: it cannot be read, or is damaged.
        """
        self.curves: dict[str, Curve] = {}
        self.events: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.num_events = self.num_rows = 0
        self.step, self.tokens, self.seconds = 0, 0.0, 0.0
        """Where its last line stands; tokens are samples where no tokens are counted."""
        self.phases: dict[str, float] = {}
        """What the time went into, in seconds."""
        self._timed_step = 0
        self._derived = {"data": 0.0, "steps": 0.0, "checkpoint": 0.0}
        groups: dict[tuple[str, ...], list[list[float]]] = {}
        for row in iterate_record(path):
            if "event" in row:
                self._take_event(row)
                continue
            # Rows with the same keys are one array in the end: a loop over their values would take a minute.
            groups.setdefault(tuple(row), []).append([self.num_rows, *self._place(row), *row.values()])
            self.num_rows += 1
            if self.num_rows % CHUNK == 0:
                self._flush(path, groups)
        self._flush(path, groups)
        if not self.phases and self._timed_step:
            self.phases = {key: seconds for key, seconds in self._derived.items() if seconds > 0}

    def _place(self, row: dict[str, float]) -> tuple[float, float, float]:
        self.step = int(row["step"])
        self.tokens = row.get("train/tokens_seen", row.get("train/samples_seen", self.tokens))
        if "perf/step_time_seconds" in row:
            steps, self._timed_step = max(0, self.step - self._timed_step), self.step
            seconds, data = (
                row["perf/step_time_seconds"] * steps,
                row.get("perf/data_time_seconds", 0.0) * steps,
            )
            stall = row.get("perf/checkpoint_stall_seconds", 0.0)
            self.seconds += seconds
            for key, spent in (("data", data), ("steps", seconds - data), ("checkpoint", stall)):
                self._derived[key] += spent
        self.seconds = row.get("perf/elapsed_seconds", self.seconds)
        return self.step, self.tokens, self.seconds / 3600

    def _take_event(self, row: dict[str, Any]) -> None:
        cut = {key: value[:LONGEST_TEXT] if isinstance(value, str) else value for key, value in row.items()}
        cut |= {"tokens": self.tokens, "hours": self.seconds / 3600}
        is_sample = row["event"] == "sample"
        self.num_events += not is_sample
        taken, most = (self.samples, MOST_SAMPLES) if is_sample else (self.events, MOST_EVENTS)
        taken.append(cut)
        if len(taken) > most:
            del taken[most // 2]

    def _flush(self, path: Path, groups: dict[tuple[str, ...], list[list[float]]]) -> None:
        columns: dict[str, list[Array]] = {}
        for keys, rows in groups.items():
            try:
                table = np.array(rows, dtype=np.float64)
            except OverflowError:  # a whole number of more than 308 digits
                raise MetricsFileError(f"{path}: a number is larger than a float can be") from None
            for number, key in enumerate(keys, 4):
                if key in self.curves or len(self.curves) < MOST_CURVES:
                    self.curves.setdefault(key, Curve())
                    columns.setdefault(key, []).append(table[:, [0, 1, 2, 3, number]])
        for key, pieces in columns.items():
            points = pieces[0] if len(pieces) == 1 else np.vstack(pieces)
            points = points[np.argsort(points[:, 0], kind="stable")]
            self.curves[key].extend(points[:, 1:4], points[:, 4])
            if key.startswith("time/") and key.endswith("_seconds"):
                phase = key[len("time/") : -len("_seconds")]
                self.phases[phase] = self.phases.get(phase, 0.0) + float(np.nansum(points[:, 4]))
        groups.clear()
