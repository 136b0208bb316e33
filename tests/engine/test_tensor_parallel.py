"""AutoTP: matrices cut over two ranks give the oracle's curve and norm, and ranks hold their parts alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.tiny import TOLERANCES, deepspeed_json, make_engine, recipe, token_bundle, train_curve

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import Engine
from pipeline.errors import ModelError
from pipeline.objectives import CausalLM

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
MODELS = {
    "llama": {},
    "llama-tied": {"extra": {"tie_word_embeddings": True}},
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
    for band, column in zip(TOLERANCES[precision], (0, 1), strict=True):
        for ours, theirs in zip(curves[0], oracle(model, steps), strict=True):
            assert ours[column] == pytest.approx(theirs[column], rel=band)


def cut_json(stage: int, precision: str = "fp32", degree: int = 2):
    return deepspeed_json(stage, precision) | {"tensor_parallel": {"autotp_size": degree}}


@pytest.mark.daily("llama-tied")
@pytest.mark.parametrize("model", ["llama-tied", "qwen2-grouped"])
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


def one_micro_batch(model: str):
    return tree_of(model) | {"batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 1}}


def refusal(job: Job, tree, json) -> str:
    try:
        make_engine(job, tree, json, token_bundle())
    except ModelError as error:
        return str(error)
    return "built"


def test_a_model_without_a_plan_is_refused_in_one_line(ranks):
    assert "no tensor-parallel plan for gpt2" in ranks(2).run(refusal, tree_of("gpt2"), cut_json(1))[0]
