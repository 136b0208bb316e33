"""A run directory -> what a report shows of it: how it ended, its facts and settings, its curves."""

from __future__ import annotations

import difflib
import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.loading import read_yaml
from pipeline.errors import ConfigError, PipelineError, listed
from pipeline.foreign import CONFIGURATION, open_plain, read_plain
from pipeline.report.record import Record
from pipeline.sinks.jsonl import METRICS_FILE

MOST_ABANDONED = 10  # stretches that a rollback left behind
LOG_TAIL, FAILURE_LINES = 1 << 16, 30
EXPECTED = "give a run directory, as runs/NAME-TIME"
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ ([A-Z]+) (\S+) ", re.M)


@dataclass(frozen=True)
class RunView:
    """What is shown of a run."""

    path: Path
    state: str
    """finished, running, failed or stopped."""
    status: str
    failure: str
    """The end of what the main process's log says of it."""
    record: Record
    abandoned: list[Record]
    settings: dict[str, str]
    """Dotted keys of recipe.yaml and, under `ds.`, of ds_config.json; the world size."""
    facts: dict[str, str]
    sample: str | None


def find_run(path: Path) -> Path:
    """The run directory that is meant.

    Raises:
        PipelineError: it is none; what may be meant is named.
    """
    if (path / METRICS_FILE).is_file():
        return path
    whole = path.absolute()
    if not path.exists():
        names = [each.name for each in whole.parent.iterdir()] if whole.parent.is_dir() else []
        near = difflib.get_close_matches(whole.name, names, n=1, cutoff=0.6)
        hint = f"did you mean {path.with_name(near[0])}?" if near else EXPECTED
        raise PipelineError(f"{path} does not exist; {hint}")
    for above in (whole.parent, whole.parent.parent):
        if (above / METRICS_FILE).is_file():
            raise PipelineError(f"{path} lies inside of a run directory; give that: {above}")
    if (path / "recipe.yaml").is_file():
        said = f"the run ended before its first row, see {path / 'logs'}"
        raise PipelineError(f"{path} has no {METRICS_FILE}: {said}")
    within = sorted(each.parent.name for each in path.glob(f"*/{METRICS_FILE}"))
    hint = f"it holds runs: {listed(within)}" if within else EXPECTED
    raise PipelineError(f"{path} is no run directory: it has no {METRICS_FILE}; {hint}")


def read_run(path: Path, ended: bool = False) -> RunView:
    """All that is shown of a run.

    Args:
        path: Its directory.
        ended: By who calls: nobody trains there any more.

    Raises:
        MetricsFileError: its metrics.jsonl cannot be read, or is damaged.
    """
    record = Record(path / METRICS_FILE)
    left = sorted(path.glob("metrics-until-step-*.jsonl"))[:MOST_ABANDONED]
    summary, failure = _json(path / "summary.json"), ""
    if (path / "summary.json").is_file():
        state = "finished"
    elif not ended and _is_locked(path / ".lock"):
        state = "running"
    else:
        failure = _failure(path / "logs" / "rank00000.log")
        state = "failed" if failure else "stopped"
    where = f"at step {record.step:,}" if record.num_rows else "without a row"
    settings = dict(_settings(path))
    sample = summary.get("sample")
    return RunView(
        path=path,
        state=state,
        status=f"{'stopped or killed' if state == 'stopped' else state} {where}",
        failure=failure,
        record=record,
        abandoned=[Record(each) for each in left],
        settings=settings,
        facts=_facts(record, settings, _json(path / "environment.json")),
        sample=sample if isinstance(sample, str) else None,
    )


def _facts(record: Record, settings: Mapping[str, str], environment: Mapping[str, Any]) -> dict[str, str]:
    def of(key: str, take: str, form: str = ".3g") -> str | None:
        curve = record.curves.get(key)
        if curve is None or not len(curve.finite):
            return None
        finite = curve.finite
        value = {"last": finite[-1], "min": finite.min(), "max": finite.max(), "mean": curve.mean()}[take]
        return _short(value) if form == "si" and math.isfinite(value) else format(value, form.strip("si"))

    devices = environment.get("devices")
    names = [str(each) for each in devices] if isinstance(devices, list) else []
    on = " · ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    most = settings.get("max_steps")
    model = [settings.get(f"model.{key}") for key in ("pretrained", "architecture", "kind")]
    facts = {
        "model": next((name for name in model if name not in (None, "null")), None),
        "steps": f"{record.step:,}" if most in (None, "null") else f"{record.step:,} of {most}",
        "tokens": of("train/tokens_seen", "last", "si"),
        "time": _duration(record.seconds) if record.seconds else None,
        "train loss, last": of("train/loss", "last", ".4f"),
        "eval loss, best": of("eval/loss", "min", ".4f"),
        "eval loss, last": of("eval/loss", "last", ".4f"),
        "tokens/s, mean": of("perf/tokens_per_second", "mean", "si"),
        "samples/s, mean": of("perf/samples_per_second", "mean", "si"),
        "MFU, mean": of("perf/mfu", "mean", ".1%"),
        "peak memory": (
            peak := of("memory/peak_allocated_gib", "max") or of("memory/peak_resident_gib", "max")
        )
        and f"{peak} GiB a rank",
        "ranks": settings.get("world_size"),
        "devices of the main host": on or None,
        "commit": str(environment.get("git_commit") or "")[:10] or None,
        "alerts": f"{record.num_events:,}",
    }
    return {name: value for name, value in facts.items() if value is not None}


def _short(number: float) -> str:
    """`1.05T`."""
    power = min(4, max(0, math.floor(math.log10(number) / 3))) if number >= 1 else 0
    return f"{number / 1000**power:,.4g}{('', 'k', 'M', 'G', 'T')[power]}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _settings(path: Path) -> Iterator[tuple[str, str]]:
    recipe: dict[str, Any] = {}
    with suppress(ConfigError, OSError):
        recipe = read_yaml(path / "recipe.yaml").tree
    yield from _flatten(recipe, "")
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


def _is_locked(path: Path) -> bool:
    with suppress(OSError):
        descriptor = open_plain(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _failure(log: Path) -> str:
    """What the log says of a failure, if nothing follows that says that the run went on."""
    try:
        with open(open_plain(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    starts = list(_LOG_LINE.finditer(text))
    places = [*(start.start() for start in starts), len(text)]
    said: list[str] = []
    for start, begin, end in zip(starts, places, places[1:], strict=False):
        if start[1] == "INFO":
            said = []
        elif start[2] == "pipeline.failure":
            said.append(text[begin:end].rstrip())
    return "\n".join("\n".join(said).splitlines()[-FAILURE_LINES:])


def numbers(values: Any) -> list[float | str | None]:
    """For JSON: NaN and infinities are words, as in metrics.jsonl."""
    words = {math.inf: "Infinity", -math.inf: "-Infinity"}
    plain = np.asarray(values, dtype=np.float64).tolist()
    return [value if math.isfinite(value) else words.get(value, "NaN") for value in plain]
