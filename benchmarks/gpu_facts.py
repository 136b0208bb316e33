"""Measures this device and its limits: `python benchmarks/gpu_facts.py --output FILE`.

It records versions, driver, clocks, the copy rate, the speed of the benchmark models' matrix products, and
the kernels that scaled_dot_product_attention runs. A measurement that fails records the reason. `--tiny` uses
small sizes, which a CPU can compute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from report import append_line, machine
from torch.profiler import ProfilerActivity, profile

REPEATS = 20
WARMUP = 10
FLUSHED = 256 << 20  # bytes written between two timed calls, more than the L2 cache of any GPU
PACKAGES = ["flash_attn", "liger_kernel", "transformer_engine", "torchao", "triton"]
QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total,ecc.mode.current"
# (tokens, input features, output features) of the largest products of each model, and of the square product
# that papers quote.
PRODUCTS = {
    "square": (8192, 8192, 8192),
    "gpt2-124m mlp": (16384, 768, 3072),
    "gpt2-124m head": (16384, 768, 50304),
    "llama-1b mlp": (8192, 2048, 8192),
    "llama-1b head": (8192, 2048, 128256),
    "llama-8b mlp": (4096, 4096, 14336),
    "llama-8b head": (4096, 4096, 128256),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def median_seconds(action: Callable[[], Any], tiny: bool) -> float:
    """Return the median seconds of a call, by CUDA events with a cold L2 cache, or on a CPU by the clock.

    Args:
        tiny: Whether to time only two calls.
    """
    repeats = 2 if tiny else REPEATS
    warmup = 1 if tiny else WARMUP
    for _ in range(warmup):
        action()
    if DEVICE.type == "cpu":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - start)
        return median(seconds)
    flush_buffer = torch.empty(FLUSHED, dtype=torch.uint8, device=DEVICE)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush_buffer.zero_()
        start.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / 1e3


def is_kernel(event: Any) -> bool:
    """Return whether an event of the profiler is a kernel on the GPU."""
    is_on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
    return is_on_gpu and not getattr(event, "is_user_annotation", False)


def kernels_of(action: Callable[[], Any]) -> list[str]:
    """Return the names of the GPU kernels of a call, longest first; on a CPU those of its aten operators."""
    action()
    on_gpu = DEVICE.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        action()
        if on_gpu:
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    if on_gpu:
        longest = sorted(filter(is_kernel, averages), key=lambda each: -each.self_device_time_total)
    else:
        longest = sorted(averages, key=lambda each: -each.self_cpu_time_total)
        longest = [each for each in longest if each.key.startswith("aten::")]
    return [each.key for each in longest]


def or_reason(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a measurement, or why it cannot run here, so that the others still run."""
    try:
        return measure()
    except Exception as error:  # libraries raise errors of any type if they lack a kernel
        lines = str(error).strip().splitlines()
        return {"cannot": f"{type(error).__name__}: {lines[0][:200] if lines else ''}"}


def facts(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield one record per measurement."""
    yield {"fact": "machine", **machine(), **{name: find_spec(name) is not None for name in PACKAGES}}
    yield {"fact": "cuda", **or_reason(cuda)}
    yield {"fact": "copy", **or_reason(lambda: copy_rate(1 << 20 if tiny else 4 << 30, tiny))}
    for name, shape in PRODUCTS.items():
        sizes = tuple(side // 128 for side in shape) if tiny else shape
        yield {"fact": f"matmul {name}", **or_reason(lambda sizes=sizes: product_rate(*sizes, tiny))}
    length = 64 if tiny else 4096
    for name, is_dense in (("causal", False), ("dense mask", True)):
        yield {"fact": f"sdpa {name}", **or_reason(lambda dense=is_dense: sdpa_kernels(length, dense))}


def cuda() -> dict[str, Any]:
    """Return the versions of CUDA's libraries, and the GPU's properties as nvidia-smi reports them."""
    about: dict[str, Any] = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        about |= {"capability": torch.cuda.get_device_capability(0), "nccl": torch.cuda.nccl.version()}
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        about["smi"] = dict(zip(QUERY.split(","), output.splitlines()[0].split(", "), strict=False))
    return about


def copy_rate(num_bytes: int, tiny: bool) -> dict[str, Any]:
    """Measure the rate at which the device's memory is read and written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return {"gb_per_second": 2 * num_bytes / median_seconds(lambda: target.copy_(source), tiny) / 1e9}


def product_rate(m: int, k: int, n: int, tiny: bool) -> dict[str, Any]:
    """Measure a bf16 product of (m, k) and (k, n), with the weight transposed as nn.Linear stores it."""
    x = torch.randn(m, k, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE)
    seconds = median_seconds(lambda: F.linear(x, weight), tiny)
    return {"shape": [m, k, n], "tflop_per_second": 2 * m * k * n / seconds / 1e12}


def sdpa_kernels(length: int, is_dense: bool) -> dict[str, Any]:
    """Return the kernels that scaled_dot_product_attention runs for a row of grouped queries."""
    query, key, value = (
        torch.randn(1, heads, length, 64, dtype=torch.bfloat16, device=DEVICE) for heads in (8, 2, 2)
    )
    mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril() if is_dense else None
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": not is_dense, "enable_gqa": True}
    names = kernels_of(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    return {"kernels": names[:3]}


def main() -> None:
    """Print and append the record of each measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON lines; each measurement is appended at once")
    parser.add_argument("--tiny", action="store_true", help="use small sizes and few repeats")
    arguments = parser.parse_args()
    for record in facts(arguments.tiny):
        print(json.dumps(record), flush=True)
        append_line(arguments.output, record)


if __name__ == "__main__":
    main()
