"""metrics.jsonl without what differs from run to run by nature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLOCKS = ("perf/", "memory/", "time/", "gpu/")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows, without the events: some depend on what else a machine does, or on how an attempt ended."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def read_reproducible_rows(folder: Path) -> list[dict[str, Any]]:
    """The same without the columns of clocks and allocators, bit for bit."""
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in read_rows(folder)]


def read_time_events(folder: Path) -> list[dict[str, Any]]:
    """Where the time of each process went."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "time"]
