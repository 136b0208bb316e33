"""What was measured, as ratios round by round, a table, and the machine it was measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One participant."""

    name: str
    peer: str
    split: str
    precision: str
    ranks: int
    round_tokens_per_second: list[float]
    """Of the whole job, one number a round."""
    first_step_seconds: float
    """From the start of the process to the end of the first optimizer step."""
    loss: float
    """Of the trained model, on one fixed batch."""
    flops_per_token: float | None
    peak_memory_gib: float
    """Largest of any rank: allocated on a GPU, resident on a CPU."""

    @property
    def tokens_per_second(self) -> float:
        return median(self.round_tokens_per_second)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the dense peak of one GPU a rank; None on a device without a known peak."""
        import torch

        from pipeline.peak_flops import peak_flops

        peak = peak_flops(device_name(), self.precision) if torch.cuda.is_available() else None
        if peak is None or self.flops_per_token is None:
            return None
        return self.tokens_per_second / self.ranks * self.flops_per_token / peak

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}


def compare(row: Row, base: Row) -> dict[str, float]:
    """`row` over `base`, round by round."""
    pairs = zip(row.round_tokens_per_second, base.round_tokens_per_second, strict=True)
    each = [ours / theirs for ours, theirs in pairs]
    return {"median": median(each), "min": min(each), "max": max(each)}


def ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Every `ours` over every peer that ran in turn with it."""
    found = []
    for ours in (row for row in rows if row.peer == "ours"):
        for peer in rows:
            same = (peer.split, peer.precision, peer.ranks) == (ours.split, ours.precision, ours.ranks)
            if same and peer is not ours:
                found.append(
                    {"ours": ours.name, "peer": peer.name, "precision": ours.precision, "ranks": ours.ranks}
                    | compare(ours, peer)
                )
    return found


def disagreement(rows: list[Row]) -> float:
    """Largest relative difference between any two final losses; infinite where one is not a number."""
    losses = [row.loss for row in rows]
    if not losses or any(loss != loss for loss in losses):
        return float("inf")
    return max(losses) / min(losses) - 1


def print_table(console: Console, rows: list[Row], title: str) -> None:
    table = Table(title=title)
    columns = ["tokens/s", "ours / it  (min-max)", "peak GiB", "first step s", "loss", "MFU"]
    table.add_column("participant", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        ratio = next((pair for pair in ratios(rows) if pair["peer"] == row.name), None)
        table.add_row(
            row.name,
            f"{row.tokens_per_second:,.0f}",
            "" if ratio is None else f"{ratio['median']:.3f}  ({ratio['min']:.3f}-{ratio['max']:.3f})",
            f"{row.peak_memory_gib:.2f}",
            f"{row.first_step_seconds:.1f}",
            f"{row.loss:.4f}",
            "" if row.mfu is None else f"{row.mfu:.1%}",
            end_section=index + 1 < len(rows) and rows[index + 1].split != row.split,
        )
    console.print(table)


def device_name() -> str:
    """The GPU's name, or the processor's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Device, cores and versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about = {"device": device_name(), "cores": f"{cores} (threads a rank: cores / ranks, for all)"}
    about["python"] = platform.python_version()
    about |= {name: _version(name) for name in ("torch", "deepspeed", "transformers")}
    return about | {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # on PYTHONPATH without its metadata
        return "unknown"
