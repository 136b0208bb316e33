"""Tokens per second into a training loop, side by side: python benchmarks/data_loader.py

The pipeline's loader (shuffled, packed), nanoGPT's get_batch, and `datasets` with torch's DataLoader, in one
process without workers: same tokens, sequence length and batch; batches of int64 inputs and labels. They
read in turn, in short bursts. Then start-up, memory and seeking of the pipeline's loader on 10 GB of tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from report import machine
from rich.console import Console
from rich.table import Table

from pipeline.data.batches import collate_items
from pipeline.data.loader import TrainLoader
from pipeline.data.packing import Stream, join
from pipeline.data.sampler import MixtureOrder, SourceShare

Read = Callable[[], Any]
DOCUMENT = 1000  # tokens of one, end included
END = 50_000  # id of the last one
SMALL, LARGE = 10 * 10**6, 10 * 10**9  # bytes
FARTHEST = 10**12  # sample to seek to
TARGETS = {"tokens_per_second": 100e6, "start_up_ratio": 1.1, "memory_growth_mib": 16.0, "seek_seconds": 0.1}


@dataclass(frozen=True)
class MappedPart:
    """Tokens of a file and where their documents end."""

    tokens: Any
    ends: Any
    loss_mask: None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class MappedStore:
    """One part: `<path>` holds uint16 tokens, `<path>.ends` int64 ends."""

    path: Path

    @property
    def parts(self) -> Sequence[MappedPart]:
        tokens = np.memmap(self.path, np.uint16, mode="r")
        return [MappedPart(tokens, np.memmap(f"{self.path}.ends", np.int64, mode="r"))]


def write_tokens(path: Path, num_bytes: int, *, is_sparse: bool) -> Path:
    """Random tokens, or a file of holes that reads as one document of zeros and takes no room on the disk."""
    num_tokens = num_bytes // 2
    with path.open("wb") as file:
        if is_sparse:
            file.truncate(num_bytes)
        else:
            rng = np.random.default_rng(0)
            for first in range(0, num_tokens, 1 << 24):
                size = min(1 << 24, num_tokens - first)
                tokens = rng.integers(END, size=size, dtype=np.uint16)
                tokens[(DOCUMENT - 1 - first) % DOCUMENT :: DOCUMENT] = END
                tokens.tofile(file)
    np.arange(DOCUMENT, num_tokens + 1, DOCUMENT).tofile(f"{path}.ends")
    return path


def ours(paths: Sequence[Path], length: int, batch: int, *, separate: bool) -> TrainLoader:
    """The pipeline's loader over the files, one source each."""
    rows = [Stream([MappedStore(path)], length, separate, END) for path in paths]
    order = MixtureOrder([SourceShare(f"{n}", len(row)) for n, row in enumerate(rows)], seed=0)
    return TrainLoader(
        join(rows),
        collate_items,
        order,
        torch.device("cpu"),
        micro_batch_size=batch,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_world_size=1,
        seed=0,
        num_workers=0,
    )


def nano_gpt(path: Path, length: int, batch: int) -> Read:
    """get_batch of nanoGPT's train.py: random windows, so that an epoch is no epoch."""

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(path, dtype=np.uint16, mode="r")  # anew each time, as there, against a memory leak
        ix = torch.randint(len(data) - length, (batch,))
        x = torch.stack([torch.from_numpy((data[i : i + length]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + length]).astype(np.int64)) for i in ix])
        return x, y

    return get_batch


def hugging_face(path: Path, length: int, batch: int, folder: Path) -> Read:
    """Rows saved by `datasets`, mapped again, shuffled by torch's DataLoader; labels are the inputs."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars, load_from_disk

    disable_progress_bars()
    tokens = np.fromfile(path, np.uint16)
    tokens = tokens[: len(tokens) // length * length]
    rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens), length)
    Dataset(pa.table({"input_ids": rows})).save_to_disk(str(folder))
    dataset = load_from_disk(str(folder)).with_format("torch")

    def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        inputs = torch.stack([item["input_ids"] for item in items])
        return {"input_ids": inputs, "labels": inputs.clone()}

    def without_end() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from torch.utils.data.DataLoader(
                dataset, batch_size=batch, shuffle=True, drop_last=True, collate_fn=collate
            )

    return without_end().__next__


def measure_speed(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Tokens per second of each participant, a number a round."""
    torch.set_num_threads(1)  # one process; threads that wait for work would spin on the other cores
    length, batch = arguments.sequence_length, arguments.batch
    path = write_tokens(folder / "tokens", arguments.megabytes * 10**6, is_sparse=False)
    halves = [write_tokens(folder / name, arguments.megabytes * 10**6 // 2, is_sparse=False) for name in "ab"]
    participants: dict[str, Read] = {
        "ours": ours([path], length, batch, separate=False).next_group,
        "ours, documents apart": ours([path], length, batch, separate=True).next_group,
        "ours, two sources": ours(halves, length, batch, separate=False).next_group,
        "nanoGPT": nano_gpt(path, length, batch),
        "datasets + DataLoader": hugging_face(path, length, batch, folder / "rows"),
    }
    found: dict[str, list[float]] = {name: [] for name in participants}
    for read in participants.values():
        seconds_of(read, 20)
    for turn in range(arguments.rounds):
        names = list(participants)[:: 1 if turn % 2 == 0 else -1]
        for name in names:
            read = participants[name]
            batches = max(3, min(1000, int(arguments.burst / seconds_of(read, 3) * 3)))
            found[name].append(batches * batch * length / seconds_of(read, batches))
    return found


def measure_claims(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Start-up and memory on 10 GB of tokens against 10 MB, and seeking far away in the order."""
    length, batch = arguments.sequence_length, arguments.batch
    small = write_tokens(folder / "small", SMALL, is_sparse=True)
    large = write_tokens(folder / "large", LARGE, is_sparse=True)
    starts: dict[Path, list[float]] = {small: [], large: []}
    firsts: dict[Path, list[float]] = {small: [], large: []}
    for turn in range(101):
        for path in (small, large)[:: 1 if turn % 2 == 0 else -1]:
            begin = time.perf_counter()
            loader = ours([path], length, batch, separate=True)
            stands = time.perf_counter()
            loader.next_group()
            firsts[path].append(time.perf_counter() - stands)
            starts[path].append(stands - begin)
            del loader  # not in the time of the next one
    loader = ours([large], length, batch, separate=True)
    seconds_of(loader.next_group, 100)
    before = own_memory_mib()
    seconds_of(loader.next_group, 2000)
    growth = own_memory_mib() - before
    seeks = []
    for position in np.random.default_rng(0).integers(FARTHEST, size=100).tolist():
        begin = time.perf_counter()
        loader.seek(position)
        loader.next_group()
        seeks.append(time.perf_counter() - begin)
    small_start, large_start = (median(seconds[1:]) for seconds in starts.values())
    small_first, large_first = (median(seconds[1:]) for seconds in firsts.values())
    return {
        "start_up_10mb_seconds": small_start,
        "start_up_10gb_seconds": large_start,
        "start_up_ratio": large_start / small_start,
        "first_batch_10mb_seconds": small_first,
        "first_batch_10gb_seconds": large_first,
        "memory_growth_mib": growth,
        "seek_seconds": max(seeks),
    }


def seconds_of(read: Read, times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        read()
    return time.perf_counter() - begin


def own_memory_mib() -> float:
    """Resident memory without mapped files, whose pages the system takes back when it wants them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def print_results(console: Console, speeds: dict[str, list[float]], claims: dict[str, float]) -> None:
    table = Table(title="one process, no workers")
    for column in ("participant", "million tokens/s", "ours / it  (min-max)"):
        table.add_column(column, justify="left" if column == "participant" else "right", no_wrap=True)
    for name, rounds in speeds.items():
        each = [mine / theirs for mine, theirs in zip(speeds["ours"], rounds, strict=True)]
        ratio = f"{median(each):.2f}  ({min(each):.2f}-{max(each):.2f})" if name != "ours" else ""
        table.add_row(name, f"{median(rounds) / 1e6:,.1f}", ratio)
    console.print(table)
    table = Table(title="ours, documents apart, 10 GB of tokens")
    for column in ("", "measured", "wanted"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    slowest = min(median(rounds) for name, rounds in speeds.items() if name.startswith("ours"))
    times = {key: 1000 * claims[f"{key}_seconds"] for key in ("start_up_10mb", "start_up_10gb")}
    times |= {key: 1000 * claims[f"{key}_seconds"] for key in ("first_batch_10mb", "first_batch_10gb")}
    rows = [
        ("million tokens/s, the slowest of ours", slowest / 1e6, ">= 100"),
        ("start-up: the loader stands, ms, 10 MB", times["start_up_10mb"], ""),
        ("start-up: the loader stands, ms, 10 GB", times["start_up_10gb"], ""),
        ("start-up, 10 GB over 10 MB", claims["start_up_ratio"], "<= 1.1"),
        ("then the first batch, ms, 10 MB", times["first_batch_10mb"], ""),
        ("then the first batch, ms, 10 GB: pages far apart", times["first_batch_10gb"], ""),
        ("memory grown over 2000 batches, MiB", claims["memory_growth_mib"], "<= 16"),
        ("longest of 100 seeks and their batch, ms", 1000 * claims["seek_seconds"], "<= 100"),
    ]
    for what, measured, wanted in rows:
        table.add_row(what, f"{measured:,.2f}", wanted)
    console.print(table)


def missed(speeds: dict[str, list[float]], claims: dict[str, float]) -> list[str]:
    """What was wanted and not reached."""
    slowest = min(median(rounds) for name, rounds in speeds.items() if name.startswith("ours"))
    lines = [f"{key}: {claims[key]:.3g}" for key in list(TARGETS)[1:] if claims[key] > TARGETS[key]]
    return [f"tokens_per_second: {slowest:.3g}"] * (slowest < TARGETS["tokens_per_second"]) + lines


def main() -> int:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 130)
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    with tempfile.TemporaryDirectory(prefix="data-loader-", dir=arguments.folder) as folder:
        speeds = measure_speed(arguments, Path(folder))
        claims = measure_claims(arguments, Path(folder))
    print_results(console, speeds, claims)
    failures = missed(speeds, claims)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": about, "command": sys.argv[1:], "failures": failures}
        results |= {"tokens_per_second": speeds, "claims": claims}
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    for failure in failures:
        print(f"not reached: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--sequence-length", type=int, default=1024)
    add("--batch", type=int, default=32)
    add("--megabytes", type=int, default=200, help="of tokens that are read for speed")
    add("--rounds", type=int, default=7, help="bursts of each participant")
    add("--burst", type=float, default=0.5, help="seconds of a burst, about")
    add("--folder", type=Path, help="where the files are made; default: the system's temporary folder")
    add("--output", type=Path, help="JSON file of all numbers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
