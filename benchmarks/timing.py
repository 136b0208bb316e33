"""How long an operation takes on this device, alone; and which kernels a call runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

FLUSHED = 256 << 20  # bytes written between two timed calls: more than any GPU's L2 cache


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def median_seconds(action: Callable[[], Any], repeats: int = 20, warmup: int = 10) -> float:
    """By CUDA events with a cold L2 cache, or by the clock."""
    for _ in range(warmup):
        action()
    if device().type == "cpu":
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
        return median(taken)
    cold = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for start, end in pairs:
        cold.zero_()
        start.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs) / 1e3


def peak_extra_bytes(action: Callable[[], Any]) -> int | None:
    """Most bytes allocated during a call beyond those before it; None on a CPU."""
    if device().type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernels_of(action: Callable[[], Any]) -> list[str]:
    """Names of the GPU kernels a call launches, longest first; on a CPU of its aten operators."""
    from torch.profiler import ProfilerActivity, profile

    action()
    on_gpu = device().type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        action()
        if on_gpu:
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    if not on_gpu:
        ordered = sorted(averages, key=lambda each: -each.self_cpu_time_total)
        return [each.key for each in ordered if each.key.startswith("aten::")]
    kernels = [
        each
        for each in averages
        if each.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(each, "is_user_annotation", False)
    ]
    return [each.key for each in sorted(kernels, key=lambda each: -each.self_device_time_total)]


def or_reason(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it measured, or why it cannot run here; the others have their turn all the same."""
    try:
        return measure()
    except Exception as error:  # whatever a library raises of a kernel it lacks
        lines = str(error).strip().splitlines()
        return {"cannot": f"{type(error).__name__}: {lines[0][:200] if lines else ''}"}
