"""Compares how many tokens per second loaders deliver to a training loop; part of benchmarks/data.py.

The participants are the pipeline's loader (shuffled, packed), nanoGPT's get_batch, and `datasets` with a
torch DataLoader, in one process without workers. They read the same tokens with the same sequence length and
batch size, as batches of int64 inputs and labels. They take turns in short bursts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from report import print_table
from rich.console import Console

from pipeline.data.batches import collate_items
from pipeline.data.loader import TrainLoader
from pipeline.data.packing import ConcatenatedRows, join_datasets
from pipeline.data.sampler import MixtureOrder, SourceShare

Read = Callable[[], Any]
LENGTH = 1024
BATCH = 32
DOCUMENT = 1000  # tokens of a document, including its last one
END = 50_000  # id of each document's last token
BURST_SECONDS = 0.5
OURS = "ours"
APART = "ours, documents apart"


def write_tokens(path: Path, num_tokens: int) -> Path:
    """Write random tokens, as uint16."""
    tokens = np.random.default_rng(0).integers(END, size=num_tokens, dtype=np.uint16)
    tokens[DOCUMENT - 1 :: DOCUMENT] = END
    tokens.tofile(path)
    return path


def ours(path: Path, *, separate: bool) -> Read:
    """Return the pipeline's loader over the file; `separate` keeps the documents of a row apart."""
    tokens = np.memmap(path, np.uint16, mode="r")
    ends = np.arange(DOCUMENT, len(tokens) + 1, DOCUMENT)
    part = SimpleNamespace(tokens=tokens, ends=ends, loss_mask=None, num_tokens=len(tokens))
    rows = ConcatenatedRows([SimpleNamespace(parts=[part])], LENGTH, separate, END)  # type: ignore[list-item]
    loader = TrainLoader(
        join_datasets([rows]),
        collate_items,
        MixtureOrder([SourceShare("0", len(rows))], seed=0),
        torch.device("cpu"),
        micro_batch_size=BATCH,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_world_size=1,
        seed=0,
        num_workers=0,
    )
    return loader.next_group


def nano_gpt(path: Path) -> Read:
    """Return get_batch of nanoGPT's train.py, which reads random windows and has no epochs."""

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(path, dtype=np.uint16, mode="r")  # reopened for each batch, as nanoGPT does
        ix = torch.randint(len(data) - LENGTH, (BATCH,))
        x = torch.stack([torch.from_numpy((data[i : i + LENGTH]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + LENGTH]).astype(np.int64)) for i in ix])
        return x, y

    return get_batch


def hugging_face(path: Path, folder: Path) -> Read:
    """Return torch's DataLoader over rows that `datasets` saved and mapped; labels are the inputs."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars, load_from_disk

    disable_progress_bars()
    tokens = np.fromfile(path, np.uint16)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens[: len(tokens) // LENGTH * LENGTH]), LENGTH)
    Dataset(pa.table({"input_ids": rows})).save_to_disk(str(folder))
    dataset = load_from_disk(str(folder)).with_format("torch")

    def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        inputs = torch.stack([item["input_ids"] for item in items])
        return {"input_ids": inputs, "labels": inputs.clone()}

    def repeat_batches() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from torch.utils.data.DataLoader(
                dataset, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=collate
            )

    return repeat_batches().__next__


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Return tokens per second of each participant, one number per round."""
    torch.set_num_threads(1)  # idle threads would spin on the other cores
    path = write_tokens(folder / "tokens", megabytes * 10**6 // 2)
    participants: dict[str, Read] = {
        OURS: ours(path, separate=False),
        APART: ours(path, separate=True),
        "nanoGPT": nano_gpt(path),
        "datasets + DataLoader": hugging_face(path, folder / "rows"),
    }
    rates: dict[str, list[float]] = {name: [] for name in participants}
    for read in participants.values():
        seconds_of(read, 20)
    for turn in range(rounds):
        for name in [*participants][:: 1 if turn % 2 == 0 else -1]:
            read = participants[name]
            batches = max(3, min(1000, int(BURST_SECONDS / seconds_of(read, 3) * 3)))
            rates[name].append(batches * BATCH * LENGTH / seconds_of(read, batches))
    return rates


def seconds_of(read: Read, times: int) -> float:
    """Return the seconds of so many reads."""
    start = time.perf_counter()
    for _ in range(times):
        read()
    return time.perf_counter() - start


def print_rates(console: Console, rates: dict[str, list[float]]) -> None:
    """Print each participant's rate, and the ratio of the pipeline's rate to it."""
    lines = []
    for name, rounds in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(rates[APART], rounds, strict=True)]
        ratio = "" if name == APART else f"{median(ratios):.2f}  ({min(ratios):.2f}-{max(ratios):.2f})"
        lines.append([name, f"{median(rounds) / 1e6:,.1f}", ratio])
    columns = ["participant", "million tokens/s", f"{APART} / it  (min-max)"]
    print_table(console, "one process, no workers", columns, lines)
