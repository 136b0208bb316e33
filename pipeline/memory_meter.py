"""What memory the steps since the last row took at the most, on the device and on its host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch

from pipeline.distributed.resident import process_peak
from pipeline.units import GIB


class MemoryMeter:
    """Of a rank's own device; a look at the allocator's books waits for nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        # What trials of a micro-batch did is no step's.
        self._before: Mapping[str, Any] = torch.cuda.memory_stats(device) if device.type == "cuda" else {}

    def take(self) -> dict[str, float]:
        """Metrics since the last call; the host's since the process began or, on a CPU, had tried
        micro-batches.
        """
        host = {"memory/peak_resident_gib": process_peak() / GIB}
        if self._device.type != "cuda":
            return host
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before, self._before = self._before, stats
        return memory_row(stats, before) | host

    def in_use(self) -> dict[str, float]:
        """GiB right now: of the `host` what the process holds alone, without the pages of files that it
        maps; of a GPU, as `device`, the peak since the last row."""
        memory = psutil.Process().memory_info()
        used = {"host": (memory.rss - getattr(memory, "shared", 0)) / GIB}
        if self._device.type == "cuda":
            used["device"] = torch.cuda.max_memory_allocated(self._device) / GIB
        return used


def memory_row(stats: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """What two readings of torch.cuda.memory_stats say.

    `memory/alloc_retries`: how often, since the reading before, the allocator was out of memory, waited for
    the device and gave back what it kept. Such a step is slow, and the next size up fails.
    """
    return {
        "memory/peak_allocated_gib": stats["allocated_bytes.all.peak"] / GIB,
        "memory/peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "memory/alloc_retries": stats["num_alloc_retries"] - before.get("num_alloc_retries", 0),
    }
