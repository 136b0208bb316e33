"""A metrics.jsonl -> curves that fit on a screen, smoothed over all rows, what was told, and sums."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.monitoring.events import SAMPLE, TIME
from pipeline.monitoring.trackers.jsonl import MetricsFileError, iterate_record

MOST_CURVES = 400  # columns of a file
MOST_EVENTS = 400  # and alerts, and samples; of more, the first and the last ones
MOST_POINTS = 1000
"""Points of a curve: about as many as a plot has columns of pixels."""
WEIGHTS = (0.6, 0.9, 0.99, 0.999)
"""Weights of the moving average that the page offers."""
FLAT = 1e-9
"""Relative spread up to which a curve is a constant."""
Array = NDArray[np.float64]


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


@dataclass
class Curve:
    """A column at up to MOST_POINTS points, each for one row or for a bin of consecutive rows."""

    axes: Array
    """(3, points): step, tokens and hours."""
    lines: Array
    """(1 + len(WEIGHTS), points): the centre of each bin, then the moving average of all rows up to there by
    each weight. NaN where no row of a bin is finite."""
    lowest: Array
    highest: Array
    """(points,): extremes of each bin; empty where each row is a point."""
    not_finite: dict[int, int]
    """Point -> number of its rows that are NaN or infinite."""
    usual: list[float]
    """Lower and upper end of the range that a few spikes do not stretch; empty: no value is finite."""
    extremes: list[tuple[float, float]]
    """Lowest and highest value of all rows, each with its step; empty: no value is finite."""
    last: float


def curve_of(points: Array, has_stalls: bool = False) -> Curve:
    """Smooth and thin a column.

    Args:
        points: (4, rows): step, tokens, hours and value.
        has_stalls: Whether the centre of a bin is its median, which a few long waits do not move, and not
            its mean.
    """
    total = points.shape[1]
    finite = np.isfinite(points[3])
    values = np.where(finite, points[3], np.nan)
    width = -(-total // MOST_POINTS)
    bins = np.pad(values, (0, -total % width), constant_values=np.nan).reshape(-1, width)
    at = np.arange(len(bins)) * width + width // 2
    at[[0, -1]] = 0, total - 1  # the curve is as long as the record
    bins.sort(axis=1)  # NaN is behind all numbers
    number = np.isfinite(bins).sum(axis=1)
    each = np.arange(len(bins))
    lowest, highest = bins[:, 0], bins[each, number - 1]
    with np.errstate(invalid="ignore", over="ignore"):
        centre = bins[each, (number - 1) // 2] if has_stalls else np.nansum(bins, axis=1) / number
        # The newest average: where a row is not finite, that of the rows before it. -1 finds the NaN.
        newest = np.cumsum(finite)[at] - 1
        averages = [np.append(moving_average(values[finite], weight), np.nan)[newest] for weight in WEIGHTS]
    lines = np.where(number > 0, [centre, *averages], np.nan)
    lines[1:] = _rounded(lines[1:])
    extremes = []
    if finite.any():
        extremes = [(values[row], points[0, row]) for row in (np.nanargmin(values), np.nanargmax(values))]
    lost = np.bincount(np.flatnonzero(~finite) // width)
    return Curve(
        axes=points[:3, at],
        lines=lines if width == 1 else _rounded(lines),
        lowest=_rounded(lowest) if width > 1 else np.empty(0),
        highest=_rounded(highest) if width > 1 else np.empty(0),
        not_finite={int(point): int(lost[point]) for point in np.flatnonzero(lost)},
        usual=_usual_range(lines[0], lowest, highest),
        extremes=extremes,
        last=points[3, -1],
    )


def moving_average(values: Array, weight: float) -> Array:
    """Return the exponential moving average at each value, without the pull of its start."""
    sums, reach = values.copy(), 1
    while reach < values.size and weight**reach > 1e-17:
        sums[reach:] += weight**reach * sums[:-reach]  # sums of `reach` values become sums of twice as many
        reach *= 2
    return sums * (1 - weight) / (1 - weight ** np.arange(1, values.size + 1))


def _usual_range(centre: Array, lowest: Array, highest: Array) -> list[float]:
    """Return the ends of the values near to most values, to the first and to the last ones."""
    centre = centre[np.isfinite(centre)]
    if not centre.size:
        return []
    values = np.concatenate([centre, lowest[np.isfinite(lowest)], highest[np.isfinite(highest)]])
    most = np.quantile(values, (0.1, 0.9), method="nearest")
    ends = *most, np.median(centre[:5]), np.median(centre[-5:])
    lower, upper = min(ends), max(ends)
    for value in (*centre[4::-1], *centre[-5:]):  # a steep start or end is no spike: it comes step by step
        reach = _reach(lower, upper)
        if lower - reach <= value <= upper + reach:
            lower, upper = min(lower, value), max(upper, value)
    reach = _reach(lower, upper)
    near = values[(values >= lower - reach) & (values <= upper + reach)]
    return [near.min(), near.max()]


def _reach(lower: float, upper: float) -> float:
    """Return how far from this range a value may be; from a constant, as far as it is from 0."""
    size = max(abs(lower), abs(upper))
    return 1.5 * (upper - lower) if upper - lower > FLAT * size else size or 1.0


def _rounded(values: Array) -> Array:
    """Return the values with seven significant digits, which halves the page."""
    scale = 10.0 ** (6 - np.floor(np.log10(np.maximum(np.abs(values), 1e-290))))
    return np.round(values * scale) / scale
