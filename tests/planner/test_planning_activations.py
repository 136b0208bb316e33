"""The table of what blocks keep and need, against blocks traced at sizes that it was not made from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planner.traced_blocks import LAYERS, Case, Sizes, trace

from pipeline.planner.activations import (
    ActivationBytes,
    AdapterShape,
    MicroBatchSpec,
    RecomputePolicy,
    estimate_activations,
    format_row_name,
    read_coefficients,
)
from pipeline.planner.model import DecoderDimensions

GPT2 = (("resid_pdrop", 0.0), ("embd_pdrop", 0.0), ("attn_pdrop", 0.0))
CASES = [
    Case("llama", "cpu", "fp32"),
    Case("llama", "cpu", "fp32", grouped=False),
    Case("llama", "cpu", "fp32", apart=True),
    Case("llama", "cpu", "fp32", selective=True),
    Case("llama", "cpu", "autocast"),
    Case("llama", "cpu", "autocast", selective=True, apart=True),
    Case("llama", "cpu", "half"),
    Case("qwen2", "cpu", "autocast"),
    Case("qwen2", "cpu", "half", apart=True),
    Case("gpt2", "cpu", "fp32", grouped=False, extra=GPT2),
    Case("gpt2", "cpu", "autocast", selective=True, grouped=False, extra=GPT2),
    Case("gemma3_text", "cpu", "half", selective=True),
    Case("mixtral", "cpu", "half"),
    Case("llama", "cpu", "autocast", adapted=True),
    Case("qwen2", "cpu", "half", apart=True, adapted=True),
]
# Rows: one, as documents of several would be calls of their own.
SIZES = Sizes(1, 316, 336, 504, 6, 3, 56, rank=8)


def table_of(case: Case, sizes: Sizes) -> ActivationBytes:
    recompute = RecomputePolicy("selective" if case.selective else "none")
    work = MicroBatchSpec(
        case.family,
        case.device,
        case.precision,
        sizes.rows,
        sizes.length,
        LAYERS,
        apart=case.apart,
        recompute=recompute,
        grouped=case.grouped,
        adapter=AdapterShape(sizes.rank, 0.0, 0.0, everywhere=True) if case.adapted else None,
    )
    groups = sizes.key_value_heads if case.grouped else sizes.heads
    wide = (sizes.hidden, sizes.intermediate, sizes.heads, groups, sizes.head_dim)
    experts = (sizes.experts, sizes.experts_per_token)
    found = estimate_activations(work, DecoderDimensions(case.family, LAYERS, *wide, 61, False, *experts))
    assert found is not None
    return found


@pytest.mark.daily(
    "llama cpu fp32",
    "llama cpu autocast grouped adapted",
    "qwen2 cpu half apart grouped",
    "gpt2 cpu autocast selective",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=format_row_name)
def test_a_block_keeps_and_needs_what_the_table_says(case):
    groups = SIZES.key_value_heads if case.grouped else SIZES.heads
    given = replace(SIZES, experts=6, experts_per_token=3) if case.family == "mixtral" else SIZES
    sizes = SimpleNamespace(**vars(given) | {"key_value_heads": groups})
    seen: Any = trace(case, sizes, torch.device("cpu"))  # type: ignore[arg-type]
    table = table_of(case, given)
    block = table.blocks[0]
    start = {name: live[0] for name, live in seen.items()}
    measured = {
        "start": max(seen["start"]),
        "before": start["forward 0"],
        "forward": max(seen["forward 1"]),
        "end": max(seen[f"forward {LAYERS}"]),
        "kept backward": start["backward 1"] - start["backward 0"],
        "backward": max(seen["backward 1"]) - start["backward 1"],
        "carried": start["backward 0"],
    }
    said = {
        "start": table.start,
        "before": table.before,
        "forward": table.before + block.kept + block.forward,
        "end": table.before + LAYERS * block.kept + table.end,
        "kept backward": block.kept_backward,
        "backward": block.backward,
        "carried": table.carried + block.kept_backward,
    }
    assert said == pytest.approx(measured, rel=5e-3)


def test_a_family_that_nobody_traced_is_told_as_unknown():
    work = MicroBatchSpec("newfound", "cpu", "fp32", 1, 8, 2)
    assert estimate_activations(work, DecoderDimensions("newfound", 2, 8, 8, 1, 1, 8, 16, tied=False)) is None


def test_why_it_is_more_is_told_with_all_reasons():
    wide = DecoderDimensions("llama", 2, 64, 128, 4, 2, 16, 61, tied=False)
    some = AdapterShape(4, 64.0, 64.0, everywhere=False)
    work = MicroBatchSpec("llama", "cuda", "half", 1, 64, 2, grouped=True, compiled=True, adapter=some)

    def why(work: MicroBatchSpec) -> str:
        found = estimate_activations(work, wide)
        assert found is not None
        return found.overestimate

    assert why(replace(work, compiled=False, adapter=replace(some, everywhere=True))) == ""
    compiled = why(replace(work, adapter=replace(some, everywhere=True)))
    adapted = why(replace(work, compiled=False))
    assert compiled
    assert why(work) == f"{compiled}; {adapted}"


def test_every_nth_block_recomputes():
    wide = DecoderDimensions("llama", 4, 64, 128, 4, 2, 16, 61, tied=False)
    work = MicroBatchSpec("llama", "cpu", "fp32", 1, 64, 4, grouped=True)

    def kept(recompute: RecomputePolicy) -> list[float]:
        found = estimate_activations(MicroBatchSpec(**vars(work) | {"recompute": recompute}), wide)
        assert found is not None
        return [block.kept for block in found.blocks]

    whole = kept(RecomputePolicy())[0]
    least = kept(RecomputePolicy("full"))[0]
    assert least == 64 * 64 * 4 < whole
    assert kept(RecomputePolicy("full", 2)) == [least, whole, least, whole]


def test_the_table_has_whole_numbers():
    """Bytes of a product: a fraction says that a size is missing among them."""
    for name, row in read_coefficients().items():
        for form in [row["kept"], row["kept_backward"], *row["forward"], *row["backward"]]:
            assert all(value == round(value) for value in form.values()), name
    assert {"llama", "gpt2", "qwen2"} <= {name.split()[0] for name in read_coefficients()}
