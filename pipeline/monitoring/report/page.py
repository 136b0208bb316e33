"""Report of one or more runs: one HTML file that includes plotly.js and all numbers.

Every run writes its own report at its end. The file has about 5 MB, mostly plotly.js. A page that loads
plotly.js from a server could not be opened on a cluster without internet access, or in five years.

The data is JSON in a script element, and all texts become text nodes. A content security policy permits only
the two scripts that have the page's random nonce. Curves are thinned for the page; smoothing and bins are
computed before that, over all rows.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic_core import to_json

from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.optional_packages import require_package
from pipeline.errors import ConfigError, summarize_error
from pipeline.files import replace_file
from pipeline.monitoring.events import RUN_KILLED, Event
from pipeline.monitoring.report.runs import (
    ENDED_SILENTLY,
    SMOOTHING_WEIGHTS,
    RunRecord,
    RunReport,
    determine_outcome,
    format_last_and_best,
    format_state,
    read_run,
)
from pipeline.monitoring.trackers.interface import best_direction
from pipeline.monitoring.trackers.jsonl import METRICS_FILE, read_newest

log = logging.getLogger(__name__)

REPORT_FILE = "report.html"
REPORT_TIMEOUT = 5.0  # maximum seconds for the report at the end of a run: enough for about 300,000 rows
PANELS = {
    "Loss": ("train/loss", "eval/loss"),
    "Bits per byte of text": ("eval/bits_per_byte",),
    "Accuracy": ("train/accuracy", "eval/accuracy"),
    "Rewards of answers": tuple(
        f"{part}/rewards/{side}" for part in ("train", "eval") for side in ("chosen", "rejected")
    ),
    "Margin of rewards": ("train/rewards/margin", "eval/rewards/margin"),
    "Share of pairs with a margin": ("train/rewards/accuracy", "eval/rewards/accuracy"),
    "Gradient norm, before clipping": ("train/grad_norm",),
    "Learning rate": ("train/learning_rate",),
    "Throughput, tokens/s": ("perf/tokens_per_second",),
    "Throughput, samples/s": ("perf/samples_per_second",),
    "Step time, s": ("perf/step_time_seconds", "perf/data_time_seconds"),
    "Model FLOPs utilisation": ("perf/mfu",),
    "Memory, peak of a rank, GiB": (
        "memory/peak_allocated_gib",
        "memory/peak_reserved_gib",
        "memory/peak_resident_gib",
    ),
}
"""Title -> columns of a main plot, which have the same unit. Each other column has its own plot below."""
TASK_COLUMNS = "eval/tasks/"
"""Prefix of the columns of tasks."""


def list_panels(runs: Sequence[RunReport]) -> list[tuple[str, list[str], bool]]:
    """Return for each plot its title, its columns that a run has, and whether it is a main plot.

    Each metric of tasks has a main plot with a curve for each task.
    """
    columns = {key for run in runs for key in run.record.curves}
    by_metric: dict[str, list[str]] = {}
    for key in sorted(columns):
        if key.startswith(TASK_COLUMNS):
            by_metric.setdefault(key.rpartition("/")[2], []).append(key)
    panels: dict[str, Sequence[str]] = dict(PANELS)
    for metric, keys_of_tasks in by_metric.items():
        # A single curve has no legend, so its title names the task.
        name = metric if len(keys_of_tasks) > 1 else keys_of_tasks[0].removeprefix(TASK_COLUMNS)
        panels[f"Tasks: {name}"] = keys_of_tasks
    main = [(title, [key for key in keys if key in columns], True) for title, keys in panels.items()]
    used = {key for _, keys, _ in main for key in keys}
    others = [(key, [key], False) for key in sorted(columns - used)]
    return [panel for panel in main if panel[1]] + others


def describe_last_and_best(record: RunRecord) -> dict[str, str]:
    """Return the last and the best value, in words, of each column of PANELS that has a best value."""
    keys = [key for keys in PANELS.values() for key in keys if key in record.curves]
    directions = {key: best_direction(key) for key in keys}
    return {
        key: format_last_and_best(record.curves[key], direction == "min")
        for key, direction in directions.items()
        if direction is not None
    }


def encode_runs(paths: Sequence[Path], ended: bool = False) -> str:
    """Return all data of the page as JSON for a script element.

    If two runs have equal names, each run gets a number.

    Args:
        paths: Directories of the runs.
        ended: Whether the processes of the runs are known to have ended.

    Raises:
        MetricsFileError: A metrics.jsonl cannot be read, or is damaged.
    """
    runs = [read_run(path, ended) for path in paths]
    for run in runs:
        run.last_and_best = describe_last_and_best(run.record)
    if len({run.name for run in runs}) < len(runs):
        for number, run in enumerate(runs, 1):
            run.name += f" ({number})"
    data = {
        "created": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "unit": "tokens" if any("train/tokens_seen" in run.record.curves for run in runs) else "samples",
        "weights": SMOOTHING_WEIGHTS,
        "panels": list_panels(runs),
        "runs": runs,
    }
    encoded = to_json(data, inf_nan_mode="strings", fallback=lambda array: array.tolist())
    return encoded.decode().replace("<", "\\u003c")


def plotly_source() -> str:
    """Return the source of plotly.js, which draws the plots.

    Raises:
        ConfigError: plotly is not installed.
    """
    require_package("plotly", "the report")
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    source: str = get_plotlyjs()
    return source


def render_page(data: str) -> str:
    """Return the HTML page.

    Args:
        data: Result of encode_runs.

    Raises:
        ConfigError: plotly is not installed.
    """
    folder = Path(__file__).parent
    parts = {name: (folder / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    parts |= {"data": data, "plotly": plotly_source(), "nonce": secrets.token_urlsafe()}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], parts["html"])


def write_final_report(directory: Path) -> Path | None:
    """Write the report of a run that has ended and whose trackers are closed; wait at most REPORT_TIMEOUT.

    A daemon thread writes it, and continues after the timeout as long as the process lives. Raises nothing:
    Ctrl-C ends only the wait.

    Args:
        directory: Directory of the run.

    Returns:
        Path of the report; `None` after a failure or a timeout, which are logged, or after Ctrl-C.
    """
    path = directory / REPORT_FILE
    written: list[Path] = []

    def write() -> None:
        try:
            replace_file(path, render_page(encode_runs([directory], ended=True)))
            written.append(path)
        except ConfigError as error:
            command = format_pipeline_command("report", directory)
            log.warning("%s is not written: %s; then run: %s", path, error, command)
        except Exception as error:
            log.warning("%s is not written: %s", path, summarize_error(error))

    with suppress(BaseException):
        thread = threading.Thread(target=write, name="report", daemon=True)
        thread.start()
        thread.join(REPORT_TIMEOUT)
        if thread.is_alive():
            command = format_pipeline_command("report", directory)
            log.warning("%s takes more than %.0f s; to write it, run: %s", path, REPORT_TIMEOUT, command)
    return written[0] if written else None


def report_killed_run(directory: Path, advise: Callable[[], str]) -> Event | None:
    """Write the report of a run whose last process ended silently, and return an event about that end.

    Does nothing otherwise. Call this before the run resumes.

    Args:
        directory: Directory of the run.
        advise: Function that returns advice for a process that was killed for memory.

    Returns:
        The event that the resumed run reports; `None` for a new run, or if the last process recorded how it
        ended.
    """
    last = read_newest(directory / METRICS_FILE, "step")
    state, reason = determine_outcome(directory, last or {})
    is_new_run = last is None and not reason
    if state != ENDED_SILENTLY or is_new_run:
        return None
    write_final_report(directory)
    step = last["step"] if last is not None else 0
    message = f"the last process of this run {format_state(ENDED_SILENTLY, step)}"
    if reason:  # the only known reason is a kill for memory
        return Event(RUN_KILLED, f"{message}: {reason}", advise())
    return Event(RUN_KILLED, message, "look for the out-of-memory killer (dmesg) and in the scheduler's log")
