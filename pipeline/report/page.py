"""Runs -> the data of a page, and the page: one HTML file with plotly.js and all numbers in it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, printable
from pipeline.report.record import HOURS, STEP, TOKENS, Curve, Record
from pipeline.report.runs import RunView, numbers
from pipeline.sinks.jsonl import METRICS_FILE

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Panel:
    """A plot: columns of the record that share a unit."""

    title: str
    unit: str
    keys: tuple[str, ...]


PANELS = (
    Panel("Loss", "", ("train/loss", "eval/loss")),
    Panel("Accuracy", "", ("train/accuracy", "eval/accuracy")),
    Panel("Gradient norm, before clipping", "", ("train/grad_norm",)),
    Panel("Learning rate", "", ("train/learning_rate",)),
    Panel("Throughput", "tokens/s", ("perf/tokens_per_second",)),
    Panel("Throughput in samples", "samples/s", ("perf/samples_per_second",)),
    Panel("Step time", "s", ("perf/step_time_seconds", "perf/data_time_seconds")),
    Panel("Model FLOPs utilisation", "", ("perf/mfu",)),
    Panel(
        "Memory, peak of a rank",
        "GiB",
        ("memory/peak_allocated_gib", "memory/peak_reserved_gib", "memory/peak_resident_gib"),
    ),
)
_X = ("step", "train/tokens_seen", "train/samples_seen", "perf/elapsed_seconds")  # axes, not curves


def panels_of(runs: Sequence[RunView]) -> list[Panel]:
    """Those of which some run has a column; then one for each column that is in none of them."""
    known = dict.fromkeys(key for run in runs for key in run.record.curves if key not in _X)
    main = [Panel(each.title, each.unit, tuple(filter(known.__contains__, each.keys))) for each in PANELS]
    main = [each for each in main if each.keys]
    if "perf/tokens_per_second" in known:  # the same curve by another unit
        main = [each for each in main if each.keys != ("perf/samples_per_second",)]
    shown = {key for each in main for key in each.keys}
    return main + [Panel(key, "", (key,)) for key in sorted(known) if key not in shown]


def page_data(runs: Sequence[RunView], live: bool = False) -> dict[str, Any]:
    """All that the page shows, as JSON has it."""
    panels = panels_of(runs)
    names = [run.path.absolute().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    return {
        "made": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "live": live,
        "unit": "tokens" if any("train/tokens_seen" in run.record.curves for run in runs) else "samples",
        "panels": [asdict(panel) | {"main": panel.title not in panel.keys} for panel in panels],
        "runs": [_run_data(run, printable(name), panels) for run, name in zip(runs, names, strict=True)],
        "differences": differences([run.settings for run in runs]),
    }


def _run_data(run: RunView, name: str, panels: Sequence[Panel]) -> dict[str, Any]:
    def curves(record: Record, main_only: bool = False) -> dict[str, Any]:
        keys = [key for panel in panels for key in panel.keys if not main_only or panel.title != key]
        return {key: _curve_data(record.curves[key]) for key in keys if key in record.curves}

    record = run.record
    samples = list(record.samples)
    if run.sample is not None and record.step not in [sample["step"] for sample in samples]:
        samples.append({"step": record.step, "text": run.sample})
    last = {
        key: curve.finite[-1:] for key, curve in record.curves.items() if re.fullmatch("data/.*_samples", key)
    }
    return {
        "name": name,
        "state": run.state,
        "status": run.status,
        "failure": run.failure,
        "facts": run.facts,
        "curves": curves(record),
        "abandoned": [curves(each, main_only=True) for each in run.abandoned],
        "events": [_words(event) for event in record.events],
        "numEvents": record.num_events,
        "samples": [_words(sample) for sample in samples],
        "phases": {name: round(seconds, 3) for name, seconds in record.phases.items()},
        "sources": {
            key[len("data/") : -len("_samples")]: numbers(at)[0] for key, at in last.items() if len(at)
        },
        "settings": run.settings,
    }


def _curve_data(curve: Curve) -> dict[str, Any]:
    means = {"mean": numbers(curve.bucket_means())} if curve.width > 1 else {}
    return means | {
        "step": numbers(curve.points[:, STEP]),
        "tokens": numbers(curve.points[:, TOKENS]),
        "hours": numbers(curve.points[:, HOURS].round(6)),
        "y": numbers(curve.values),
        "count": curve.count,
    }


def _words(event: dict[str, Any]) -> dict[str, Any]:
    """Without floats that JSON does not have."""
    return {
        key: value if isinstance(value, str | int) else numbers([value])[0] for key, value in event.items()
    }


def differences(settings: Sequence[dict[str, str]]) -> list[tuple[str, list[str | None]]]:
    """(dotted key, each run's value; None: it has none) of the keys whose values differ."""
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = [(key, [each.get(key) for each in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def encode(data: dict[str, Any]) -> str:
    """JSON that can stand in a script element: no text in it ends that."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def render(data: dict[str, Any]) -> str:
    """The page. What is in the data stays text in it; no script runs but ours and plotly's."""
    own = Path(__file__).parent
    plotly = find_spec("plotly")  # found, not imported: a second less
    if plotly is None or not plotly.submodule_search_locations:
        raise PipelineError("the report is drawn by plotly, which is not installed: pip install plotly")
    library = Path(plotly.submodule_search_locations[0], "package_data", "plotly.min.js")
    scripts = {"plotly": library.read_text("utf-8"), "script": (own / "page.js").read_text("utf-8")}
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts.values()]
    parts = scripts | {
        "policy": " ".join(f"'sha256-{each}'" for each in hashes),
        "style": (own / "page.css").read_text("utf-8"),
        "title": html.escape(", ".join(run["name"] for run in data["runs"])),
        "data": encode(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], (own / "page.html").read_text("utf-8"))


def write_page(page: str, path: Path) -> None:
    """In one step, so that a page that is opened is whole.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(page.encode("utf-8", "replace"))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def stamp(runs: Sequence[Path]) -> tuple[Any, ...]:
    """Changes when there is something new to show."""
    files = [path / name for path in runs for name in (METRICS_FILE, "summary.json", "logs/rank00000.log")]
    return tuple((each.stat().st_size, each.stat().st_mtime_ns) if each.exists() else None for each in files)
