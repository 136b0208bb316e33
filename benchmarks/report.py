"""What was measured, as ratios round by round, a table, and the machine it was measured on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
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
    """One participant."""

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
    """Of the whole job, one number a round."""
    first_step_seconds: float
    """From the start of the process to the end of the first optimizer step."""
    loss: float
    """Of the trained model, on one fixed batch."""
    flops_per_token: float | None
    causal_flops_per_token: float | None
    """The same with the half of attention that is not masked."""
    peak_memory_gib: float
    """Largest of any rank: allocated on a GPU, resident on a CPU."""
    adapter: bool = False
    """The participants of its group train an adapter, all but `ours-full`."""
    sm_mhz: float | None = None
    """SM clock in its bursts, as the median; None: not known."""
    watts: float | None = None
    """Power of the GPU in its bursts, as the median; None: not known."""
    notes: list[str] = field(default_factory=list)
    """Lines of its log: what was compiled, what computes attention, warnings."""

    @property
    def tokens_per_second(self) -> float:
        return median(self.round_tokens_per_second)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the dense peak of one GPU a rank; None on a device without a known peak."""
        return self._share_of_peak(self.flops_per_token)

    def _share_of_peak(self, flops: float | None) -> float | None:
        import torch

        from pipeline.planner.hardware import peak_flops

        peak = peak_flops(device_name(), self.precision) if torch.cuda.is_available() else None
        if peak is None or flops is None:
            return None
        return self.tokens_per_second / self.ranks * flops / peak

    def as_dict(self) -> dict[str, Any]:
        causal = self._share_of_peak(self.causal_flops_per_token)
        return asdict(self) | {
            "tokens_per_second": self.tokens_per_second,
            **{"mfu": self.mfu, "causal_mfu": causal},
        }

    @property
    def group(self) -> tuple[Any, ...]:
        """Rows of one group ran in turn: they are comparable round by round."""
        work = self.precision, self.ranks, self.sequence_length, self.adapter
        return self.model, self.rows, self.split, *work


@dataclass(frozen=True)
class Claim:
    """What is claimed of one group, and what was measured."""

    what: str
    group: str
    measured: float
    wanted: str
    holds: bool


def append_line(path: Path | None, record: dict[str, Any]) -> None:
    """One line of JSON more, on the disk at once: who is killed afterwards loses nothing of it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """The finished participants of a file that append_line wrote, or of a file of results.

    A line that a kill cut short counts as none.
    """
    text = path.read_text()
    if path.suffix == ".jsonl":
        records = [_parsed(line) for line in text.splitlines()]
    else:
        records = json.loads(text)["participants"]
    names = {each.name for each in fields(Row)}
    return [Row(**{k: v for k, v in record.items() if k in names}) for record in records if "loss" in record]


def _parsed(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return {}


def compare(row: Row, base: Row) -> dict[str, float]:
    """`row` over `base`, round by round."""
    pairs = zip(row.round_tokens_per_second, base.round_tokens_per_second, strict=True)
    each = [ours / theirs for ours, theirs in pairs]
    return {"median": median(each), "min": min(each), "max": max(each)}


def ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Every `ours` over every peer of its group."""
    found = []
    for ours in (row for row in rows if row.peer == "ours"):
        for peer in rows:
            if peer.group == ours.group and peer.peer != "ours":
                found.append(
                    {"ours": ours.name, "peer": peer.name, "precision": ours.precision, "ranks": ours.ranks}
                    | {"model": ours.model, "rows": ours.rows, "adapter": ours.adapter}
                    | compare(ours, peer)
                )
    return found


# Tokens a second of ours over the peer's. On a GPU other ones are asked for than on a CPU.
OVER_TRAINER = {"default": 1.35, "llama-50k": 1.7}
OVER_TRAINER_PLAIN = {"default": 1.35, "llama-50k": 2.0}
OVER_TRAINER_ON_GPU, OVER_COMPILED = 1.5, 1.1
# Of an adapter: over the Trainer and peft, and time over a step of all weights.
OVER_TRAINER_ADAPTER, ADAPTER_STEP = {"llama-50k": 1.3}, 0.75
ADAPTER_TOKENS_PER_SECOND = {"llama-8b": 1.54e4}  # of one H200, 60 % of its peak
TOKENS_PER_SECOND = {"gpt2-124m": 5e5, "llama-1b": 6e4, "llama-8b": 1e4}  # of one H200, packed
MEMORY = {"llama-50k": 0.5}
FIRST_STEP = 0.8
PACKED = 1.05  # time of packed rows over that of unpacked ones, from this length on
PACKED_LENGTH = 4096


def claims_of(rows: list[Row], on_gpu: bool) -> list[Claim]:
    """What ours must be beside its peers; ratios are medians over rounds."""
    claims = []
    for ours in (row for row in rows if row.peer == "ours"):
        about = f"{ours.model}, {ours.rows}, {ours.precision}, {ours.ranks} rank{'s' * (ours.ranks > 1)}"
        about += ", adapter" * ours.adapter

        def claim(what: str, measured: float, sign: str, wanted: float, about: str = about) -> None:
            holds = measured >= wanted if sign == ">=" else measured <= wanted
            claims.append(Claim(what, about, measured, f"{sign} {wanted:g}", holds))

        for peer in (row for row in rows if row.group == ours.group and row.peer != "ours"):
            pair = f"{ours.name} over {peer.name}"
            if (least := least_ratio(ours, peer, on_gpu)) is not None:
                claim(f"tokens/s, {pair}", compare(ours, peer)["median"], ">=", least)
            if peer.peer == FULL:
                claim(f"time of a step, {pair}", compare(peer, ours)["median"], "<=", ADAPTER_STEP)
            if peer.peer == "trainer" and not ours.adapter:
                if ours.model in MEMORY:
                    memory = ours.peak_memory_gib / peer.peak_memory_gib
                    claim(f"peak memory, {pair}", memory, "<=", MEMORY[ours.model])
                claim(
                    f"first step, {pair}", ours.first_step_seconds / peer.first_step_seconds, "<=", FIRST_STEP
                )
        if ours.rows == "packed":
            _claim_packed(ours, rows, claim)
        wanted = ADAPTER_TOKENS_PER_SECOND if ours.adapter else TOKENS_PER_SECOND
        if on_gpu and ours.model in wanted and (ours.adapter or ours.rows == "packed"):
            rate = ours.tokens_per_second / ours.ranks
            claim(f"tokens/s a GPU, {ours.name}", rate, ">=", wanted[ours.model])
    return claims


def least_ratio(ours: Row, peer: Row, on_gpu: bool) -> float | None:
    """The smallest ratio of tokens per second that is claimed; None: nothing is."""
    if peer.peer.endswith("+our-loss") or peer.peer == "trainer-unsloth":
        return 1.0
    if peer.peer == "pytorch-compiled":
        return OVER_COMPILED if on_gpu else None
    if peer.peer != "trainer":
        return None
    if on_gpu:
        return OVER_TRAINER_ON_GPU
    if ours.adapter:
        return OVER_TRAINER_ADAPTER.get(ours.model)
    return (OVER_TRAINER_PLAIN if ours.split == "plain" else OVER_TRAINER).get(ours.model)


def _claim_packed(ours: Row, rows: Iterable[Row], claim: Callable[..., None]) -> None:
    for other in rows:
        same = other.name == ours.name and other.group == (ours.model, "unpacked", *ours.group[2:])
        if same and other.micro_batch_size == ours.micro_batch_size and ours.sequence_length >= PACKED_LENGTH:
            slower = other.tokens_per_second / ours.tokens_per_second
            claim(f"time, packed rows over unpacked, {ours.name}", slower, "<=", PACKED)


def disagreement(rows: list[Row]) -> float:
    """Largest relative difference between any two final losses of those that train the same; infinite where
    one is not a number.
    """
    losses = [row.loss for row in rows if row.peer != FULL]
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
        ratio = next(
            (pair for pair in ratios([r for r in rows if r.group == row.group]) if pair["peer"] == row.name),
            None,
        )
        table.add_row(
            row.name + ", packed" * (row.rows == "packed"),
            f"{row.tokens_per_second:,.0f}",
            "" if ratio is None else f"{ratio['median']:.3f}  ({ratio['min']:.3f}-{ratio['max']:.3f})",
            f"{row.peak_memory_gib:.2f}",
            f"{row.first_step_seconds:.1f}",
            f"{row.loss:.4f}",
            "" if row.mfu is None else f"{row.mfu:.1%}",
            end_section=index + 1 < len(rows) and rows[index + 1].split != row.split,
        )
    console.print(table)


def print_claims(console: Console, claims: list[Claim]) -> None:
    table = Table(title="claims (ratios: medians, round by round)")
    for column in ["claim", "of", "measured", "wanted", ""]:
        table.add_column(column, no_wrap=True)
    for claim in claims:
        answer = "holds" if claim.holds else "does not hold"
        table.add_row(claim.what, claim.group, f"{claim.measured:.4g}", claim.wanted, answer)
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
