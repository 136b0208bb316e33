"""Attention, cross entropy and the optimizer alone: python benchmarks/gpu_ops.py --output FILE

Each way to compute them at the sizes of the benchmark's models, forward and backward, with the memory it
takes; a way that this machine lacks says why. `--tiny`: the motions alone, on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import append_line
from timing import device, kernels_of, median_seconds, or_reason, peak_extra_bytes
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.objectives.given_logits import FusedKernels, cross_entropy_sum
from pipeline.objectives.linear_cross_entropy import linear_cross_entropy_sum

# rows, length, heads, heads of keys and values, width of a head
ATTENTION = {
    "gpt2-124m": (16, 1024, 12, 12, 64),
    "llama-1b": (2, 4096, 32, 8, 64),
    "llama-8b": (1, 4096, 32, 8, 128),
}
# tokens, hidden size, vocabulary
LOSSES = {
    "gpt2-124m": (16384, 768, 50304),
    "llama-1b": (8192, 2048, 128256),
    "llama-8b": (4096, 4096, 128256),
}
PARAMETERS = 124_000_000
DOCUMENT = 512  # mean tokens of a document in a packed row
BACKENDS = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON lines, one a measurement, as soon as it is there")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--models", nargs="+", choices=ATTENTION, default=list(ATTENTION))
    arguments = parser.parse_args()
    for record in operations(arguments.models, arguments.tiny):
        print(json.dumps(record), flush=True)
        append_line(arguments.output, record)


def operations(models: list[str], tiny: bool) -> Iterator[dict[str, Any]]:
    """One record a way."""
    repeats = {"repeats": 2, "warmup": 1} if tiny else {}
    for model in models:
        rows, length, heads, kv, width = (1, 32, 4, 2, 8) if tiny else ATTENTION[model]
        shape = rows, length, heads, kv, width
        flops = 3.5 * 2 * 2 * rows * heads * length**2 * width / 2  # causal; backward: 2.5 times the forward
        for name, attend in attentions(*shape).items():
            measured = or_reason(lambda attend=attend: _timed(attend(), repeats))
            if "ms" in measured:
                measured["tflop_per_second"] = flops / measured["ms"] / 1e9
            yield {"op": "attention", "way": name, "model": model, **measured}
    for model in models:
        tokens, hidden, vocabulary = (64, 16, 96) if tiny else LOSSES[model]
        for name, loss in losses(tokens, hidden, vocabulary).items():
            measured = or_reason(lambda loss=loss: _timed(loss(), repeats))
            if "ms" in measured:  # what reading and writing bf16 logits once each way would take of the time
                measured["logits_gb_per_second"] = 6 * tokens * vocabulary / measured["ms"] / 1e6
            yield {"op": "cross entropy", "way": name, "model": model, **measured}
    for name, step in optimizers(1000 if tiny else PARAMETERS).items():
        yield {"op": "AdamW", "way": name, **or_reason(lambda step=step: _timed(step(), repeats))}


def _timed(action: Callable[[], Any], repeats: dict[str, int]) -> dict[str, Any]:
    milliseconds = median_seconds(action, **repeats) * 1e3
    extra = peak_extra_bytes(action)
    memory = {} if extra is None else {"extra_mib": extra / 2**20}
    return {"ms": milliseconds, **memory, "kernels": kernels_of(action)[:2]}


def _both_ways(function: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], None]:
    def action() -> None:
        for leaf in leaves:
            leaf.grad = None
        out = function()
        out.backward(torch.ones_like(out))

    return action


def attentions(rows: int, length: int, heads: int, kv: int, width: int) -> dict[str, Callable[[], Any]]:
    """Name -> a function that makes the call, forward and backward. Documents are of DOCUMENT tokens."""
    document = min(DOCUMENT, length // 2)

    def leaves() -> list[Tensor]:
        shapes = [(rows, each, length, width) for each in (heads, kv, kv)]
        return [
            torch.randn(shape, dtype=torch.bfloat16, device=device(), requires_grad=True) for shape in shapes
        ]

    def dense() -> Callable[[], None]:
        query, key, value = qkv = leaves()
        of = torch.arange(length, device=device()) // document
        mask = (of[:, None] == of[None]).tril().expand(rows, 1, length, length)

        def attend() -> Tensor:  # as transformers does it: with a mask the keys are repeated
            repeated = [each.repeat_interleave(heads // kv, 1) for each in (key, value)]
            return F.scaled_dot_product_attention(query, *repeated, attn_mask=mask)

        return _both_ways(attend, qkv)

    def causal(backend: str) -> Callable[[], None]:
        qkv = leaves()

        def attend() -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

        return _both_ways(attend, qkv)

    def varlen() -> Callable[[], None]:
        import inspect

        from torch.nn.attention.varlen import varlen_attn

        flat = [each.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for each in leaves()]
        known = inspect.signature(varlen_attn).parameters
        more: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "enable_gqa" in known:
            more["enable_gqa"] = True
        bounds = torch.arange(0, rows * length + 1, document, dtype=torch.int32, device=device())
        return _both_ways(lambda: varlen_attn(*flat, bounds, bounds, document, document, **more), flat)

    ways: dict[str, Callable[[], Any]] = {"sdpa, dense mask": dense, "varlen": varlen}
    return ways | {f"sdpa, causal, {name}": lambda name=name: causal(name) for name in BACKENDS}


def losses(tokens: int, hidden: int, vocabulary: int) -> dict[str, Callable[[], Any]]:
    """Name -> a function that makes the call from hidden states to gradients, the head's product included."""

    def leaves() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device(), requires_grad=True)
        head = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, device=device(), requires_grad=True)
        return x, head, torch.randint(0, vocabulary, (tokens,), device=device())

    def given_logits(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        x, head, labels = leaves()
        return _both_ways(lambda: loss(F.linear(x, head), labels), [x, head])

    def eager() -> Callable[[], None]:
        return given_logits(lambda logits, labels: F.cross_entropy(logits.float(), labels))

    def chunked(backend: str) -> Callable[[], None]:
        from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy

        return given_logits(lambda logits, labels: chunked_cross_entropy(logits, labels, backend=backend))

    def linear() -> Callable[[], None]:
        x, head, labels = leaves()
        return _both_ways(lambda: F.linear_cross_entropy(x, head, labels), [x, head])

    def ours(kernels: FusedKernels | None) -> Callable[[], None]:
        x, head, labels = leaves()
        return _both_ways(
            lambda: linear_cross_entropy_sum(x, head, None, labels, x.dtype, None, kernels), [x, head]
        )

    def liger() -> Callable[[], None]:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        x, head, labels = leaves()
        return _both_ways(lambda: liger_fused_linear_cross_entropy(x, head, labels), [x, head])

    def head_alone() -> Callable[[], None]:
        return given_logits(lambda logits, labels: logits)

    return {
        "the head's products alone": head_alone,
        "eager, fp32 logits": eager,
        "ours, blockwise": lambda: given_logits(cross_entropy_sum),
        "ours, compiled": lambda: given_logits(partial(cross_entropy_sum, kernels=FusedKernels())),
        "DeepSpeed, Triton": lambda: chunked("triton"),
        "ours, linear, blockwise": lambda: ours(None),
        "ours, linear, compiled": lambda: ours(FusedKernels()),
        "torch, linear": linear,
        "Liger, linear": liger,
    }


def optimizers(parameters: int) -> dict[str, Callable[[], Any]]:
    """Name -> a function that makes the step: one flat tensor, or as many as GPT-2 has."""

    def adamw(pieces: int, **how: bool) -> Callable[[], None]:
        tensors = [nn.Parameter(torch.zeros(parameters // pieces, device=device())) for _ in range(pieces)]
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        return torch.optim.AdamW(tensors, **how).step

    return {
        "fused, one flat tensor": lambda: adamw(1, fused=True),
        "fused, 148 tensors": lambda: adamw(148, fused=True),
        "foreach, 148 tensors": lambda: adamw(148, foreach=True),
    }


if __name__ == "__main__":
    main()
