"""Runs -> one HTML file with plotly.js and all numbers in it; every run writes its own at its end."""

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
REPORT_TIMEOUT = 5.0  # seconds that the report of a run that ends may take: some 300,000 rows
PANELS = {
    "Loss": ("train/loss", "eval/loss"),
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
"""Plots of columns that share a unit. Each further column has one of its own, further down."""


def list_panels(runs: Sequence[RunReport]) -> list[tuple[str, list[str], bool]]:
    """Return the title, the columns, and whether it is one of PANELS, of each plot."""
    known = {key for run in runs for key in run.record.curves}
    main = [(title, [key for key in keys if key in known], True) for title, keys in PANELS.items()]
    shown = {key for _, keys, _ in main for key in keys}
    return [panel for panel in main if panel[1]] + [(key, [key], False) for key in sorted(known - shown)]


def collect_figures(record: RunRecord) -> dict[str, str]:
    """Return the last and the best value of each column of PANELS that has a best one."""
    keys = [key for keys in PANELS.values() for key in keys if key in record.curves]
    best = {key: best_direction(key) for key in keys}
    return {key: format_last_and_best(record.curves[key], of == "min") for key, of in best.items() if of}


def encode_runs(paths: Sequence[Path], ended: bool = False) -> str:
    """Return everything that the page shows of these runs, as JSON for a script element.

    Args:
        ended: See read_run.

    Raises:
        MetricsFileError: A metrics.jsonl cannot be read, or is damaged.
    """
    runs = [read_run(path, ended) for path in paths]
    for run in runs:
        run.figures = collect_figures(run.record)
    if len({run.name for run in runs}) < len(runs):
        for number, run in enumerate(runs, 1):
            run.name += f" ({number})"
    data = {
        "made": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "unit": "tokens" if any("train/tokens_seen" in run.record.curves for run in runs) else "samples",
        "weights": SMOOTHING_WEIGHTS,
        "panels": list_panels(runs),
        "runs": runs,
    }
    encoded = to_json(data, inf_nan_mode="strings", fallback=lambda array: array.tolist())
    return encoded.decode().replace("<", "\\u003c")


def plotly_source() -> str:
    """Return plotly.js, which draws the page.

    Raises:
        ConfigError: plotly is not installed.
    """
    require_package("plotly", "the report")
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    source: str = get_plotlyjs()
    return source


def render_page(data: str) -> str:
    """Return the page. The data stays text in it; only our script and plotly's run."""
    own = Path(__file__).parent
    parts = {name: (own / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    parts |= {"data": data, "plotly": plotly_source(), "nonce": secrets.token_urlsafe()}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], parts["html"])


def write_final_report(directory: Path) -> Path | None:
    """Write the report of a run whose trackers are closed.

    Raises nothing: a Ctrl-C ends only the report.

    Returns:
        Its path; `None` after a failure or without enough time, which a line of the log says.
    """
    path = directory / REPORT_FILE
    made: list[Path] = []

    def make() -> None:
        try:
            replace_file(path, render_page(encode_runs([directory], ended=True)))
            made.append(path)
        except ConfigError as error:
            log.warning(
                "%s is not written: %s; then: %s", path, error, format_pipeline_command("report", directory)
            )
        except Exception as error:
            log.warning("%s is not written: %s", path, summarize_error(error))

    with suppress(BaseException):
        thread = threading.Thread(target=make, name="report", daemon=True)
        thread.start()
        thread.join(REPORT_TIMEOUT)
        if thread.is_alive():
            said = "%s takes more than %.0f s; this makes it: %s"
            log.warning(said, path, REPORT_TIMEOUT, format_pipeline_command("report", directory))
    return made[0] if made else None


def report_killed_run(directory: Path, advise: Callable[[], str]) -> Event | None:
    """Write the report of a run whose last process ended without a word, before the run resumes.

    Args:
        advise: Returns what helps if it was killed for memory.

    Returns:
        The event that the resumed run tells; `None` if the last process ended in words.
    """
    last = read_newest(directory / METRICS_FILE, "step")
    state, why = determine_outcome(directory, last or {})
    if state != ENDED_SILENTLY or (last is None and not why):
        return None
    write_final_report(directory)
    message = f"the last process of this run {format_state(ENDED_SILENTLY, last['step'] if last is not None else 0)}"
    if why:
        return Event(RUN_KILLED, f"{message}: {why}", advise())
    return Event(RUN_KILLED, message, "look for the out-of-memory killer (dmesg) and at the scheduler's log")
