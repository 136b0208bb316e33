"""A run directory -> what a report shows of it: how it ended, what it was, its settings, its curves."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.loading import read_yaml
from pipeline.errors import ConfigError, PipelineError, listed, printable
from pipeline.foreign import CONFIGURATION, open_plain, read_plain
from pipeline.report.record import Record, read_record
from pipeline.run_lock import is_held
from pipeline.sinks.console import duration
from pipeline.sinks.jsonl import METRICS_FILE

LOG_TAIL, FAILURE_LINES = 1 << 16, 30


@dataclass
class RunView:
    """What is shown of a run."""

    name: str
    state: str
    """finished, running, failed, or stopped or killed."""
    facts: dict[str, str]
    settings: dict[str, str]
    """Dotted keys of recipe.yaml and, under `ds.`, of ds_config.json; the world size."""
    record: Record


def find_run(path: Path) -> Path:
    """The path, of a run directory.

    Raises:
        PipelineError: it is none; runs in it are named.
    """
    if (path / METRICS_FILE).is_file():
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
    if (path / "summary.json").is_file():
        state = "finished"
    elif not ended and is_held(path):
        state = "running"
    else:
        failure = _failure(path / "logs" / "rank00000.log")
        state = "failed" if failure else "stopped or killed"
    text = _json(path / "summary.json").get("sample")
    if isinstance(text, str) and record.step not in [sample["step"] for sample in record.samples]:
        record.samples.append({"step": record.step, "text": text})
    settings = dict(_settings(path))
    environment = _json(path / "environment.json")
    devices = environment.get("devices")
    counts = Counter(map(str, devices if isinstance(devices, list) else []))
    models = [settings.get(f"model.{key}", "null") for key in ("pretrained", "architecture", "kind")]
    facts = {
        "state": f"{state} at step {record.step:,}" if record.curves else f"{state} without a row",
        "why": failure,
        "time": duration(record.seconds),
        "model": next((model for model in models if model != "null"), ""),
        "main host": ", ".join(f"{number} × {name}" for name, number in counts.items()),
        "ranks": settings.get("world_size", ""),
        "commit": str(environment.get("git_commit", ""))[:10],
    }
    facts = {name: fact for name, fact in facts.items() if fact}
    return RunView(printable(path.absolute().name), state, facts, settings, record)


def _settings(path: Path) -> Iterator[tuple[str, str]]:
    with suppress(ConfigError, OSError):
        yield from _flatten(read_yaml(path / "recipe.yaml").tree, "")
    yield from _flatten(_json(path / "ds_config.json"), "ds.")
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
        tree = json.loads(read_plain(path, CONFIGURATION))
        return tree if isinstance(tree, dict) else {}
    return {}


def _failure(log: Path) -> str:
    """What the log says of a failure, if no line of information follows: then the run went on."""
    try:
        with open(open_plain(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    last = re.split(r"^[\d-]{10} [\d:,]{12} INFO ", text, flags=re.M)[-1]
    found = re.search(r"^[\d-]{10} [\d:,]{12} \w+ pipeline\.failure (.*)", last, re.M | re.S)
    return "\n".join(found[1].rstrip().splitlines()[-FAILURE_LINES:]) if found else ""
