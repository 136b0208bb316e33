"""AutoTP: matrices cut over two ranks give the oracle's curve, norm, evaluation, checkpoints and text."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from support.saved import store_in
from support.tiny import BANDS, deepspeed_json, make_engine, recipe, settings, token_bundle, train_curve
from test_step import Poisoned, evaluated, parameters

from pipeline.config.batch_plan import plan_batch
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import Engine
from pipeline.errors import ModelError
from pipeline.models.generation import GenerationSettings
from pipeline.objectives import CausalLM
from pipeline.training.assemble import build_loader

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
MODELS = {
    "llama": {},
    "llama-tied": {"extra": {"tie_word_embeddings": True}},
    "llama-checkpointed": {"activation_checkpointing": "full"},
    "qwen2-grouped": {"architecture": "qwen2", "num_key_value_heads": 2},
    "gpt2": {
        "architecture": "gpt2",
        "intermediate_size": None,
        "extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
    # Shorter than a rank's 12 tokens, so that a window crosses the ranks' border.
    "mistral-window": {"architecture": "mistral", "num_key_value_heads": 2, "extra": {"sliding_window": 7}},
    # Local and global layers, capped scores.
    "gemma2": {
        "architecture": "gemma2",
        "num_key_value_heads": 2,
        "extra": {"sliding_window": 7, "head_dim": 8, "attn_logit_softcapping": 0.5},
    },
    "gpt_oss": {  # local and global layers, sinks
        "architecture": "gpt_oss",
        "num_key_value_heads": 2,
        "extra": {
            "sliding_window": 7,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.0,
        },
    },
}


def tree_of(model: str, micro_batch_size: int = 2):
    batch = {"micro_batch_size": micro_batch_size, "global_batch_size": 8}
    return recipe(model=recipe()["model"] | MODELS[model], batch=batch)


@cache
def oracle(model: str, steps: int) -> tuple[tuple[float, float], ...]:
    return tuple(train_curve(ALONE, tree_of(model, 8), None, steps))


def hold_to_the_oracle(pool, json, model: str = "llama", precision: str = "fp32", steps: int = 6) -> None:
    """Trains on every rank of the pool; all report one curve, which is plain PyTorch's."""
    curves = pool.run(train_curve, tree_of(model), json, steps)
    assert all(curve == curves[0] for curve in curves), "ranks disagree about the loss"
    for band, column in zip(BANDS[precision], (0, 1), strict=True):
        for ours, theirs in zip(curves[0], oracle(model, steps), strict=True):
            assert ours[column] == pytest.approx(theirs[column], rel=band)


def cut_json(stage: int, precision: str = "fp32", degree: int = 2):
    return deepspeed_json(stage, precision) | {"tensor_parallel": {"autotp_size": degree}}


@pytest.mark.daily("llama-tied")
@pytest.mark.parametrize("model", ["llama-tied", "llama-checkpointed", "qwen2-grouped"])
def test_other_models_give_their_oracles_curve(ranks, model):
    hold_to_the_oracle(ranks(2), cut_json(1), model, steps=4)


COLUMNS = r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$"
ROWS = r".*\.(o_proj|down_proj)\.weight$"
SECTIONS = {
    "tp_overlap_comm": True,
    "preset_model": "llama",
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [COLUMNS], "partition_type": "column"},
            {"patterns": [ROWS], "partition_type": "row"},
        ],
    },
}


@pytest.mark.daily("partition_config")
@pytest.mark.parametrize("key", SECTIONS)
def test_other_ways_to_cut_give_the_oracles_curve(ranks, key):
    json = cut_json(1)
    json["tensor_parallel"][key] = SECTIONS[key]
    hold_to_the_oracle(ranks(2), json, steps=3)


def batch_of(engine: Engine, sample: int):
    return {key: value[None].repeat(2, 1) for key, value in token_bundle().train[sample].items()}


def parts(job: Job, tree, json):
    """Elements held, of the whole model, and the sum of each parameter that lies whole on every rank."""
    engine = make_engine(job, tree, json, token_bundle())
    engine.train_step([batch_of(engine, 0)] * 4, CausalLM(), 1e-2, False)
    whole = {n: p.sum().item() for n, p in engine.module.named_parameters() if "embed" in n or "norm" in n}
    return sum(p.numel() for p in engine.module.parameters()), engine.num_parameters, whole


def test_each_rank_holds_half_the_matrices_and_the_same_norms(ranks):
    (held, model, whole), (_, _, other) = ranks(2).run(parts, tree_of("llama"), cut_json(1))
    embedding = 257 * 32
    norms = 5 * 32
    assert held == embedding + norms + (model - embedding - norms - embedding) / 2 + (257 + 1) // 2 * 32
    assert whole == other
    assert len(whole) == 6


def good_bad_good(job: Job, tree, json, factor: float):
    """See test_step: only the last rank's loss is bad, and here ranks may share samples."""
    engine = make_engine(job, tree, json, token_bundle())
    objective = Poisoned()
    batch = [batch_of(engine, engine.dp_rank)]
    engine.train_step(batch, objective, 1e-2, False)
    before = parameters(engine)
    objective.factor = factor if job.ranks.rank == job.ranks.world_size - 1 else 1.0
    bad = engine.train_step(batch, objective, 1e-2, False)
    after = parameters(engine)
    objective.factor = 1.0
    good = engine.train_step(batch, objective, 1e-2, False)
    return (
        all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        float(bad.skipped),
        any(not torch.equal(a, b) for a, b in zip(after, parameters(engine), strict=True)),
        float(good.skipped),
    )


def one_micro_batch(model: str):
    return tree_of(model) | {"batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 1}}


@pytest.mark.daily("0-bf16-nan", "1-fp32-inf", "2-fp16-nan")
@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (0, "bf16"), (0, "fp16"), (1, "bf16"), (1, "fp32"), (2, "fp16")]
)
def test_one_bad_rank_skips_the_step_on_all(ranks, stage, precision, factor):
    for answer in ranks(2).run(good_bad_good, one_micro_batch("llama"), cut_json(stage, precision), factor):
        assert answer == (True, 1.0, True, 0.0)


def unbroken_and_resumed(job: Job, tree, json, folder: str):
    """(loss share, norm) of four steps, and of two, a checkpoint, two more in a new engine."""
    data = token_bundle()
    config = settings(tree, json).config

    def start():
        engine = make_engine(job, tree, json, data)
        return engine, build_loader(config, plan_batch(config.batch, engine.dp_world_size), data, engine)

    def train(engine, loader, first, last):
        rows = []
        for step in range(first, last):
            seed_step(0, step, engine.seed_rank)
            result = engine.train_step(loader.next_group(), CausalLM(), 1e-2, False)
            rows.append((float(result.loss_sum), float(result.grad_norm)))
        return rows

    unbroken = train(*start(), 0, 4)
    engine, loader = start()
    resumed = train(engine, loader, 0, 2)
    store_in(folder, job).save_final(engine, {"global_step": 2, "samples_seen": loader.samples_seen})
    engine, loader = start()
    state = store_in(folder, job).resume(engine)
    assert state is not None
    loader.seek(state["samples_seen"])
    return unbroken, resumed + train(engine, loader, 2, 4)


@pytest.mark.daily("0-bf16", "2-fp32")
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "fp16"), (2, "fp32")])
def test_resumed_equals_unbroken_bit_for_bit(ranks, tmp_path, stage, precision):
    json = cut_json(stage, precision)
    for unbroken, resumed in ranks(2).run(unbroken_and_resumed, tree_of("llama"), json, str(tmp_path)):
        assert resumed == unbroken


def test_evaluation_counts_every_token_once(ranks):
    expected = evaluated(ALONE, recipe(batch={"micro_batch_size": 16}), None)
    for row in ranks(2).run(evaluated, recipe(batch={"micro_batch_size": 3}), cut_json(1)):
        assert row == pytest.approx(expected, rel=1e-6)


def written(job: Job, tree, json):
    """What the model writes after a step; then another step's loss."""
    engine = make_engine(job, tree, json, token_bundle())
    batches = [batch_of(engine, 0)] * 4
    engine.train_step(batches, CausalLM(), 1e-2, False)
    text = engine.generate([[5, 6, 7, 8, 9]], GenerationSettings(8, temperature=0.8, seed=3))
    loss = engine.train_step(batches, CausalLM(), 1e-2, False).loss_sum
    return text, float(job.all_reduce_sum(loss.double()))


@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_ranks_write_the_oracles_text_together(ranks, model):
    text, loss = written(ALONE, tree_of(model), None)
    for ours, our_loss in ranks(2).run(written, tree_of(model), cut_json(1)):
        assert ours == text
        assert our_loss == pytest.approx(loss, rel=1e-5)


def refusal(job: Job, tree, json) -> str:
    try:
        make_engine(job, tree, json, token_bundle())
    except ModelError as error:
        return str(error)
    return "built"


def test_a_model_without_a_plan_is_refused_in_one_line(ranks):
    assert "no tensor-parallel plan for gpt2" in ranks(2).run(refusal, tree_of("gpt2"), cut_json(1))[0]


def test_an_engine_after_it_is_not_cut(ranks):
    """DeepSpeed keeps its groups in module variables: the next engine must not find them."""
    ranks(2).run(parts, tree_of("llama"), cut_json(1))
    hold_to_the_oracle(ranks(2), deepspeed_json(1))
