"""Single operations on this device: python benchmarks/gpu_ops.py [--facts] --output FILE

Attention, cross entropy and the optimizer, each way to compute them at the sizes of the benchmark's models,
forward and backward, with the memory it takes; a way that this machine lacks says why. `--facts`: what the
machine is and can do at best, as versions, driver, clocks, copy rate, the models' matrix products, and which
kernel scaled_dot_product_attention takes. `--tiny`: the motions alone, on a CPU.
"""

from __future__ import annotations

import argparse
import inspect
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
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipeline.objectives.given_logits import FusedKernels
from pipeline.objectives.linear_cross_entropy import linear_cross_entropy_sum

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
# rows, length, heads, heads of keys and values, width of a head
ATTENTION = {"gpt2-124m": (16, 1024, 12, 12, 64), "llama-1b": (2, 4096, 32, 8, 64)}
# tokens, hidden size, vocabulary
LOSSES = {"gpt2-124m": (16384, 768, 50304), "llama-1b": (8192, 2048, 128256)}
PARAMETERS, TENSORS = 124_000_000, 148  # of GPT-2
DOCUMENT = 512  # tokens of a document in a packed row
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEAF: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE, "requires_grad": True}
Way = Callable[[], Callable[[], Any]]
"""Makes the tensors, and returns the call to be timed."""


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


def peak_extra_bytes(action: Callable[[], Any]) -> int:
    """Return the most bytes that a call allocates on the GPU beyond those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


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


def operations(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield a record for each way to compute an operation."""
    for model, sizes in ATTENTION.items():
        shape = (1, 32, 4, 2, 8) if tiny else sizes
        rows, length, heads, _, width = shape
        flops = 3.5 * 2 * 2 * rows * heads * length**2 * width / 2  # causal; backward: 2.5 times the forward
        for name, way in attentions(*shape).items():
            measured = timed(way, tiny)
            if "ms" in measured:
                measured["tflop_per_second"] = flops / measured["ms"] / 1e9
            yield {"op": "attention", "way": name, "model": model, **measured}
    for model, sizes in LOSSES.items():
        for name, way in losses(*((64, 16, 96) if tiny else sizes)).items():
            yield {"op": "cross entropy", "way": name, "model": model, **timed(way, tiny)}
    for name, way in optimizers(1000 if tiny else PARAMETERS).items():
        yield {"op": "AdamW", "way": name, **timed(way, tiny)}


def timed(way: Way, tiny: bool) -> dict[str, Any]:
    """Return time, memory and kernels of a way, or why it cannot run here."""

    def measure() -> dict[str, Any]:
        action = way()
        found: dict[str, Any] = {"ms": median_seconds(action, tiny) * 1e3}
        if DEVICE.type == "cuda":
            found["extra_mib"] = peak_extra_bytes(action) / 2**20
        return {**found, "kernels": kernels_of(action)[:2]}

    return or_reason(measure)


def both_ways(function: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], None]:
    """Return a call of forward and backward."""

    def action() -> None:
        for leaf in leaves:
            leaf.grad = None
        out = function()
        out.backward(torch.ones_like(out))

    return action


def attentions(rows: int, length: int, heads: int, kv: int, width: int) -> dict[str, Way]:
    """Return name -> way. Documents are of DOCUMENT tokens."""
    document = min(DOCUMENT, length // 2)

    def leaves() -> list[Tensor]:
        return [torch.randn(rows, each, length, width, **LEAF) for each in (heads, kv, kv)]

    def dense() -> Callable[[], None]:
        query, key, value = qkv = leaves()
        of = torch.arange(length, device=DEVICE) // document
        mask = (of[:, None] == of[None]).tril().expand(rows, 1, length, length)

        def attend() -> Tensor:  # as transformers does it: with a mask the keys are repeated
            repeated = [each.repeat_interleave(heads // kv, 1) for each in (key, value)]
            return F.scaled_dot_product_attention(query, *repeated, attn_mask=mask)

        return both_ways(attend, qkv)

    def causal() -> Callable[[], None]:
        qkv = leaves()
        how: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
        return both_ways(lambda: F.scaled_dot_product_attention(*qkv, **how), qkv)

    def varlen() -> Callable[[], None]:
        from torch.nn.attention.varlen import varlen_attn

        flat = [each.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for each in leaves()]
        known = inspect.signature(varlen_attn).parameters
        more: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "enable_gqa" in known:
            more["enable_gqa"] = True
        bounds = torch.arange(0, rows * length + 1, document, dtype=torch.int32, device=DEVICE)
        return both_ways(lambda: varlen_attn(*flat, bounds, bounds, document, document, **more), flat)

    return {"sdpa, dense mask": dense, "sdpa, causal": causal, "varlen": varlen}


def losses(tokens: int, hidden: int, vocabulary: int) -> dict[str, Way]:
    """Return name -> way from hidden states to gradients, with the products of the output layer."""

    def way(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Way:
        def prepare() -> Callable[[], None]:
            x, head = torch.randn(tokens, hidden, **LEAF), torch.randn(vocabulary, hidden, **LEAF)
            labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
            return both_ways(lambda: loss(x, head, labels), [x, head])

        return prepare

    def liger(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(x, head, labels)

    def ours(kernels: FusedKernels | None) -> Way:
        def loss(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
            return linear_cross_entropy_sum(x, head, None, labels, x.dtype, None, kernels)

        return way(loss)

    return {
        "the head's products alone": way(lambda x, head, _: F.linear(x, head)),
        "eager, fp32 logits": way(lambda x, head, labels: F.cross_entropy(F.linear(x, head).float(), labels)),
        "ours, linear, blockwise": ours(None),
        "ours, linear, compiled": ours(FusedKernels()),
        "Liger, linear": way(liger),
    }


def optimizers(parameters: int) -> dict[str, Way]:
    """Return name -> way: a step of as many tensors as GPT-2 has."""

    def adamw(**how: bool) -> Way:
        def prepare() -> Callable[[], Any]:
            size = parameters // TENSORS
            tensors = [nn.Parameter(torch.zeros(size, device=DEVICE)) for _ in range(TENSORS)]
            for tensor in tensors:
                tensor.grad = torch.ones_like(tensor)
            return torch.optim.AdamW(tensors, **how).step

        return prepare

    return {"fused": adamw(fused=True), "foreach": adamw(foreach=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--facts", action="store_true", help="of the machine, in place of the operations")
    parser.add_argument("--output", type=Path, help="JSON lines, one a measurement, as soon as it is there")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few repeats")
    arguments = parser.parse_args()
    for record in (facts if arguments.facts else operations)(arguments.tiny):
        print(json.dumps(record), flush=True)
        append_line(arguments.output, record)


if __name__ == "__main__":
    main()
