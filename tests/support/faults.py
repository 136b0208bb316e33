"""Models and data that fail in one chosen way, brought into a run by import path."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

ASSERTED = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""


# Of torch 2.11's allocator, on a card that this machine lacks.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.81 "
    "GiB is free. Of the allocated memory 70.12 GiB is allocated by PyTorch."
)


class Points(Dataset[Any]):
    """Two noisy classes of points in the plane."""

    def __init__(self, num_samples: int = 64):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(num_samples) % 2
        self.inputs = torch.randn(num_samples, 2, generator=generator) + 2.0 * self.labels[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def points(split: str) -> Points:
    return Points(64 if split == "train" else 11)


class Faulty(nn.Module):
    """A linear classifier to which something happens in the given forward of the given rank, or, at 0, while
    it is built; in an evaluation, what EVALUATION_FAULT says.
    """

    def __init__(self, fault: str, rank: int, at: int, once_file: str | None):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.fault, self.rank, self.at, self.once_file = fault, rank, at, once_file
        self.calls = 0
        if at == 0 and int(os.environ.get("RANK", "0")) == rank:
            _fail(fault)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        if not self.training:
            _fail(os.environ.get("EVALUATION_FAULT", ""))
        mine = int(os.environ.get("RANK", "0")) == self.rank
        if mine and self.training and self.calls == self.at and self._first_time():
            _fail(self.fault)
        logits: Tensor = self.linear(inputs)
        if self.fault == "nan" and self.training and self.calls >= self.at:
            logits = logits * float("nan")
        return logits

    def _first_time(self) -> bool:
        if self.once_file is None:
            return True
        marker = Path(self.once_file)
        if marker.exists():
            return False
        marker.touch()
        return True


def _fail(fault: str) -> None:
    if fault == "raise":
        raise ZeroDivisionError("a programmer's mistake")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sleep":
        time.sleep(600)
    if fault == "allocate":
        torch.empty(2**62, dtype=torch.uint8)
    if fault == "memory":
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)
    if fault == "assert":
        raise getattr(torch, "AcceleratorError", RuntimeError)(ASSERTED)
    if fault == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


class Hungry(nn.Module):
    """A linear classifier that keeps so many MiB a sample for its backward. With `most`, from here on its
    process may take that many MiB more, as if a limit had been set; of a GPU, where there is one, in all.
    """

    def __init__(self, each: int, most: int | None):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.each = each
        if most is not None and os.environ.get("DS_ACCELERATOR") == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(most * 2**20 / total)
        elif most is not None:
            status = Path("/proc/self/status").read_text()
            now = int(status.partition("VmData:")[2].split()[0]) // 1024
            resource.setrlimit(resource.RLIMIT_DATA, ((now + most) * 2**20,) * 2)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.linear(inputs)
        for index in range(len(inputs) if self.training else 0):
            kept = torch.ones(self.each * 2**18, device=inputs.device)
            logits = logits + logits[index, 0] * kept[:1] * 0  # the product keeps all of it
        return logits


def hungry(each: int, most: int | None = None) -> nn.Module:
    return Hungry(each, most)


def faulty(fault: str, rank: int = 0, at: int = 3, once_file: str | None = None) -> nn.Module:
    return Faulty(fault, rank, at, once_file)
