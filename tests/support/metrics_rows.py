"""Reads metrics.jsonl without the values that differ from run to run by nature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEASURED = ("perf/", "memory/", "time/", "gpu/")
"""Prefixes of columns that clocks and allocators measure."""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return all rows without the events.

    Some events depend on what else the machine does, or on how an earlier attempt ended.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def read_reproducible_rows(folder: Path) -> list[dict[str, Any]]:
    """Return all rows without measured columns: two equal runs write the same values, bit for bit."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read_rows(folder)]


def read_time_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events `time`, one per process, which divide its wall time into phases."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "time"]
