"""Projects as newcomers write them, from a script for one device, train under every split as they are."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import deepspeed_json, recipe, resolve
from transformers import BertConfig, BertModel

from pipeline.data import prepare_data
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import mean_loss
from pipeline.evaluation.held_out import evaluate
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_eval_loader, build_loader

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
STEPS = 12


def project(name: str, model: str, data: str, objective: str, **rest: str) -> dict[str, Any]:
    kind = objective if objective in ("classification", "model_loss") else f"strangers.{name}:{objective}"
    paths = {key: f"strangers.{name}:{value}" for key, value in rest.items()}
    return {
        "model": {"kind": f"strangers.{name}:{model}"},
        "data": {"kind": f"strangers.{name}:{data}", **paths},
        "objective": {"kind": kind},
    }


PROJECTS = {
    "crnn": project("crnn", "CRNN", "words", "ctc", collate_fn="pad"),
    "resnet": project("resnet", "resnet", "images", "classification"),
    "gan": project("gan", "GAN", "points", "model_loss"),
    "regression": project("regression", "model", "Houses", "loss"),
    "encoder": project("encoder", "bert", "sentences", "model_loss", collate_fn="collate"),
}
# Of the others the curve depends on the split: padding by micro-batch, noise and dropout by rank.
SAME_CURVE = ("resnet", "regression")
SPLITS = {
    f"{split}-{precision}": {"torch": {"parallel": "ddp", "precision": precision}}
    if split == "ddp"
    else deepspeed_json(int(split[-1]), precision)
    for split in ("ddp", "zero1", "zero2", "zero3")
    for precision in ("fp32", "bf16")
}
PLAIN = {"torch": {"parallel": "single"}}


def losses(job: Job, sections: dict[str, Any], split: dict[str, Any]) -> list[float]:
    """Losses of each step, and at the end on the held-out data."""
    tree = recipe(
        **sections,
        batch={"gradient_accumulation_steps": 1, "global_batch_size": 8},
        optimizer={"learning_rate": 1e-2},
    )
    config, resolved = resolve(tree, split, job.ranks.world_size)
    data = prepare_data(config.data)
    engine = build_engine(config, resolved, job, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config)
    curve = []
    for step in range(STEPS):
        seed_step(0, step, engine.seed_rank)
        result = engine.train_step(loader.next_group(), objective, 1e-2, 0)
        total = job.all_reduce_sum(result.loss_sum.to(torch.float64))
        curve.append(float(mean_loss(total, result.global_count)))
    held_out = evaluate(engine, objective, build_eval_loader(config, resolved.batch_plan, data, engine), job)
    return [*curve, held_out["eval/loss"]]


def all_losses(job: Job, split: dict[str, Any]) -> dict[str, list[float]]:
    return {name: losses(job, sections, split) for name, sections in PROJECTS.items()}


@cache
def plain(name: str) -> list[float]:
    return losses(ALONE, PROJECTS[name], PLAIN)


@pytest.mark.daily("ddp-fp32", "zero3-bf16")
@pytest.mark.parametrize("split", SPLITS)
def test_strangers_projects_train_under_every_split(ranks, split):
    for result in ranks(2).run(all_losses, SPLITS[split], timeout=600):
        for name, curve in result.items():
            assert all(map(math.isfinite, curve)), name
            assert sum(curve[-4:-1]) < 0.9 * sum(curve[:3]), (name, curve)
            if name in SAME_CURVE:
                band = 1e-5 if split.endswith("fp32") else 0.1
                assert curve == pytest.approx(plain(name), rel=band), name


@pytest.mark.daily("Classifier-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["Classifier", "classifier"])
def test_a_model_that_loads_its_own_weights_is_sharded_afterwards(ranks, tmp_path, model, precision):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(7)  # a model drawn anew would have other losses
    BertModel(BertConfig(vocab_size=50, **sizes, **none)).save_pretrained(tmp_path)
    sections = project("pretrained", model, "sentences", "model_loss")
    sections["model"]["args"] = {"path": str(tmp_path)}
    sections["data"]["collate_fn"] = "strangers.encoder:collate"
    expected = losses(ALONE, sections, PLAIN)
    for curve in ranks(2).run(losses, sections, deepspeed_json(3, precision), timeout=600):
        assert curve == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.1)


@pytest.mark.parametrize("name", PROJECTS)
def test_strangers_projects_train_on_one_device(name):
    curve = plain(name)
    assert sum(curve[-4:-1]) < 0.9 * sum(curve[:3]), curve


@pytest.mark.parametrize("name", PROJECTS)
def test_a_strangers_project_is_25_lines(name):
    lines = (Path(__file__).parent / f"{name}.py").read_text().splitlines()
    own = [line for line in lines if line.strip() and not line.startswith(("import ", "from "))]
    assert len(own) <= 25
