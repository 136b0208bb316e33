"""The most memory that a stretch of a step held on this rank, on a GPU by torch's allocator, on a CPU by the
system; and what the rank may hold. What a first step would make and a refused one does not is added.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeline.distributed.machine import available_memory, forget_peak, resident_now, resident_peak
from pipeline.engine.memory import give_back

PAGE = 4096


class Peaks(ABC):
    """Bytes."""

    @abstractmethod
    def begin(self) -> None:
        """Gives back what is held for nothing, and starts to look."""

    @abstractmethod
    def take(self) -> int:
        """The most since the last call, or since `begin`."""

    @abstractmethod
    def now(self) -> int:
        """What is held."""

    @abstractmethod
    def limit(self) -> int:
        """What this rank may hold: what it does, and its share of what is free."""


class OfGpu(Peaks):
    """What torch's allocator has given out, without the blocks that it keeps."""

    def __init__(self, device: torch.device):
        self._device = device

    def begin(self) -> None:
        """See Peaks."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def take(self) -> int:
        """See Peaks. Waits for nothing: the books are the host's."""
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return most

    def now(self) -> int:
        """See Peaks."""
        return torch.cuda.memory_allocated(self._device)

    def limit(self) -> int:
        """See Peaks. What CUDA and NCCL take for themselves is gone from it."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


class OfHost(Peaks):
    """What is resident of this process.

    Args:
        sharers: Ranks on this machine.
    """

    def __init__(self, sharers: int):
        self._sharers = sharers

    def begin(self) -> None:
        """See Peaks."""
        gc.collect()
        give_back()
        forget_peak()

    def take(self) -> int:
        """See Peaks."""
        most = resident_peak()
        forget_peak()
        return most

    def now(self) -> int:
        """See Peaks."""
        return resident_now()

    def limit(self) -> int:
        """See Peaks. Of the tightest cgroup, or of the machine."""
        return resident_now() + available_memory() // self._sharers


def peaks_on(device: torch.device, sharers: int) -> Peaks:
    """Of the kind of memory that is scarce where is computed."""
    return OfGpu(device) if device.type == "cuda" else OfHost(sharers)


@contextmanager
def as_if_stepped() -> Iterator[list[int]]:
    """Around a step of which nothing stays: what optimizers keep is in memory as a step would leave it.

    [bytes that are not made in such a step, but in the first that counts]. States of zeros take no memory on
    a CPU until somebody writes to them, so each page is written to, its own value.
    """
    unmade = [0]

    def look(optimizer: Optimizer, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.Muon):  # passes over what has no gradient
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            unmade[0] = sum(p.numel() * p.element_size() for p in parameters if p not in optimizer.state)
        for state in list(optimizer.state.values()):
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.is_contiguous():
                    value.detach().view(-1)[:: max(1, PAGE // value.element_size())].mul_(1)

    handle = register_optimizer_step_post_hook(look)
    try:
        yield unmade
    finally:
        handle.remove()
