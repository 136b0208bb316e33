"""The load-balancing loss of a mixture of experts: transformers' own of the global batch, in any split."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from parity.measure import ALONE
from support.tiny import MaskedTokens, deepspeed_json, make_engine, recipe, resolve, settings, token_bundle
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_loader, build_meters

pytestmark = pytest.mark.slow

STEPS = 4
COEFFICIENT = 0.5  # large: what it changes shows in the first steps


def mixture(architecture: str = "mixtral", **extra):
    sizes = {
        "mixtral": {"num_local_experts": 4},
        "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32},
    }[architecture]
    routing = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return recipe()["model"] | {"architecture": architecture, "extra": sizes | routing | extra}


def tree_of(model, micro_batch_size: int = 2):
    batch = {"micro_batch_size": micro_batch_size, "global_batch_size": 8}
    return recipe(model=model, batch=batch, optimizer={"learning_rate": 3e-4, "max_grad_norm": 0.5})


def train_rows(job: Job, tree, deepspeed) -> list[tuple[float, float, float]]:
    """(loss, router loss, gradient norm) of each step, as the run logs them."""
    data = token_bundle()
    config = settings(tree, deepspeed).config
    _, resolved = resolve(tree, deepspeed, job.ranks.world_size)
    engine = make_engine(job, tree, deepspeed, data)
    objective = build_objective(config)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    meters = build_meters(config, resolved, job=job, engine=engine, objective=objective, directory=Path())
    rows = []
    for step in range(STEPS):
        seed_step(config.seed, step, engine.seed_rank)
        meters.observe(engine.train_step(loader.next_group(), objective, 3e-4, 0))
        row = meters.collect_row().read().row
        rows.append((row["train/loss"], row.get("train/router_aux_loss", 0.0), row["train/grad_norm"]))
    return rows


@cache
def oracle(architecture: str) -> list[tuple[float, float, float]]:
    """Plain PyTorch and transformers' function, the whole global batch at once."""
    tree = tree_of(mixture(architecture), micro_batch_size=8)
    config, resolved = resolve(tree, None, 1)
    data = token_bundle()
    engine = make_engine(ALONE, tree, None, data)
    model = engine.module
    optimizer = engine._optimizer
    loader = build_loader(config, resolved.batch_plan, data, engine)
    rows = []
    for _ in range(STEPS):
        (batch,) = loader.next_group()
        output = model(batch["input_ids"])
        labels = batch["shift_labels"]
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        aux = load_balancing_loss_func(output.router_logits, 4, 2, (labels != -100).long())
        optimizer.zero_grad()
        (loss + COEFFICIENT * aux).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 3e-4
        optimizer.step()
        rows.append((loss.item(), aux.item(), norm.item()))
    return rows


def hold(rows, architecture: str = "mixtral") -> None:
    for row, expected in zip(rows, oracle(architecture), strict=True):
        assert row == pytest.approx(expected, rel=2e-5)


@pytest.mark.daily("2-mixtral", "1-qwen2_moe")
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("micro_batch_size", [8, 2, 1])
def test_it_is_that_of_the_global_batch_however_it_is_cut(architecture, micro_batch_size):
    assert (MaskedTokens().valid < 24).any(), "padding behind the labels counts in neither sum"
    hold(train_rows(ALONE, tree_of(mixture(architecture), micro_batch_size), None), architecture)


@pytest.mark.daily("ddp accumulating", "zero 3 accumulating")
@pytest.mark.parametrize(
    ("micro_batch_size", "deepspeed"),
    [(4, None), (1, None), (4, deepspeed_json(0)), *((2, deepspeed_json(stage)) for stage in range(4))],
    ids=["ddp", "ddp accumulating", "zero 0", *(f"zero {stage} accumulating" for stage in range(4))],
)
def test_it_is_the_same_at_two_ranks(ranks, micro_batch_size, deepspeed):
    rows = ranks(2).run(train_rows, tree_of(mixture(), micro_batch_size), deepspeed)
    assert rows[0] == rows[1]
    hold(rows[0])


def test_it_is_the_same_where_a_sequence_is_shared(ranks):
    shared = deepspeed_json(1) | {"sequence_parallel_size": 2}
    hold(ranks(2).run(train_rows, tree_of(mixture()), shared)[0])


def test_dropout_draws_the_same_when_the_tokens_are_counted():
    """The forward that counts routes each micro-batch as the training forward does."""
    tree = tree_of(mixture(attention_dropout=0.5) | {"attention": "eager"}, 4)
    config, resolved = resolve(tree, None, 1)
    data = token_bundle()
    engine = make_engine(ALONE, tree, None, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    chosen = []
    engine.module.model.layers[1].mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][2]))
    engine.train_step(loader.next_group(), build_objective(config), 3e-4, 0)
    counting = chosen[:2]
    training = chosen[2:]
    assert len(training) == 2
    assert all(map(torch.equal, counting, training))


def test_a_model_that_is_not_asked_for_it_reports_none():
    rows = train_rows(ALONE, tree_of(mixture(output_router_logits=False)), None)
    assert {row[1] for row in rows} == {0.0}


def refused(job: Job, model, deepspeed) -> str:
    with pytest.raises(ConfigError) as told:
        make_engine(job, tree_of(model), deepspeed, token_bundle())
    return str(told.value)


@pytest.mark.parametrize(
    ("how", "split"),
    [
        ("pipeline stages", {"pipeline": {"stages": 2}}),
        ("tensor parallelism", {"tensor_parallel": {"autotp_size": 2}}),
    ],
)
@pytest.mark.parametrize("is_pretrained", [False, True])
def test_what_cannot_balance_experts_says_so(ranks, tmp_path, how, split, is_pretrained):
    """A recipe that asks for the loss is refused before the start, others once the config is read."""
    model = mixture()
    if is_pretrained:
        make_engine(ALONE, tree_of(model), None, token_bundle()).module.save_pretrained(tmp_path)
        model = {"kind": "causal_lm", "pretrained": str(tmp_path)}
    for line in ranks(2).run(refused, model, deepspeed_json(1) | split):
        assert "model.extra.output_router_logits" in line
        assert "the routers' loss is not computed with" in line
        assert how in line
        assert "\n" not in line
