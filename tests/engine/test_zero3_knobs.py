"""ZeRO-3's own settings change memory and speed, never a number: thresholds, prefetching, experts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.tiny import (
    CPU,
    TOLERANCES,
    deepspeed_json,
    make_engine,
    recipe,
    resolve,
    settings,
    token_bundle,
    train_curve,
)

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError
from pipeline.evaluation.held_out import evaluate
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_eval_loader, build_loader

pytestmark = pytest.mark.slow

STEPS = 8
# A router amplifies rounding: at the rate of the other tests a token or two would change its expert.
MOE = {"optimizer": {"learning_rate": 3e-4, "max_grad_norm": 0.5}}
TINY = recipe()["model"]
MIXTRAL = TINY | {
    "architecture": "mixtral",
    "extra": {"num_local_experts": 8, "num_experts_per_tok": 1},
}
QWEN2_MOE = TINY | {
    "architecture": "qwen2_moe",
    "extra": {
        "num_experts": 8,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
KNOBS = (
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
NOTHING_KEPT = dict.fromkeys(KNOBS, 0)
ALL_KEPT = dict.fromkeys(KNOBS, 10**10)


@cache
def oracle(architecture: str) -> list[tuple[float, float]]:
    model = {"llama": TINY, "mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE}[architecture]
    job = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
    more = {} if architecture == "llama" else MOE
    return train_curve(job, recipe(model=model, batch={"micro_batch_size": 8}, **more), None, STEPS)


def hold_to_oracle(curves, precision: str, architecture: str = "llama") -> None:
    assert all(curve == curves[0] for curve in curves)
    for column, band in enumerate(TOLERANCES[precision]):
        pairs = zip(curves[0], oracle(architecture), strict=True)
        assert max(abs(a[column] / b[column] - 1) for a, b in pairs) < band


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [NOTHING_KEPT, ALL_KEPT], ids=["nothing kept", "all kept"])
def test_what_is_kept_and_fetched_ahead_changes_no_number(ranks, zero):
    hold_to_oracle(ranks(2).run(train_curve, recipe(), deepspeed_json(3, **zero), STEPS), "fp32")


def losses_after_an_evaluation(job: Job, mode: str) -> list[float]:
    """Numbers of two steps. The evaluation tells ZeRO 3 what to gather ahead, from the first forward on."""
    tree = recipe(model=TINY | {"activation_checkpointing": mode})
    data, (config, resolved) = token_bundle(), resolve(tree, deepspeed_json(3), job.ranks.world_size)
    engine = build_engine(config, resolved, job, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config)
    evaluate(engine, objective, build_eval_loader(config, resolved.batch_plan, data, engine), job)
    steps = [engine.train_step(loader.next_group(), objective, 1e-3, False) for _ in range(2)]
    return [float(step.loss_sum) for step in steps]


def test_what_is_gathered_ahead_is_no_part_of_what_a_block_computes_again(ranks):
    expected = ranks(2).run(losses_after_an_evaluation, "none")
    assert ranks(2).run(losses_after_an_evaluation, "selective") == expected


@pytest.mark.daily("no leaf modules-model0")
@pytest.mark.parametrize("model", [MIXTRAL, QWEN2_MOE])
@pytest.mark.parametrize(
    "zero", [{}, NOTHING_KEPT | {"leaf_module": {"classes": []}}], ids=["default", "no leaf modules"]
)
def test_ranks_that_route_to_different_experts_train_on(ranks, model, zero):
    """One expert a token of eight: the ranks' short batches never meet the same set.

    transformers 5 keeps a layer's experts in one tensor, so every rank gathers the same without leaf modules.
    """
    tree = recipe(model=model, batch={"micro_batch_size": 1, "global_batch_size": 8}, **MOE)
    curves = ranks(2).run(train_curve, tree, deepspeed_json(3, **zero), STEPS)
    hold_to_oracle(curves, "fp32", model["architecture"])


def in_groups(job: Job, json) -> bool:
    """Whether parameters are also divided within groups of ranks, as hpZ does."""
    engine = make_engine(job, recipe(), json, token_bundle())
    return any(p.ds_zero_param_process_group is not None for p in engine.module.parameters())


def test_an_engine_after_hpz_has_none_of_its_groups(ranks):
    """DeepSpeed keeps them in the process, and divides a model that was made whole by them."""
    grouped = deepspeed_json(3, zero_hpz_partition_size=2)
    cut = deepspeed_json(3) | {"tensor_parallel": {"autotp_size": 2}}
    assert ranks(2).run(in_groups, grouped) == [True, True]
    assert ranks(2).run(in_groups, cut) == [False, False]
    assert ranks(2).run(in_groups, grouped) == [True, True]


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_quantized_communication_is_refused_on_a_cpu(key):
    chosen = settings(recipe(), deepspeed_json(3, **{key: True}))
    with pytest.raises(ConfigError, match="kernels exist for CUDA only; use neither key"):
        chosen.resolve(2, CPU)


def has_quantizer(job: Job) -> bool:
    from deepspeed.ops.op_builder import QuantizerBuilder

    try:
        QuantizerBuilder().load()
    except Exception:
        return False
    return True


@pytest.mark.nightly
def test_the_reason_for_it_still_holds(ranks):
    assert not ranks(1).run(has_quantizer)[0], "DeepSpeed has kernels for CPUs now: drop the rule"
