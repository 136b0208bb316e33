"""A run directory -> the contents of its report and its summary: outcome, settings, curves for a screen.

A run notes its processes when it starts. Of a run that ended without a word, the kernel's log, or what those
processes held last, says whether the kernel killed one for memory.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.loading import read_yaml
from pipeline.config.schema import EvalConfig
from pipeline.distributed.diagnosis import NEARLY_FULL, RankProcess
from pipeline.distributed.machine import killed_for_memory, machine_id, memory_now
from pipeline.errors import ConfigError, PipelineError, listed, printable
from pipeline.files import (
    CONFIGURATION_LIMIT,
    GIB,
    format_bytes,
    format_duration,
    is_held,
    open_plain,
    read_plain,
    replace_file,
)
from pipeline.monitoring.events import PLAN, RUN_FAILED, SAMPLE, STOPPED_EARLY, TIME
from pipeline.monitoring.trackers.console import count, decimals
from pipeline.monitoring.trackers.jsonl import METRICS_FILE, MetricsFileError, iterate_record, newest
from pipeline.redaction import redact, redact_text

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


LOG_TAIL, FAILURE_LINES, MOST_LOGS = 1 << 16, 30, 256
PEAK = "memory/peak_resident_gib"
UNSAID = "ended without saying how (killed?)"
PROCESSES = "logs/processes.json"


@dataclass
class RunView:
    """What is shown of a run."""

    name: str
    state: str
    """finished, running, stopped, failed, or UNSAID."""
    error: str
    """Line that says how it crashed; empty: it did not."""
    failure: str
    """All that is known of a crash."""
    facts: dict[str, str]
    settings: dict[str, str]
    """Dotted keys of recipe.yaml and, under `ds.`, of ds_config.json; the world size."""
    record: Record
    figures: dict[str, str] = field(default_factory=dict)
    """Last and best values of the main metrics."""


def find_run(path: Path) -> Path:
    """The path, of a run directory.

    Raises:
        PipelineError: it is none; runs in it are named.
    """
    if any((path / name).is_file() for name in (METRICS_FILE, "recipe.yaml")):
        return path
    within = sorted(each.parent.name for each in path.glob(f"*/{METRICS_FILE}"))
    hint = f"it holds runs: {listed(within)}" if within else "give a run directory, as runs/NAME-TIME"
    what = f"has no {METRICS_FILE}" if path.exists() else "does not exist"
    raise PipelineError(f"{path} {what}; {hint}")


def read_run(path: Path, ended: bool = False) -> RunView:
    """All that is shown of a run; `ended`: nobody trains there any more, as its own process knows.

    Raises:
        MetricsFileError: its metrics.jsonl cannot be read, or is damaged.
    """
    record, failure = read_record(path / METRICS_FILE), ""
    if not ended and is_held(path) and not (path / "summary.json").is_file():
        state = "running"
    else:
        state, failure = how_it_ended(path, record.last)
        failure = redact_text(failure)
    text = _json(path / "summary.json").get("sample")
    if isinstance(text, str) and record.step not in [sample["step"] for sample in record.samples]:
        record.samples.append({"step": record.step, "text": redact_text(text)})
    settings = dict(_settings(path))
    environment = _json(path / "environment.json")
    devices = environment.get("devices")
    counts = Counter(map(str, devices if isinstance(devices, list) else []))
    models = [settings.get(f"model.{key}", "null") for key in ("pretrained", "architecture", "kind")]
    status = after(state, record.step) if record.curves else f"{state} without a row"
    error = {"failed": error_line(failure) or status, UNSAID: f"{status}: {failure}".removesuffix(": ")}
    lost = {key: sum(curve.not_finite.values()) for key, curve in record.curves.items()}
    plans = [str(told["message"]) for told in record.alerts + record.events if told["event"] == PLAN]
    facts = {
        "state": status,
        "time": format_duration(record.seconds),
        "model": next((model for model in models if model != "null"), ""),
        "main host": ", ".join(f"{number} × {name}" for name, number in counts.items()),
        "ranks": settings.get("world_size", ""),
        "plan": next((told.removeprefix("plan: ") for told in reversed(plans)), ""),
        "not finite": listed([f"{key} {number:,}" for key, number in lost.items() if number]),
        "commit": str(environment.get("git_commit", ""))[:10],
    }
    facts = {name: redact_text(fact) for name, fact in facts.items() if fact}
    return RunView(
        name=printable(path.absolute().name),
        state=state,
        error=error.get(state, ""),
        failure=failure,
        facts=facts,
        settings=settings,
        record=record,
    )


def how_it_ended(path: Path, last: Mapping[str, Any]) -> tuple[str, str]:
    """The state of a run that nobody trains, and why, where it failed or was killed.

    Args:
        last: Of its metrics.jsonl.
    """
    if (path / "summary.json").is_file():
        return "finished", ""
    if failure := _diagnosis(path) or _first_failure(path):
        return "failed", failure
    if last.get("event") == RUN_FAILED:
        return "failed", "\n".join(str(last[key]) for key in ("message", "traceback") if key in last)
    if last.get("event") == TIME:
        return "stopped", ""
    row = newest(path / METRICS_FILE, PEAK) or {}
    return UNSAID, why_killed(path, float(row.get(PEAK, 0.0)))


def error_line(failure: str) -> str:
    """Return the line that names the error: behind the frames of its last traceback, or the first."""
    lines = failure.rpartition(" pipeline.failure ")[2].strip().splitlines()
    frames = [n for n, line in enumerate(lines, 1) if line.startswith(("Traceback (most", '  File "'))]
    behind = lines[max(frames, default=0) :]
    return next((line for line in behind if line.strip() and not line.startswith(" ")), "")


def after(state: str, step: int) -> str:
    """As one says it."""
    return f"{state} {'after' if state == UNSAID else 'at'} step {step:,}"


def _settings(path: Path) -> Iterator[tuple[str, str]]:
    with suppress(ConfigError, OSError):
        yield from _flatten(redact(read_yaml(path / "recipe.yaml").tree), "")
    yield from _flatten(redact(_json(path / "ds_config.json")), "ds.")
    if (world_size := _json(path / "split.json").get("world_size")) is not None:
        yield "world_size", str(world_size)


def _flatten(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str).strip('"')[:300]


def _json(path: Path) -> dict[str, Any]:
    """What is in the file; nothing where it is missing or damaged: the report says what it can."""
    with suppress(OSError, ValueError, RecursionError):
        tree = json.loads(read_plain(path, CONFIGURATION_LIMIT))
        return tree if isinstance(tree, dict) else {}
    return {}


def _diagnosis(path: Path) -> str:
    """What a watchdog has ended the run for, unless the run went on."""
    told, record = path / "hang" / "diagnosis.txt", path / METRICS_FILE
    with suppress(OSError):
        if not record.exists() or told.stat().st_mtime_ns >= record.stat().st_mtime_ns:
            return read_plain(told, CONFIGURATION_LIMIT).decode(errors="replace").strip()
    return ""


def _first_failure(path: Path) -> str:
    """Of all ranks' logs: those that fail because another one did are later."""
    with suppress(TypeError, ValueError):
        world_size = int(_json(path / "split.json").get("world_size", 1))
        found = [
            _failure(path / "logs" / f"rank{rank:05d}.log") for rank in range(min(world_size, MOST_LOGS))
        ]
        return min(filter(None, found), default=("", ""))[1]
    return ""


def _failure(log: Path) -> tuple[str, str] | None:
    """When it failed and what the log says of it, if no line of information follows: then the run went on."""
    try:
        with open(open_plain(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    last = re.split(r"^[\d-]{10} [\d:,]{12} INFO ", text, flags=re.M)[-1]
    found = re.search(r"^([\d-]{10} [\d:,]{12}) \w+ pipeline\.failure (.*)", last, re.M | re.S)
    return (found[1], "\n".join(found[2].rstrip().splitlines()[-FAILURE_LINES:])) if found else None


def note_processes(directory: Path, everyone: Sequence[RankProcess]) -> None:
    """The ranks of a run that starts, and what memory its machine has. Raises nothing.

    Args:
        everyone: Empty: this process is alone.
    """
    now, alone = memory_now(), RankProcess(0, platform.node(), os.getpid(), machine_id())
    noted = {
        "everyone": [asdict(each) for each in everyone or [alone]],
        "since": time.monotonic(),
        "limit": now.limit,
        "whose": "its cgroup allows" if now.by_cgroup else "the machine has",
    }
    with suppress(OSError):
        (directory / PROCESSES).parent.mkdir(exist_ok=True)
        replace_file(directory / PROCESSES, json.dumps(noted))


def why_killed(directory: Path, peak_gib: float) -> str:
    """Killed for memory, by whom that is known; empty: nothing says so.

    Args:
        peak_gib: That rank 0 had resident by the last row; 0: there is none.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        noted: dict[str, Any] = json.loads(read_plain(directory / PROCESSES, CONFIGURATION_LIMIT))
        everyone = [RankProcess(**each) for each in noted["everyone"]]
        limit, whose, here = noted["limit"], noted["whose"], machine_id()
        by_kernel = killed_for_memory(noted["since"])
        for each in everyone:
            if each.machine == here and each.pid in by_kernel:
                held = f"{_ranks(everyone, each)} x {format_bytes(by_kernel[each.pid])}"
                return f"the kernel killed {each} for memory: {held}, and {whose} {format_bytes(limit)}"
        first = everyone[0]
        if _number(everyone, first) * peak_gib * GIB > NEARLY_FULL * limit:
            held = f"{_ranks(everyone, first)} x {format_bytes(peak_gib * GIB)}"
            return f"most likely killed for memory: {held}, and {whose} {format_bytes(limit)}"
    return ""


def _number(everyone: Sequence[RankProcess], of: RankProcess) -> int:
    return sum(each.machine == of.machine for each in everyone)


def _ranks(everyone: Sequence[RankProcess], of: RankProcess) -> str:
    number = _number(everyone, of)
    return f"{number} rank{'s' * (number > 1)} there"


def closing_line(name: str, text: object) -> str:
    """Return a line of a name and a text, aligned with the others."""
    return f"{name:<13}  {text}"


def summary_lines(run_dir: Path, best_by: EvalConfig | None = None) -> list[str]:
    """Return aligned lines of a name and a text; none if the record cannot be read."""
    try:
        return list(lines_of(iterate_record(run_dir / METRICS_FILE), best_by))
    except PipelineError:
        return []


def lines_of(rows: Iterable[Mapping[str, Any]], best_by: EvalConfig | None = None) -> Iterator[str]:
    """Return the lines of `summary_lines`.

    Args:
        rows: Lines of metrics.jsonl, in order.
        best_by: Which metric chooses the best checkpoint; it has a line as well.
    """
    chosen = best_by or EvalConfig()
    step = 0
    seconds = tokens = 0.0
    plan = early = ""
    metrics: dict[str, _Best] = {}
    for row in rows:
        if row.get("event") == PLAN:
            plan = str(row["message"]).removeprefix("plan: ")
        if row.get("event") == STOPPED_EARLY:
            early = str(row["message"])
        if row.get("event") == TIME:  # has the steps behind the last row, too
            step = int(row["step"])
            seconds = row["goodput"] * row["elapsed_seconds"]
            tokens = row.get("tokens_seen", tokens)
        if "train/loss" in row:
            early = ""
            before, step = step, int(row["step"])
            seconds += (step - before) * row.get("perf/step_time_seconds", 0.0)
            tokens = row.get("train/tokens_seen", 0.0)
        for key in row:
            chooses = key == f"eval/{chosen.best_metric}"
            name = _name(key) or (f"eval {chosen.best_metric}" if chooses else "")
            if name:
                is_lowest = chosen.best_is_lowest if chooses else name.endswith("loss")
                metrics.setdefault(name, _Best(is_lowest=is_lowest)).add(int(row["step"]), row[key])
    if step:
        seen = f", {count(tokens)} tokens" if tokens else ""
        yield closing_line("steps", f"{step:,} in {format_duration(seconds)}{seen}")
    if early:
        yield closing_line("stopped early", early)
    first = ("loss", "accuracy", "eval loss", "eval accuracy")
    for name in (*(name for name in first if name in metrics), *sorted(metrics.keys() - set(first))):
        yield closing_line(name, metrics[name])
    if plan:
        yield closing_line("plan", plan)


def _name(key: str) -> str | None:
    """Return what a column is called here: a loss, or an accuracy as classes and preferences have one."""
    group, _, metric = key.partition("/")
    if group not in ("train", "eval") or metric not in ("loss", "accuracy", "rewards/accuracy"):
        return None
    return f"{'eval ' if group == 'eval' else ''}{metric.removeprefix('rewards/')}"


class _Best:
    """The last of a metric's values, and the best: the lowest loss, the highest accuracy."""

    def __init__(self, *, is_lowest: bool) -> None:
        self._sign, self._word = (1, "lowest") if is_lowest else (-1, "highest")
        self._last, self._best = (0, math.nan), (0, math.nan)

    def add(self, step: int, value: float) -> None:
        self._last = step, value
        if math.isnan(self._best[1]) or self._sign * value < self._sign * self._best[1]:
            self._best = self._last

    def __str__(self) -> str:
        last = f"{decimals(self._last[1])} at step {self._last[0]}"
        if math.isnan(self._best[1]):
            return last
        if self._best[0] == self._last[0]:
            return f"{last}, the {self._word}"
        return f"{last}; {self._word} {decimals(self._best[1])} at step {self._best[0]}"
