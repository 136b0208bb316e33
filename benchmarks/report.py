"""Computes ratios round by round, prints tables, writes results, and describes the machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import FULL


@dataclass(frozen=True)
class Row:
    """Results of one participant."""

    name: str
    peer: str
    split: str
    precision: str
    ranks: int
    model: str
    rows: str
    """`packed` or `unpacked`."""
    sequence_length: int
    micro_batch_size: int
    round_tokens_per_second: list[float]
    """Tokens per second of the whole job, one number per round."""
    first_step_seconds: float
    """Seconds from the start of the process to the end of the first optimizer step."""
    loss: float
    """Loss of the trained model on one fixed batch."""
    flops_per_token: float | None
    peak_memory_gib: float
    """Largest peak of any rank: allocated memory on a GPU, resident memory on a CPU."""
    adapter: bool = False
    """Whether the participants of the group train an adapter; `ours-full` trains all weights nevertheless."""

    @property
    def tokens_per_second(self) -> float:
        """Median of all rounds."""
        return median(self.round_tokens_per_second)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the dense peak of one GPU per rank; `None` if the device's peak is not known."""
        import torch

        from pipeline.planner.hardware import peak_flops

        peak = peak_flops(device_name(), self.precision) if torch.cuda.is_available() else None
        if peak is None or self.flops_per_token is None:
            return None
        return self.tokens_per_second / self.ranks * self.flops_per_token / peak

    @property
    def group(self) -> tuple[Any, ...]:
        """Key of the group. Its participants took turns, so they can be compared round by round."""
        work = self.precision, self.ranks, self.sequence_length, self.adapter
        return self.model, self.rows, self.split, *work

    def as_dict(self) -> dict[str, Any]:
        """Return the row as it is written to results."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}


def append_line(path: Path | None, record: dict[str, Any]) -> None:
    """Append a line of JSON, and return once it is on the disk, where a later kill cannot lose it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write all results to a file; `None` writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def compare(row: Row, base: Row) -> dict[str, float]:
    """Return median, minimum and maximum of `row` over `base`, round by round."""
    pairs = zip(row.round_tokens_per_second, base.round_tokens_per_second, strict=True)
    by_round = [ours / theirs for ours, theirs in pairs]
    return {"median": median(by_round), "min": min(by_round), "max": max(by_round)}


def ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the ratio of every `ours` to every peer of its group."""
    return [
        {"ours": ours.name, "peer": peer.name, "precision": ours.precision, "ranks": ours.ranks}
        | {"model": ours.model, "rows": ours.rows, "adapter": ours.adapter}
        | compare(ours, peer)
        for ours in rows
        for peer in rows
        if ours.peer == "ours" != peer.peer and peer.group == ours.group
    ]


def disagreement(rows: list[Row]) -> float:
    """Return the largest relative difference between the final losses of participants that train the same.

    It is infinite if a loss is NaN.
    """
    losses = [row.loss for row in rows if row.peer != FULL]
    if not losses or any(loss != loss for loss in losses):
        return float("inf")
    return max(losses) / min(losses) - 1


def new_console() -> Console:
    """Return a console; without a terminal it is wide enough for the tables."""
    return Console(width=None if sys.stdout.isatty() else 150)


def print_table(console: Console, title: str, columns: list[str], lines: list[list[str]]) -> None:
    """Print a table. Columns of numbers are right-aligned."""
    table = Table(title=title)
    for place, column in enumerate(columns):
        has_numbers = all(line[place][:1].isdigit() or not line[place] for line in lines)
        table.add_column(column, justify="right" if has_numbers else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def print_rows(console: Console, rows: list[Row], title: str) -> None:
    """Print a table of the participants, with the pipeline's ratio to each peer."""
    by_peer = {(pair["peer"], pair["rows"]): pair for pair in reversed(ratios(rows))}
    lines = []
    for row in rows:
        pair = by_peer.get((row.name, row.rows))
        lines.append(
            [
                row.name + ", packed" * (row.rows == "packed"),
                f"{row.tokens_per_second:,.0f}",
                "" if pair is None else f"{pair['median']:.3f}  ({pair['min']:.3f}-{pair['max']:.3f})",
                f"{row.peak_memory_gib:.2f}",
                f"{row.first_step_seconds:.1f}",
                f"{row.loss:.4f}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
            ]
        )
    columns = ["tokens/s", "ours / it  (min-max)", "peak GiB", "first step s", "loss", "MFU"]
    print_table(console, title, ["participant", *columns], lines)


def device_name() -> str:
    """Return the name of the GPU, or of the processor if there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Return the device, the number of cores, versions and the date."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about = {"device": device_name(), "cores": f"{cores} (threads a rank: cores / ranks, for all)"}
    about["python"] = platform.python_version()
    for name in ("torch", "deepspeed", "transformers"):
        try:
            about[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a package on PYTHONPATH may lack metadata
            about[name] = "unknown"
    return about | {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
