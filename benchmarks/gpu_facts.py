"""Measures this device and its limits: `python benchmarks/gpu_facts.py --output FILE`.

Versions, driver, clocks, copy rate, the matrix products of the benchmark's models, and the kernels that
scaled_dot_product_attention runs. What cannot be measured says why. `--tiny`: the motions alone, on a CPU.
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

REPEATS, WARMUP = 20, 10
FLUSHED = 256 << 20  # bytes written between two timed calls: more than any GPU's L2 cache
PACKAGES = ["flash_attn", "liger_kernel", "transformer_engine", "torchao", "triton"]
QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total,ecc.mode.current"
# (tokens, in, out) of the largest products of each model, and the square one that papers quote.
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
    """Time a call by CUDA events with a cold L2 cache, or by the clock; `tiny`: a few calls alone."""
    repeats, warmup = (2, 1) if tiny else (REPEATS, WARMUP)
    for _ in range(warmup):
        action()
    if DEVICE.type == "cpu":
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
        return median(taken)
    cold = torch.empty(FLUSHED, dtype=torch.uint8, device=DEVICE)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        cold.zero_()
        start.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / 1e3


def is_kernel(event: Any) -> bool:
    """Return whether a profiler's event is a kernel on the GPU."""
    is_on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
    return is_on_gpu and not getattr(event, "is_user_annotation", False)


def kernels_of(action: Callable[[], Any]) -> list[str]:
    """Return the GPU kernels that a call launches, longest first; on a CPU its aten operators."""
    action()
    on_gpu = DEVICE.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        action()
        if on_gpu:
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    if on_gpu:
        found = sorted(filter(is_kernel, averages), key=lambda each: -each.self_device_time_total)
    else:
        found = sorted(averages, key=lambda each: -each.self_cpu_time_total)
        found = [each for each in found if each.key.startswith("aten::")]
    return [each.key for each in found]


def or_reason(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what it measured, or why it cannot run here; the others have their turn all the same."""
    try:
        return measure()
    except Exception as error:  # whatever a library raises of a kernel it lacks
        lines = str(error).strip().splitlines()
        return {"cannot": f"{type(error).__name__}: {lines[0][:200] if lines else ''}"}


def facts(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield a record for each fact of the machine."""
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
    """Return the versions of CUDA's libraries, and what nvidia-smi says of the card."""
    about: dict[str, Any] = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        about |= {"capability": torch.cuda.get_device_capability(0), "nccl": torch.cuda.nccl.version()}
        asked = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
        about["smi"] = dict(zip(QUERY.split(","), told.splitlines()[0].split(", "), strict=False))
    return about


def copy_rate(num_bytes: int, tiny: bool) -> dict[str, Any]:
    """Measure reading and writing the device's memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return {"gb_per_second": 2 * num_bytes / median_seconds(lambda: target.copy_(source), tiny) / 1e9}


def product_rate(m: int, k: int, n: int, tiny: bool) -> dict[str, Any]:
    """Measure bf16 (m, k) times (k, n), the weight transposed as nn.Linear has it."""
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
    how: dict[str, Any] = {"attn_mask": mask, "is_causal": not is_dense, "enable_gqa": True}
    return {"kernels": kernels_of(lambda: F.scaled_dot_product_attention(query, key, value, **how))[:3]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON lines, one a measurement, as soon as it is there")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few repeats")
    arguments = parser.parse_args()
    for record in facts(arguments.tiny):
        print(json.dumps(record), flush=True)
        append_line(arguments.output, record)


if __name__ == "__main__":
    main()
