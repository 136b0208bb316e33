"""What the machine is and can do at best: python benchmarks/gpu_facts.py --output FILE

Versions, driver, clocks; the copy rate; the matrix products of the benchmark's models, which are the ceiling
of what they can reach; and which kernel scaled_dot_product_attention takes. `--tiny`: the motions alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import append_line, machine
from timing import device, kernels_of, median_seconds, or_reason

PACKAGES = ["flash_attn", "kernels", "liger_kernel", "transformer_engine", "torchao", "triton", "apex"]
QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total,ecc.mode.current"
# (tokens, in, out) of the largest products of each model, and the square one that papers quote.
PRODUCTS = {
    "square": (8192, 8192, 8192),
    "gpt2-124m qkv": (16384, 768, 2304),
    "gpt2-124m mlp": (16384, 768, 3072),
    "gpt2-124m head": (16384, 768, 50304),
    "llama-1b mlp": (8192, 2048, 8192),
    "llama-1b head": (8192, 2048, 128256),
    "llama-8b attention": (4096, 4096, 4096),
    "llama-8b mlp": (4096, 4096, 14336),
    "llama-8b head": (4096, 4096, 128256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON lines, one a fact, as soon as it is there")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few repeats")
    arguments = parser.parse_args()
    for name, fact in facts(arguments.tiny):
        print(name, json.dumps(fact), flush=True)
        append_line(arguments.output, {"fact": name, **fact})


def facts(tiny: bool) -> Any:
    """(name, what was found), one by one."""
    repeats = {"repeats": 3, "warmup": 1} if tiny else {}
    yield "machine", machine() | {name: find_spec(name) is not None for name in PACKAGES}
    yield "cuda", or_reason(_cuda)
    yield "copy", or_reason(lambda: copy_rate(1 << 20 if tiny else 4 << 30, **repeats))
    for name, shape in PRODUCTS.items():
        tokens, width, out = (side // 128 for side in shape) if tiny else shape
        yield f"matmul {name}", or_reason(lambda m=tokens, k=width, n=out: product_rate(m, k, n, **repeats))
    for name, mask in [("causal", None), ("dense mask", "dense")]:
        yield f"sdpa {name}", or_reason(lambda mask=mask: sdpa_kernels(64 if tiny else 4096, mask))


def _cuda() -> dict[str, Any]:
    asked = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    about: dict[str, Any] = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        about["capability"] = torch.cuda.get_device_capability(0)
        about["nccl"] = torch.cuda.nccl.version()
        told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout
        about["smi"] = (
            dict(zip(QUERY.split(","), told.splitlines()[0].split(", "), strict=False)) if told else {}
        )
    return about


def copy_rate(num_bytes: int, **repeats: int) -> dict[str, Any]:
    """Read and write of the device's memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), **repeats)
    return {"gb_per_second": 2 * num_bytes / seconds / 1e9}


def product_rate(m: int, k: int, n: int, **repeats: int) -> dict[str, Any]:
    """bf16 (m, k) times (k, n), the weight transposed as nn.Linear has it."""
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device())
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device())
    seconds = median_seconds(lambda: F.linear(x, weight), **repeats)
    return {"shape": [m, k, n], "tflop_per_second": 2 * m * k * n / seconds / 1e12}


def sdpa_kernels(length: int, mask: str | None) -> dict[str, Any]:
    """What scaled_dot_product_attention runs for a row of grouped queries."""
    query, key, value = (
        torch.randn(1, heads, length, 64, dtype=torch.bfloat16, device=device()) for heads in (8, 2, 2)
    )
    dense = None
    if mask is not None:
        dense = torch.ones(length, length, dtype=torch.bool, device=device()).tril()
    attend = lambda: F.scaled_dot_product_attention(  # noqa: E731
        query, key, value, attn_mask=dense, is_causal=dense is None, enable_gqa=True
    )
    return {"kernels": kernels_of(attend)[:3]}


if __name__ == "__main__":
    main()
