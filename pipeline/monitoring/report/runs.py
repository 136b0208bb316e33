"""Contents of a run's report and summary, read from its directory: outcome, settings and thinned curves.

A run records its processes when it starts. If the run ends silently, the kernel's log shows whether the
kernel killed one of them for memory. Without that log, the last measured memory gives a hint.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.loading import read_yaml
from pipeline.config.schema import EvalConfig
from pipeline.distributed.diagnosis import NEARLY_FULL_SHARE, RankProcess
from pipeline.distributed.machine import machine_id, read_kernel_kills, read_memory_usage
from pipeline.errors import ConfigError, PipelineError, escape_unprintable, format_names
from pipeline.files import (
    GIB,
    MAX_CONFIGURATION_BYTES,
    MAX_DESCRIPTION_BYTES,
    format_bytes,
    format_duration,
    is_run_locked,
    open_regular_file,
    read_regular_file,
    replace_file,
)
from pipeline.monitoring.events import PLAN, RUN_FAILED, SAMPLE, STOPPED_EARLY, TASKS_FOLDER, TIME
from pipeline.monitoring.trackers.console import format_count
from pipeline.monitoring.trackers.jsonl import METRICS_FILE, MetricsFileError, iterate_record, read_newest
from pipeline.redaction import redact, redact_text

MAX_CURVES = 400  # maximum number of columns of a metrics.jsonl that are read
MAX_EVENTS = 400
"""Maximum length of each list of events, alerts or samples; entries in the middle are removed."""
MAX_TASK_SAMPLES = 5
"""Maximum number of documents that are read of a task."""
TASK_TEXTS = ("prompt", "target", "answer")
"""Fields of a document."""
SUMMARY_COLUMNS = (
    "train/loss",
    "train/accuracy",
    "train/rewards/accuracy",
    "eval/loss",
    "eval/accuracy",
    "eval/rewards/accuracy",
)
"""Columns that have a line in the summary at the end of a run."""
MAX_POINTS = 1000
"""Maximum number of points of a curve: about the width of a plot in pixels."""
SMOOTHING_WEIGHTS = (0.6, 0.9, 0.99, 0.999)
"""Weights of the moving averages that the page offers."""
FLAT_SPREAD = 1e-9
"""Spread of the values, relative to their size, up to which a curve counts as constant."""
Array = NDArray[np.float64]


@dataclass
class RunRecord:
    """Contents of a metrics.jsonl."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """Column -> its curve."""
    alerts: list[dict[str, Any]] = field(default_factory=list)
    """Warnings and errors, each with its `position` on the x axes: step, tokens and hours."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events of level `info`, each with its `position`."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Texts that the model generated, each with its `position`."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """First documents of the tasks of the last evaluation: step, task, prompt, target and answer."""
    num_left_out: Counter[str] = field(default_factory=Counter)
    """Name of a list (`alerts`, `events` or `samples`) -> number of entries removed beyond MAX_EVENTS."""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds of all rows. `startup, shutdown, dropped steps` is the rest of the wall time."""
    sources: dict[str, float] = field(default_factory=dict)
    """Data source -> number of its samples, up to the last row."""
    step: int = 0
    """Step of the last row, or of a later TIME event."""
    tokens: float = 0.0
    """Number of tokens trained on, or of samples if the loss does not count tokens."""
    seconds: float = 0.0
    """Elapsed seconds of the run, over all its processes."""
    training_seconds: float = 0.0
    """Seconds spent on training steps, without the steps that a kill lost."""
    last: dict[str, Any] = field(default_factory=dict)
    """Last line of the file; empty if there is none."""


def read_record(path: Path) -> RunRecord:
    """Read a metrics.jsonl. A run that failed while it was built may have none; its record is empty.

    Raises:
        MetricsFileError: The file cannot be read, or is damaged.
    """
    record = RunRecord()
    lines = iterate_record(path) if path.exists() else iter(())
    # Keys of a row -> the numbers of all rows with these keys, in one array: floats of Python would take
    # gigabytes. A row's own numbers follow its line number and its position.
    rows: dict[tuple[str, ...], array[float]] = {}
    for line_number, row in enumerate(lines, 1):
        record.last = row
        if "event" in row:
            _add_event(record, row)
            continue
        record.step = int(row["step"])
        record.seconds = row.get("perf/elapsed_seconds", record.seconds)
        if "perf/goodput" in row:
            record.training_seconds = row["perf/goodput"] * record.seconds
        record.tokens = row.get("train/tokens_seen", row.get("train/samples_seen", record.tokens))
        try:
            rows.setdefault(tuple(row), array("d")).extend(
                (line_number, *_get_position(record), *row.values())
            )
        except OverflowError:  # an integer with more than 308 digits
            raise MetricsFileError(
                f"{path}:{line_number}: a number is larger than a float can be; delete this line"
            ) from None
    for name in ("alerts", "events", "samples"):
        entries = getattr(record, name)
        if len(entries) > MAX_EVENTS:
            record.num_left_out[name] = len(entries) - MAX_EVENTS
            del entries[MAX_EVENTS // 2 : -MAX_EVENTS // 2]
    _add_curves(record, rows)
    return record


def _get_position(record: RunRecord) -> tuple[int, float, float]:
    """Return the current position on the x axes: step, tokens and hours."""
    return record.step, record.tokens, round(record.seconds / 3600, 6)


def _add_event(record: RunRecord, event: dict[str, Any]) -> None:
    if event["event"] == SAMPLE:
        entries = record.samples
    else:
        entries = record.events if event.get("level") == "info" else record.alerts
    _, tokens, hours = _get_position(record)
    entries.append(event | {"position": (event["step"], tokens, hours)})
    if event["event"] == TIME and isinstance(event.get("elapsed_seconds"), float):
        # This event ends a process, so its numbers are newer than those of the last row.
        record.step = event["step"]
        record.seconds = event["elapsed_seconds"]
        record.training_seconds = event.get("goodput", 0.0) * record.seconds
        record.tokens = event.get("tokens_seen", record.tokens)


def _add_curves(record: RunRecord, rows: Mapping[tuple[str, ...], array[float]]) -> None:
    """Add the curves, phases and data sources to the record.

    Args:
        record: Record of all other lines.
        rows: Keys of a row -> for each row with these keys its line number, position and values, flat.
    """
    num_leading = 4  # line number, step, tokens, hours
    tables = {keys: np.frombuffer(flat).reshape(-1, num_leading + len(keys)).T for keys, flat in rows.items()}
    columns = dict.fromkeys(key for keys in tables for key in keys if key != "step")
    for key in list(columns)[:MAX_CURVES]:
        parts = [
            table[[*range(num_leading), num_leading + keys.index(key)]]
            for keys, table in tables.items()
            if key in keys
        ]
        points = np.hstack(parts)
        points = points[1:, points[0].argsort()]  # in the order of the file, without the line numbers
        record.curves[key] = build_curve(points, has_stalls=key.endswith("_seconds"))
        if key.startswith("time/"):
            record.phases[key.removeprefix("time/").removesuffix("_seconds")] = float(np.nansum(points[-1]))
        elif key.startswith("data/"):
            record.sources[key.removeprefix("data/").removesuffix("_samples")] = float(points[-1, -1])
    if record.phases:
        record.phases["startup, shutdown, dropped steps"] = max(
            0.0, record.seconds - sum(record.phases.values())
        )
    record.phases = {phase: seconds for phase, seconds in record.phases.items() if seconds}


@dataclass
class Curve:
    """A column with up to MAX_POINTS points. Each point is one row, or a bin of consecutive rows."""

    axes: Array
    """Step, tokens and hours of each point, (3, points)."""
    lines: Array
    """Centre of each bin; then, for each of SMOOTHING_WEIGHTS, the moving average of all rows up to the bin,
    (1 + len(SMOOTHING_WEIGHTS), points). NaN if no row of the bin is finite."""
    lowest: Array
    """Minimum of each bin, (points,); empty if each point is one row."""
    highest: Array
    """Maximum of each bin, (points,); empty if each point is one row."""
    not_finite: dict[int, int]
    """Point -> number of its rows that are NaN or infinite."""
    usual: list[float]
    """Lower and upper end of the default y range, in which a few spikes do not count; empty if no value is
    finite."""
    extremes: list[tuple[float, float]]
    """Lowest and highest value of all rows, each with its step; empty if no value is finite."""
    last: float
    """Value of the last row; may be infinite or NaN."""


def build_curve(points: Array, has_stalls: bool = False) -> Curve:
    """Smooth and thin a column.

    Args:
        points: Step, tokens, hours and value of each row, (4, rows).
        has_stalls: Whether a few rows of the column are very long waits. The centre of a bin is then its
            median instead of its mean, so that they do not count.
    """
    num_rows = points.shape[1]
    is_finite = np.isfinite(points[3])
    values = np.where(is_finite, points[3], np.nan)
    width = -(-num_rows // MAX_POINTS)  # rows per bin
    bins = np.pad(values, (0, -num_rows % width), constant_values=np.nan).reshape(-1, width)
    middle_rows = np.arange(len(bins)) * width + width // 2
    middle_rows[[0, -1]] = 0, num_rows - 1  # the curve begins at the first row and ends at the last one
    bins.sort(axis=1)  # NaN sorts last
    num_finite = np.isfinite(bins).sum(axis=1)
    bin_numbers = np.arange(len(bins))
    lowest = bins[:, 0]
    highest = bins[bin_numbers, num_finite - 1]
    with np.errstate(invalid="ignore", over="ignore"):
        if has_stalls:
            centre = bins[bin_numbers, (num_finite - 1) // 2]
        else:
            centre = np.nansum(bins, axis=1) / num_finite
        # Index of the newest finite row. Before the first one it is -1, which selects the appended NaN.
        newest = np.cumsum(is_finite)[middle_rows] - 1
        averages = [
            np.append(moving_average(values[is_finite], weight), np.nan)[newest]
            for weight in SMOOTHING_WEIGHTS
        ]
    lines = np.where(num_finite > 0, [centre, *averages], np.nan)
    lines[1:] = _round_digits(lines[1:])
    extremes = []
    if is_finite.any():
        extremes = [(values[row], points[0, row]) for row in (np.nanargmin(values), np.nanargmax(values))]
    num_not_finite = np.bincount(np.flatnonzero(~is_finite) // width)
    return Curve(
        axes=points[:3, middle_rows],
        lines=lines if width == 1 else _round_digits(lines),
        lowest=_round_digits(lowest) if width > 1 else np.empty(0),
        highest=_round_digits(highest) if width > 1 else np.empty(0),
        not_finite={int(point): int(num_not_finite[point]) for point in np.flatnonzero(num_not_finite)},
        usual=_compute_usual_range(lines[0], lowest, highest),
        extremes=extremes,
        last=points[3, -1],
    )


def moving_average(values: Array, weight: float) -> Array:
    """Return the exponential moving average at each value, with the bias towards 0 at its start corrected.

    Args:
        values: Finite values in order, (values,).
        weight: Weight of the average so far, from 0 to 1; larger values smooth more.
    """
    sums = values.copy()
    num_summed = 1  # values in each sum
    while num_summed < values.size and weight**num_summed > 1e-17:
        sums[num_summed:] += weight**num_summed * sums[:-num_summed]
        num_summed *= 2
    return sums * (1 - weight) / (1 - weight ** np.arange(1, values.size + 1))


def _compute_usual_range(centre: Array, lowest: Array, highest: Array) -> list[float]:
    """Return the default y range; see Curve.usual.

    It contains the middle 80 % of the values, the beginning and the end of the curve, and all values close to
    these.
    """
    centre = centre[np.isfinite(centre)]
    if not centre.size:
        return []
    values = np.concatenate([centre, lowest[np.isfinite(lowest)], highest[np.isfinite(highest)]])
    bulk = np.quantile(values, (0.1, 0.9), method="nearest")
    ends = *bulk, np.median(centre[:5]), np.median(centre[-5:])
    lower = min(ends)
    upper = max(ends)
    size = max(abs(lower), abs(upper))
    is_flat = upper - lower <= FLAT_SPREAD * size
    distance = (size or 1.0) if is_flat else 1.5 * (upper - lower)
    near = values[(values >= lower - distance) & (values <= upper + distance)]
    return [near.min(), near.max()]


def _round_digits(values: Array) -> Array:
    """Return the values with seven significant digits, which halves the size of the page."""
    scale = 10.0 ** (6 - np.floor(np.log10(np.maximum(np.abs(values), 1e-290))))
    return np.round(values * scale) / scale


LOG_TAIL_BYTES = 1 << 16  # bytes at the end of a log that are searched for a failure
FAILURE_LINES = 30  # maximum number of lines of a failure that are shown: the last ones
MAX_LOGS = 256  # maximum number of ranks whose logs are searched
PEAK_COLUMN = "memory/peak_resident_gib"
ENDED_SILENTLY = "ended without a recorded reason (killed?)"
PROCESSES_FILE = "logs/processes.json"
"""File of a run directory with the processes of its last start; see record_processes."""


@dataclass
class RunReport:
    """Contents of a run's report."""

    name: str
    """Name of the run directory."""
    state: str
    """Outcome: finished, running, stopped, failed, or ENDED_SILENTLY."""
    error: str
    """Line that names the failure; empty if there was none."""
    failure: str
    """Details of the failure, such as its traceback; empty if there was none."""
    facts: dict[str, str]
    """Name -> text of each line in the table at the top."""
    settings: dict[str, str]
    """Dotted key -> value of recipe.yaml, of ds_config.json (under `ds.`), and `world_size`."""
    record: RunRecord
    last_and_best: dict[str, str] = field(default_factory=dict)
    """Main metric -> its last and best value, in words."""


def check_run_directory(path: Path) -> Path:
    """Return the path if it is a run directory.

    Raises:
        PipelineError: It is not a run directory; the message names the runs inside it.
    """
    if any((path / name).is_file() for name in (METRICS_FILE, "recipe.yaml")):
        return path
    runs_inside = sorted(record.parent.name for record in path.glob(f"*/{METRICS_FILE}"))
    advice = "give a run directory, such as runs/NAME-TIME"
    if runs_inside:
        advice = f"give one of the runs in it: {format_names(runs_inside)}"
    problem = f"has no {METRICS_FILE}" if path.exists() else "does not exist"
    raise PipelineError(f"{path} {problem}; {advice}")


def read_run(path: Path, ended: bool = False) -> RunReport:
    """Read the contents of a run's report.

    Args:
        path: Directory of the run.
        ended: Whether the caller knows that the run has ended. Otherwise a run whose directory is locked by
            a process counts as running.

    Raises:
        MetricsFileError: Its metrics.jsonl cannot be read, or is damaged.
    """
    record = read_record(path / METRICS_FILE)
    failure = ""
    if not ended and is_run_locked(path) and not (path / "summary.json").is_file():
        state = "running"
    else:
        state, failure = determine_outcome(path, record.last)
        failure = redact_text(failure)
    final_sample = _read_json(path / "summary.json").get("sample")
    sampled_steps = [sample["step"] for sample in record.samples]
    if isinstance(final_sample, str) and record.step not in sampled_steps:
        record.samples.append({"step": record.step, "text": redact_text(final_sample)})
    record.tasks = _read_task_samples(path, record.step)
    settings = dict(_iterate_settings(path))
    environment = _read_json(path / "environment.json")
    devices = environment.get("devices")
    device_counts = Counter(map(str, devices if isinstance(devices, list) else []))
    models = [settings.get(f"model.{key}", "null") for key in ("pretrained", "architecture", "kind")]
    status = format_state(state, record.step) if record.curves else f"{state} without a row"
    error_lines = {
        "failed": extract_error_line(failure) or status,
        ENDED_SILENTLY: f"{status}: {failure}".removesuffix(": "),
    }
    num_not_finite = {key: sum(curve.not_finite.values()) for key, curve in record.curves.items()}
    not_finite = [f"{key} {number:,}" for key, number in num_not_finite.items() if number]
    plans = [str(each["message"]) for each in record.alerts + record.events if each["event"] == PLAN]
    facts = {
        "state": status,
        "time": format_duration(record.seconds),
        "model": next((model for model in models if model != "null"), ""),
        "main host": ", ".join(f"{number} × {name}" for name, number in device_counts.items()),
        "ranks": settings.get("world_size", ""),
        "plan": plans[-1].removeprefix("plan: ") if plans else "",
        "not finite": format_names(not_finite),
        "commit": str(environment.get("git_commit", ""))[:10],
    }
    facts = {name: redact_text(fact) for name, fact in facts.items() if fact}
    return RunReport(
        name=escape_unprintable(path.absolute().name),
        state=state,
        error=error_lines.get(state, ""),
        failure=failure,
        facts=facts,
        settings=settings,
        record=record,
    )


def determine_outcome(path: Path, last: Mapping[str, Any]) -> tuple[str, str]:
    """Return the outcome of a run that has ended.

    Args:
        path: Directory of the run.
        last: Last line of its metrics.jsonl; empty if there is none.

    Returns:
        The state, and the reason if the run failed or was killed; see RunReport.state and RunReport.failure.
    """
    if (path / "summary.json").is_file():
        return "finished", ""
    failure = _read_diagnosis(path) or _find_first_failure(path)
    if failure:
        return "failed", failure
    if last.get("event") == RUN_FAILED:
        return "failed", "\n".join(str(last[key]) for key in ("message", "traceback") if key in last)
    if last.get("event") == TIME:
        return "stopped", ""
    row = read_newest(path / METRICS_FILE, PEAK_COLUMN) or {}
    return ENDED_SILENTLY, explain_kill(path, float(row.get(PEAK_COLUMN, 0.0)))


def extract_error_line(failure: str) -> str:
    """Return the line that names the error: the one after its last traceback, or the first line.

    Args:
        failure: Text of RunReport.failure; may be empty.
    """
    lines = failure.rpartition(" pipeline.failure ")[2].strip().splitlines()
    frame_ends = [
        end for end, line in enumerate(lines, 1) if line.startswith(("Traceback (most", '  File "'))
    ]
    after_frames = lines[max(frame_ends, default=0) :]
    return next((line for line in after_frames if line.strip() and not line.startswith(" ")), "")


def format_state(state: str, step: int) -> str:
    """Return the state with its step: "failed at step 3"."""
    preposition = "after" if state == ENDED_SILENTLY else "at"
    return f"{state} {preposition} step {step:,}"


def _iterate_settings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield RunReport.settings, without secrets. Files that are missing or damaged are skipped."""
    with suppress(ConfigError, OSError):
        yield from _flatten(redact(read_yaml(path / "recipe.yaml").tree), "")
    yield from _flatten(redact(_read_json(path / "ds_config.json")), "ds.")
    world_size = _read_json(path / "split.json").get("world_size")
    if world_size is not None:
        yield "world_size", str(world_size)


def _flatten(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key, after `prefix`, and the value of each leaf; values have up to 300 characters."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str).strip('"')[:300]


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        tree = json.loads(read_regular_file(path, MAX_CONFIGURATION_BYTES))
        return tree if isinstance(tree, dict) else {}
    return {}


def _read_task_samples(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Return RunRecord.tasks from the newest results up to a step; empty if they are missing or damaged."""
    files = sorted((path / TASKS_FOLDER).glob("step-*.json"))
    files = [file for file in files if file.name <= f"step-{last_step:08d}.json"]
    if not files:
        return []
    with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        step = int(files[-1].stem.removeprefix("step-"))
        tasks = json.loads(read_regular_file(files[-1], MAX_DESCRIPTION_BYTES))["tasks"]
        return [
            {"step": step, "task": name, **{key: redact_text(str(sample[key])) for key in TASK_TEXTS}}
            for name, result in tasks.items()
            for sample in result["samples"][:MAX_TASK_SAMPLES]
        ][:MAX_EVENTS]
    return []


def _read_diagnosis(path: Path) -> str:
    """Return why a watchdog ended the run; empty if none did, or the run continued afterwards."""
    diagnosis = path / "hang" / "diagnosis.txt"
    record = path / METRICS_FILE
    with suppress(OSError):
        if not record.exists() or diagnosis.stat().st_mtime_ns >= record.stat().st_mtime_ns:
            return read_regular_file(diagnosis, MAX_CONFIGURATION_BYTES).decode(errors="replace").strip()
    return ""


def _find_first_failure(path: Path) -> str:
    """Return the earliest failure in the logs of all ranks, since it causes the others; empty without one."""
    with suppress(TypeError, ValueError):
        world_size = int(_read_json(path / "split.json").get("world_size", 1))
        logs = [path / "logs" / f"rank{rank:05d}.log" for rank in range(min(world_size, MAX_LOGS))]
        return min(filter(None, map(_read_failure, logs)), default=("", ""))[1]
    return ""


def _read_failure(log: Path) -> tuple[str, str] | None:
    """Return the time and the text of the failure that ends a log.

    Returns:
        The time and the text; `None` if the log has no failure or cannot be read, or if a line of level INFO
        follows: then the run continued.
    """
    try:
        with open(open_regular_file(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    after_info = re.split(r"^[\d-]{10} [\d:,]{12} INFO ", text, flags=re.M)[-1]
    match = re.search(r"^([\d-]{10} [\d:,]{12}) \w+ pipeline\.failure (.*)", after_info, re.M | re.S)
    if match is None:
        return None
    failure = match[2].rstrip().splitlines()[-FAILURE_LINES:]
    return match[1], "\n".join(failure)


def record_processes(directory: Path, everyone: Sequence[RankProcess]) -> None:
    """Write the ranks of a run that starts, and the memory limit of this machine, to PROCESSES_FILE.

    Does nothing if the file cannot be written.

    Args:
        directory: Directory of the run.
        everyone: All ranks; empty if this process is the only one.
    """
    now = read_memory_usage()
    alone = RankProcess(0, platform.node(), os.getpid(), machine_id())
    content = {
        "everyone": [asdict(each) for each in everyone or [alone]],
        "since": time.monotonic(),
        "limit": now.limit,
        "whose": "its cgroup allows" if now.by_cgroup else "the machine has",
    }
    with suppress(OSError):
        (directory / PROCESSES_FILE).parent.mkdir(exist_ok=True)
        replace_file(directory / PROCESSES_FILE, json.dumps(content))


def explain_kill(directory: Path, peak_gib: float) -> str:
    """Return the evidence that a process was killed for memory; empty if there is none.

    The report and the next start of a run call it. While a run is alive, its other ranks (`diagnosis.py`) and
    the guard of a launch script (`node_guard.py`) report a killed rank immediately.

    The kernel's log names killed processes of this machine. If it names no rank of the run, the resident
    memory of all ranks on the machine of rank 0 is estimated and compared with the memory limit.

    Args:
        directory: Directory of the run; PROCESSES_FILE in it names the ranks.
        peak_gib: Peak resident memory of rank 0 at the last row, in GiB; 0 if there is no row.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        content: dict[str, Any] = json.loads(
            read_regular_file(directory / PROCESSES_FILE, MAX_CONFIGURATION_BYTES)
        )
        everyone = [RankProcess(**each) for each in content["everyone"]]
        limit = content["limit"]
        killed_bytes = read_kernel_kills(content["since"])  # process ID -> resident bytes
        killed = [rank for rank in everyone if rank.machine == machine_id() and rank.pid in killed_bytes]
        if killed:
            suspect = killed[0]
            resident = float(killed_bytes[suspect.pid])
            cause = f"the kernel killed {suspect} for memory"
        else:
            suspect = everyone[0]
            resident = peak_gib * GIB
            cause = "most likely killed for memory"
        num_ranks = sum(rank.machine == suspect.machine for rank in everyone)
        if killed or num_ranks * resident > NEARLY_FULL_SHARE * limit:
            plural = "s" if num_ranks > 1 else ""
            memory = f"{num_ranks} rank{plural} on its machine x {format_bytes(resident)}"
            return f"{cause}: {memory}, and {content['whose']} {format_bytes(limit)}"
    return ""


def format_closing_line(name: str, text: object) -> str:
    """Return a line "NAME  TEXT" of the summary, with the texts of all lines aligned."""
    return f"{name:<13}  {text}"


def summary_lines(run_dir: Path, best_by: EvalConfig | None = None) -> list[str]:
    """Return the lines of the summary at the end of a run; none if metrics.jsonl cannot be read.

    Args:
        run_dir: Directory of the run.
        best_by: Section `eval` of the recipe: the metric of the best checkpoint has a line, too. `None`
            stands for its defaults.
    """
    try:
        record = read_record(run_dir / METRICS_FILE)
    except PipelineError:
        return []
    evaluation = best_by or EvalConfig()
    best_column = f"eval/{evaluation.best_metric}"
    lines = []
    if record.step:
        tokens = f", {format_count(record.tokens)} tokens" if "train/tokens_seen" in record.curves else ""
        duration = format_duration(record.training_seconds)
        lines.append(format_closing_line("steps", f"{record.step:,} in {duration}{tokens}"))
    last_row_step = record.curves["train/loss"].axes[0, -1] if "train/loss" in record.curves else 0
    early_stops = [event["message"] for event in record.events if _is_early_stop(event, last_row_step)]
    if early_stops:
        lines.append(format_closing_line("stopped early", early_stops[-1]))
    for key in dict.fromkeys((*SUMMARY_COLUMNS, best_column)):
        if key in record.curves:
            best_is_lowest = evaluation.best_is_lowest if key == best_column else key.endswith("loss")
            name = key.removeprefix("train/").replace("eval/", "eval ").replace("rewards/", "")
            text = format_last_and_best(record.curves[key], best_is_lowest)
            lines.append(format_closing_line(name, text))
    plans = [event["message"] for event in record.alerts + record.events if event["event"] == PLAN]
    if plans:
        lines.append(format_closing_line("plan", plans[-1].removeprefix("plan: ")))
    return lines


def _is_early_stop(event: Mapping[str, Any], last_row_step: float) -> bool:
    """Return whether a callback ended the run, and the run did not continue afterwards."""
    return bool(event["event"] == STOPPED_EARLY and event["step"] >= last_row_step)


def format_last_and_best(curve: Curve, best_is_lowest: bool) -> str:
    """Return the last and the best value of a curve, in words.

    Args:
        curve: The curve.
        best_is_lowest: Whether the lowest value is the best one, instead of the highest.
    """
    step = curve.axes[0, -1]
    last = f"{curve.last:.5g} at step {step:,.0f}"
    if not curve.extremes:
        return last
    word = "lowest" if best_is_lowest else "highest"
    value, best_step = curve.extremes[0 if best_is_lowest else 1]
    if best_step == step:
        return f"{last}, the {word}"
    return f"{last}; {word} {value:.5g} at step {best_step:,.0f}"
