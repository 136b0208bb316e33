"""Models and data that fail in a chosen way; recipes name them by import path."""

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

DEVICE_ASSERT = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""


# Message of torch 2.11's allocator on an 80 GB GPU, shortened.
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
    """Return the data of `data.kind: support.faults:points`: 64 samples to train on, 11 held out."""
    return Points(64 if split == "train" else 11)


class Faulty(nn.Module):
    """Linear classifier that causes a fault on one rank.

    Args:
        fault: Kind of fault; see `_cause`. `nan` makes the logits NaN in every training forward from `at` on.
        rank: Rank that fails.
        at: Number of the training forward that fails, from 1; 0 fails while the model is built.
        once_file: File that the first fault creates; where it exists, no fault follows. `None`: always fail.

    The environment variable EVALUATION_FAULT names a fault for forwards of an evaluation, on every rank.
    """

    def __init__(self, fault: str, rank: int, at: int, once_file: str | None):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.fault = fault
        self.rank = rank
        self.at = at
        self.once_file = once_file
        self.calls = 0
        if at == 0 and int(os.environ.get("RANK", "0")) == rank:
            _cause(fault)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        if not self.training:
            _cause(os.environ.get("EVALUATION_FAULT", ""))
        is_failing_rank = int(os.environ.get("RANK", "0")) == self.rank
        if is_failing_rank and self.training and self.calls == self.at and self._first_time():
            _cause(self.fault)
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


def _cause(fault: str) -> None:
    """Cause the named fault in this process; an unknown name does nothing."""
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
        raise getattr(torch, "AcceleratorError", RuntimeError)(DEVICE_ASSERT)
    if fault == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


class Hungry(nn.Module):
    """Linear classifier that keeps memory for its backward pass until a limit.

    Args:
        mib_per_sample: MiB that each sample of a training batch keeps until the backward pass.
        limit_mib: On a CPU, MiB that the process may allocate beyond its present size, set by RLIMIT_DATA.
            On a GPU, MiB that the process may allocate in all. `None`: no limit.
    """

    def __init__(self, mib_per_sample: int, limit_mib: int | None):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.mib_per_sample = mib_per_sample
        if limit_mib is not None and os.environ.get("DS_ACCELERATOR") == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit_mib * 2**20 / total)
        elif limit_mib is not None:
            status = Path("/proc/self/status").read_text()
            now = int(status.partition("VmData:")[2].split()[0]) // 1024
            resource.setrlimit(resource.RLIMIT_DATA, ((now + limit_mib) * 2**20,) * 2)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.linear(inputs)
        for index in range(len(inputs) if self.training else 0):
            kept = torch.ones(self.mib_per_sample * 2**18, device=inputs.device)
            logits = logits + logits[index, 0] * kept[:1] * 0  # autograd saves the whole storage
        return logits


def hungry(mib_per_sample: int, limit_mib: int | None = None) -> nn.Module:
    """Return the model of `model.kind: support.faults:hungry`."""
    return Hungry(mib_per_sample, limit_mib)


def faulty(fault: str, rank: int = 0, at: int = 3, once_file: str | None = None) -> nn.Module:
    """Return the model of `model.kind: support.faults:faulty`."""
    return Faulty(fault, rank, at, once_file)
