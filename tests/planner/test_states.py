"""The formula of weights, gradients and optimizer state against what real ranks hold, to the byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from parity.adapters import CASES as ADAPTERS
from parity.measure import missing
from parity.splits import (
    CPU,
    GPT2,
    LLAMA,
    SUMMED,
    TENSOR_2,
    TWO_STAGES,
    Case,
    cases,
    zero,
)
from planner.counting import counted
from support.tiny import VOCABULARY, recipe, resolve

from pipeline.errors import ConfigError
from pipeline.planner.model import ModelSpec
from pipeline.planner.rank import RankSlice, cut_for_tensor_parallel
from pipeline.planner.shapes import read_model_spec
from pipeline.planner.states import RankStates, count_states

PATIENCE = 900.0


def whole_of(tree: dict[str, Any]) -> ModelSpec:
    """States of a recipe, as a plan computes them."""
    config, _ = resolve(tree | {"batch": {"micro_batch_size": 1}}, {"torch": {"parallel": "single"}}, 1)
    words = config.model.vocab_size or VOCABULARY
    model = read_model_spec(
        config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": words})})
    )
    assert model is not None
    return model


def formula(tree: dict[str, Any], split: dict[str, Any], world_size: int, rank: int) -> dict[str, int]:
    config, resolved = resolve(tree, split, world_size)
    found = count_states(RankSlice.from_run(whole_of(tree), config, resolved, rank, on_cpu=True))
    return vars(found.device + found.host)  # what lies on a disk is no tensor


def agrees(ranks, tree: dict[str, Any], split: dict[str, Any], world_size: int) -> None:
    found = ranks(world_size).run(counted, tree, split, timeout=PATIENCE)
    expected = [formula(tree, split, world_size, rank) for rank in range(world_size)]
    assert found == expected


def daily(case: Case) -> bool:
    once = case.world_size == 2 and case.precision == "bf16"
    return once and "recomputed" not in case.split.name and "NVMe" not in case.split.name


def marked(found: list[Case], is_daily) -> list[Any]:
    slow = pytest.mark.slow
    nightly = pytest.mark.nightly
    return [
        pytest.param(case, id=str(case), marks=[slow] if is_daily(case) else [slow, nightly])
        for case in found
    ]


@pytest.mark.timeout(PATIENCE + 60)
@pytest.mark.parametrize("case", marked(list(cases()), daily))
def test_of_every_split(ranks, case):
    if lacking := missing(case):
        pytest.skip(lacking)
    agrees(ranks, case.recipe, case.json, case.world_size)


@pytest.mark.parametrize(
    "case", marked(ADAPTERS, lambda case: daily(case) and "dora, seq" in case.split.name)
)
def test_of_every_adapter(ranks, case):
    agrees(ranks, case.recipe, case.json, case.world_size)


@dataclass(frozen=True)
class Further:
    """Cases that the parity suite lacks."""

    json: dict[str, Any]
    world_size: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
HALVES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
WHOLE = {"stage3_param_persistence_threshold": 0}
SGD = {"optimizer": {"kind": "sgd", "learning_rate": 1e-3}}
BARE_SGD = {"optimizer": {"kind": "sgd", "momentum": 0.0, "learning_rate": 1e-3}}
ADAFACTOR = {"optimizer": {"kind": "adafactor", "learning_rate": 1e-3}}
MUON = {"optimizer": {"groups": [{"patterns": ["*.mlp.*"], "kind": "muon"}]}}
GROUPS = {"optimizer": {"groups": [{"patterns": ["*norm*", "lm_head.*"], "weight_decay": 0.5}]}}
ONE = {"batch": {"micro_batch_size": 2}}
ODD = LLAMA | {"hidden_size": 36, "num_heads": 3, "num_key_value_heads": 1, "intermediate_size": 37}
QLORA = {"adapter": {"kind": "lora", "rank": 4, "quantize": "nf4"}}
SOME = {
    "adapter": {"kind": "lora", "rank": 4, "targets": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
}
LORA = {"adapter": {"kind": "lora", "rank": 4}}
WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128}


def frozen(*patterns: str) -> dict[str, Any]:
    return LLAMA | {"freeze": list(patterns)}


FURTHER = {
    "sgd, plain": Further({"torch": {"parallel": "ddp"}}, 2, SGD),
    "sgd without momentum, ZeRO 2": Further(zero(2) | BF16, 2, BARE_SGD),
    "sgd, ZeRO 3": Further(zero(3, **WHOLE) | BF16, 2, SGD),
    "sgd, ZeRO 2, optimizer on CPU": Further(zero(2, offload_optimizer=CPU) | BF16, 2, SGD),
    "adafactor, plain": Further({"torch": {"parallel": "ddp"}}, 2, ADAFACTOR),
    "adafactor, ZeRO 0": Further(zero(0) | BF16, 2, ADAFACTOR),
    "muon, plain": Further({"torch": {"parallel": "ddp"}}, 2, MUON),
    "groups, ZeRO 1": Further(zero(1) | BF16, 4, GROUPS),
    "groups, ZeRO 3": Further(zero(3, sub_group_size=3000) | BF16, 2, GROUPS),
    "half masters and states, ZeRO 1": Further(zero(1) | HALVES),
    "half masters and states, ZeRO 2": Further(zero(2) | HALVES),
    "half masters and states, ZeRO 3": Further(zero(3, **WHOLE) | HALVES),
    "half masters and states, ZeRO 2, optimizer on CPU": Further(zero(2, offload_optimizer=CPU) | HALVES),
    "half masters and states, ZeRO 3, optimizer on CPU": Further(zero(3, offload_optimizer=CPU) | HALVES),
    "one micro-batch, ZeRO 2, optimizer on CPU": Further(zero(2, offload_optimizer=CPU) | BF16, 2, ONE),
    "summed in fp32, ZeRO 2, optimizer on CPU": Further(zero(2, offload_optimizer=CPU) | BF16 | SUMMED),
    "summed in fp32, ZeRO 3, optimizer on CPU": Further(zero(3, offload_optimizer=CPU) | BF16 | SUMMED),
    "aligned parameters, ZeRO 2": Further(zero(2, parameter_alignment=True) | BF16, 4, {}, ODD),
    "odd shapes, ZeRO 2": Further(zero(2), 4, {}, ODD),
    "odd shapes, ZeRO 3": Further(zero(3, stage3_param_persistence_threshold=200) | BF16, 4, {}, ODD),
    "hpZ 2, nothing kept whole": Further(zero(3, zero_hpz_partition_size=2, **WHOLE) | BF16, 4, {}, ODD),
    "frozen, plain": Further({"torch": {"parallel": "ddp"}}, 2, {}, frozen("*.embed_tokens.*")),
    "frozen, ZeRO 2": Further(zero(2) | BF16, 2, {}, frozen("model.layers.0.*")),
    "frozen, ZeRO 3": Further(zero(3, **WHOLE) | BF16, 2, {}, frozen("model.layers.0.*")),
    "a stage without vectors": Further(
        zero(1) | TWO_STAGES | FP16, 2, {}, frozen("*.1.*norm*", "model.norm.*")
    ),
    "stages of as many blocks": Further(
        zero(1) | {"pipeline": {"stages": 2, "partition": "uniform"}}, 2, {}, LLAMA | {"num_layers": 3}
    ),
    "three blocks on two stages": Further(zero(1) | TWO_STAGES | BF16, 2, {}, LLAMA | {"num_layers": 3}),
    "tied, cut": Further(zero(1) | TENSOR_2, 2, {}, LLAMA | {"extra": {"tie_word_embeddings": True}}),
    "4 bits, plain": Further({"torch": {"parallel": "ddp"}, **BF16}, 2, QLORA, WIDE),
    "4 bits, ZeRO 2": Further(zero(2) | BF16, 2, QLORA, WIDE),
    "some layers": Further(zero(2) | BF16, 2, SOME),
    "some layers, plain": Further({"torch": {"parallel": "ddp"}, **BF16}, 2, SOME),
    "lora, gpt2": Further(zero(2) | BF16, 2, LORA, GPT2),
    "lora, gpt2, plain": Further({"torch": {"parallel": "ddp"}, **BF16}, 2, LORA, GPT2),
}
DAILY = ("odd shapes, ZeRO 3", "hpZ 2, nothing kept whole", "a stage without vectors", "4 bits, ZeRO 2")


@pytest.mark.daily(*DAILY)
@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_of_what_else_there_is(ranks, name):
    given = FURTHER[name]
    batch = {"batch": {"gradient_accumulation_steps": 2, "global_batch_size": 16}}
    tree = recipe(model=given.model, **(batch | given.changes))
    agrees(ranks, tree, given.json, given.world_size)


def test_a_ratio_leaves_the_first_sub_groups_on_the_gpu():
    """DeepSpeed counts sub-groups: of two, one is stepped where 0.5 of the optimizer is offloaded."""
    tree = recipe(model=LLAMA)
    model = whole_of(tree)

    def held(ratio: float) -> RankStates:
        split = zero(3, sub_group_size=model.numel // 2, offload_optimizer=CPU | {"ratio": ratio}) | BF16
        return count_states(RankSlice.from_run(model, *resolve(tree, split, 1)))

    all_there = held(1.0)
    half = held(0.5)
    assert all_there.device.masters == 0
    assert half.device.masters == pytest.approx(all_there.host.masters / 2, rel=0.1)
    assert half.device.masters + half.host.masters == all_there.host.masters
    assert half.device.gradients == half.device.masters


@pytest.mark.parametrize("key", ["partition_config", "preset_model"])
def test_cuts_that_the_json_states_are_not_guessed(key):
    tree = recipe(model=LLAMA)
    section = {"autotp_size": 2, key: {}}
    resolved = resolve(tree, zero(1) | {"tensor_parallel": {"autotp_size": 2}}, 2)[1]
    json = (resolved.deepspeed or {}) | {"tensor_parallel": section}
    with pytest.raises(ConfigError, match=f"tensor_parallel.{key}: the memory of this split is not known"):
        cut_for_tensor_parallel(whole_of(tree), json, 2, 0)
