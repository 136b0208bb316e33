"""The live bytes of a real model's forward and backward, allocation by allocation, in named stretches.

Three blocks of a family, prepared by this project's transforms, with a loss that makes no logits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from planner.allocations import Storages
from support.tiny import ALONE
from torch import Tensor, nn

from pipeline.config.model_schema import AdapterConfig, CausalLMConfig
from pipeline.engine.interface import add_document_bounds
from pipeline.models import build_model
from pipeline.models.blocks import compile_blocks, find_repeated_blocks
from pipeline.models.sharding import DevicePlacement, ModelRequest, Sharding
from pipeline.models.transforms import AdapterRequest, TransformContext, apply_transforms
from pipeline.training.assemble import choose_base_sharding

LAYERS = 2
VOCABULARY = 61
DTYPES = {"fp32": torch.float32, "autocast": torch.float32, "half": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a micro-batch and a block."""

    rows: int
    length: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    experts: int = 0
    experts_per_token: int = 0
    rank: int = 0
    """Rank of an adapter."""


@dataclass(frozen=True)
class Case:
    """A computation, apart from its sizes."""

    family: str
    device: str
    precision: str
    """`fp32`, `autocast` (fp32 weights, products in bf16) or `half` (bf16 weights)."""
    selective: bool = False
    apart: bool = False
    """Rows hold documents that do not see each other."""
    compiled: bool = False
    grouped: bool = True
    """Several heads share keys and values."""
    adapted: bool = False
    """All linear layers have low-rank matrices, which alone are trained."""
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def has_own_width(self) -> bool:
        """Whether the width of a head is a number of its own, and not hidden / heads."""
        return not self.family.startswith(("gpt2", "qwen2", "phi3", "olmo2", "qwen3_moe"))


class Live(Storages):
    """A record of every storage that comes and goes on a kind of device."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.log: list[tuple[str, int, int]] = []
        """(`+`, `-` or a mark; storage; bytes)"""

    def mark(self, name: str) -> None:
        self.log.append((name, 0, 0))

    def came(self, number: int, size: int) -> None:
        self.log.append(("+", number, size))

    def gone(self, number: int, size: int) -> None:
        self.log.append(("-", number, size))


class _HeldGradient(torch.autograd.Function):
    """Stand in for the loss without logits: the gradient of hidden states exists from the forward on."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.save_for_backward(torch.empty_like(hidden, dtype=dtype))
        ctx.dtype = hidden.dtype
        return hidden.new_zeros(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return ctx.saved_tensors[0].to(ctx.dtype)


def build(case: Case, sizes: Sizes, device: torch.device) -> nn.Module:
    extra = dict(case.extra)
    if case.has_own_width:
        extra["head_dim"] = sizes.head_dim
    if sizes.experts:
        count = "num_local_experts" if case.family == "mixtral" else "num_experts"
        extra |= {count: sizes.experts, "num_experts_per_tok": sizes.experts_per_token}
    if case.family == "qwen3_moe":
        extra["moe_intermediate_size"] = sizes.intermediate
    config = CausalLMConfig(
        architecture=case.family,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=LAYERS,
        num_heads=sizes.heads,
        num_key_value_heads=None if case.family == "gpt2" else sizes.key_value_heads,
        max_sequence_length=4096,
        extra=extra,
        activation_checkpointing="selective" if case.selective else "none",
    )
    sharding: Sharding = DevicePlacement(torch.device("cpu"), DTYPES[case.precision])
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    placement = TransformContext(device, separate_documents=case.apart, dtype=dtype)
    if case.adapted:
        adapter = AdapterConfig(rank=sizes.rank)
        sharding = choose_base_sharding(adapter, config, sharding, dtype)
        placement = replace(placement, adapter=AdapterRequest(adapter, 0, sharding, ALONE))
    request = ModelRequest(sharding, vocab_size=VOCABULARY, sequence_length=sizes.length)
    model = apply_transforms(build_model(config, request, 0), config, placement)
    if case.compiled:
        compile_blocks(model, backend="aot_eager_decomp_partition")
    return model.to(device).train()


def batch_of(case: Case, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    ids = torch.zeros(sizes.rows, sizes.length, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": ids}
    if case.apart:
        half = sizes.length // 2
        batch["position_ids"] = torch.arange(half).repeat(2).expand(sizes.rows, -1).contiguous()
        batch = add_document_bounds(batch)
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def trace(case: Case, sizes: Sizes, device: torch.device) -> dict[str, list[int]]:
    """Stretch -> live bytes after each allocation of it, over those at the record's start."""
    model = build(case, sizes, device)
    batch = batch_of(case, sizes, device)
    head = model.get_output_embeddings()
    head.forward = _HeldGradient.apply
    blocks = next(iter(find_repeated_blocks(model)))
    for _ in range(2 if case.compiled else 1):
        live = Live(case.device)
        for p in model.parameters():
            p.grad = None
        with _marked(blocks, live), live:
            _step(case, model, batch, live)
        gradients = {live.number(p.grad) for p in model.parameters() if p.grad is not None}
    return _stretches(live.log, gradients)


def _step(case: Case, model: nn.Module, batch: dict[str, Any], live: Live) -> None:
    gc.disable()  # what is collected in between would be a step's by chance
    live.mark("start")
    is_autocast = case.precision == "autocast"
    with torch.autocast(case.device, torch.bfloat16) if is_autocast else nullcontext():
        loss = model(**batch, use_cache=False).logits.sum()
    live.mark("loss")
    loss.backward()
    live.mark("done")
    gc.enable()


@contextmanager
def _marked(blocks: list[nn.Module], live: Live) -> Iterator[None]:
    """Mark where a block begins, forward and backward."""

    def before(index: int, hidden: Tensor) -> None:
        live.mark(f"forward {index}")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: live.mark(f"backward {index - 1}"))

    handles = []
    called: set[int] = set()
    for index, block in enumerate(blocks):

        def hook(_: Any, args: Any, kwargs: Any, index: int = index) -> None:
            if index not in called:
                called.add(index)
                before(index, args[0] if args else kwargs["hidden_states"])

        handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))

    def after(_: Any, __: Any, output: Any) -> None:
        if len(blocks) not in called:
            called.add(len(blocks))
            before(len(blocks), output[0] if isinstance(output, tuple) else output)

    handles.append(blocks[-1].register_forward_hook(after))
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _stretches(log: list[tuple[str, int, int]], gradients: set[int | None]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    now = 0
    stretch = ""
    for kind, number, size in log:
        if kind == "+" and number not in gradients:
            now += size
            found[stretch].append(now)
        elif kind == "-" and number not in gradients:
            now -= size
        elif not number:
            stretch = kind
            found[stretch] = [now]
    return found
