"""The forecast of a run whose ranks differ, and the limit from which on it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner.test_states import whole_of
from support.tiny import deepspeed_json, recipe, resolve

from pipeline.files import GIB
from pipeline.planner.activations import MicroBatchSpec
from pipeline.planner.forecast import Forecast, forecast_resolved
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.memory import (
    FRAGMENT_SHARE,
    MODEL_PARALLEL_FRAGMENT_SHARE,
    MODEL_PARALLEL_USABLE_SHARE,
    RESERVED_SHARE,
    compute_phase_peaks,
)
from pipeline.planner.rank import RankSlice
from pipeline.planner.states import count_buffers, count_states

LLAMA = {
    "kind": "causal_lm",
    "architecture": "llama",
    "num_layers": 22,
    "num_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "max_sequence_length": 4096,
    "vocab_size": 65536,
}
TREE = recipe(
    model=LLAMA,
    data={"kind": "text", "paths": ["python_stdlib"], "sequence_length": 4096},
    batch={"micro_batch_size": 1, "gradient_accumulation_steps": 16},
)
STAGES = 8
IN_STAGES = deepspeed_json(1, "bf16") | {"pipeline": {"stages": STAGES}}


def forecast(split, ranks):
    config, resolved = resolve(TREE, split, ranks)
    return forecast_resolved(config, resolved, whole_of(TREE), resolve_hardware("h100", None, ranks))


def test_the_fullest_stage_is_told_with_what_it_has_itself():
    """Ends have few blocks beside the vocabulary: the one behind the first is the fullest."""
    found = forecast(IN_STAGES, STAGES)
    peaks = []
    blocks = []
    for stage in range(STAGES):
        rank = RankSlice.from_run(found.model, found.config, found.resolved, stage)
        work = MicroBatchSpec.from_run(found.config, found.resolved, rank.own, "cuda", stage)
        assert work is not None
        peaks.append(
            max(compute_phase_peaks(work, rank.own, count_states(rank), count_buffers(rank)).values())
        )
        blocks.append(work.blocks)
    assert sum(blocks) == 22
    assert max(peaks) not in (peaks[0], peaks[-1])
    assert found.memory.stage == peaks.index(max(peaks))
    assert found.memory.peak - found.memory.framework == pytest.approx(max(peaks))


@pytest.mark.parametrize(
    ("split", "ranks", "apart", "share"),
    [
        (deepspeed_json(2, "bf16"), 2, FRAGMENT_SHARE, 1.0),
        (IN_STAGES, STAGES, MODEL_PARALLEL_FRAGMENT_SHARE, MODEL_PARALLEL_USABLE_SHARE),
        (
            deepspeed_json(1, "bf16") | {"tensor_parallel": {"autotp_size": 2}},
            2,
            MODEL_PARALLEL_FRAGMENT_SHARE,
            MODEL_PARALLEL_USABLE_SHARE,
        ),
    ],
)
def test_it_fits_with_as_much_free_as_pieces_take(split, ranks, apart, share):
    found = forecast(split, ranks)
    held = found.memory.states.device
    moving = found.memory.peak - found.memory.framework - held.weights - held.masters - held.moments
    assert found.memory.spare_bytes == pytest.approx((apart - RESERVED_SHARE) * moving)
    assert found.memory.usable_share == share
    needed = (found.memory.peak + found.memory.spare_bytes) / share

    def on(size: float) -> Forecast:
        gpu = replace(found.hardware.gpu, memory=int(size))
        return replace(found, hardware=replace(found.hardware, gpu=gpu))

    assert on(needed + 2).fits
    assert not on(needed - 2).fits
    assert "should be free" in on(needed - 2).lacking
    assert (f"{share:.0%}" in on(needed - 2).lacking) == (share < 1)
    assert on(found.memory.peak - 2).lacking == "memory"


def test_too_little_host_memory_is_named():
    split = deepspeed_json(2, "bf16", offload_optimizer={"device": "cpu"})
    config, resolved = resolve(TREE, split, 2)
    found = forecast_resolved(
        config, resolved, whole_of(TREE), resolve_hardware("h100", None, 2, host_memory_gib=10)
    )
    assert found.lacking == f"host memory, {found.host_bytes / GIB:,.0f} of 10 GiB per machine"


def test_times_of_experts_are_said_not_to_be_verified():
    tree = TREE | {"model": LLAMA | {"architecture": "mixtral"}}
    config, resolved = resolve(tree, deepspeed_json(3, "bf16"), 2)
    found = forecast_resolved(config, resolved, whole_of(tree), resolve_hardware("h100", None, 2))
    assert found.time is not None
    assert any("mixtures of experts are not verified" in line for line in found.remarks())
    assert not any("experts" in line for line in forecast(deepspeed_json(3, "bf16"), 2).remarks())


def test_a_stage_of_which_nothing_is_trained_is_planned():
    """It lacks matrices and vectors, which are groups of their own; DeepSpeed drops no empty one."""
    first = ["*.embed_tokens.*", *(f"model.layers.{number}.*" for number in range(8))]
    config, resolved = resolve(TREE | {"model": LLAMA | {"freeze": first}}, IN_STAGES, STAGES)
    model = whole_of(TREE | {"model": LLAMA | {"freeze": first}})
    found = forecast_resolved(config, resolved, model, resolve_hardware("h100", None, STAGES))
    assert found.memory.stage > 0
