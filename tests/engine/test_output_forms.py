"""Any output of a module, logits or its own loss, trains one curve under every split, also uneven ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny import deepspeed_json, make_engine, recipe
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from pipeline.config.schema import RunConfig
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import mean_loss
from pipeline.objectives import build_objective

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
SPLITS = {"ddp": None, **{f"ZeRO {stage}": deepspeed_json(stage) for stage in (0, 1, 2, 3)}}
# Samples of each micro-batch of a step, by rank: some are short, and the ranks' last ones differ.
MICRO_BATCHES = [[3, 3, 1], [3, 2, 2]]


@dataclass
class Answer:
    """Outputs that a user's own code may return."""

    logits: Tensor | None = None
    loss: Tensor | None = None


LOGITS = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (logits, logits.detach()),
    "list": lambda logits: [logits],
    "dict": lambda logits: {"hidden": logits.detach(), "logits": logits},
    "ModelOutput": lambda logits: SequenceClassifierOutput(logits=logits),
    "attribute": lambda logits: Answer(logits=logits),
}
LOSSES = {
    "tensor": lambda loss, logits: loss,
    "one element": lambda loss, logits: loss[None],
    "tuple": lambda loss, logits: (loss, logits),
    "dict": lambda loss, logits: {"logits": logits, "loss": loss},
    "ModelOutput": lambda loss, logits: SequenceClassifierOutput(loss=loss, logits=logits),
    "attribute": lambda loss, logits: Answer(logits, loss),
    "per sample": lambda loss, logits: loss,
}


class Mlp(nn.Module):
    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


class WithLogits(Mlp):
    def forward(self, x: Tensor) -> Any:
        return LOGITS[self.form](self.layers(x))


class WithLoss(Mlp):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layers(x)
        reduction = "none" if self.form == "per sample" else "mean"
        return LOSSES[self.form](F.cross_entropy(logits, labels, reduction=reduction), logits)


def batch_of(step: int, rank: int, index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + index)
    inputs = torch.randn(MICRO_BATCHES[rank][index], 4, generator=generator)
    return {"inputs": inputs, "labels": inputs[:, :3].argmax(-1)}


def curve(job: Job, model: str, form: str, kind: str, deepspeed, steps: int = 6):
    """Loss and gradient norm a step, and the sum of an evaluation batch's losses."""
    tree = recipe(
        model={"kind": f"test_output_forms:{model}", "args": {"form": form}},
        objective={"kind": kind},
        batch={"micro_batch_size": 3, "gradient_accumulation_steps": 3},
    )
    engine = make_engine(job, tree, deepspeed, DataBundle([], {}, dict, None, None, 3, "none"))
    objective = build_objective(RunConfig.model_validate(tree))
    mine = [job.ranks.rank] if job.ranks.world_size > 1 else [0, 1]
    numbers = []
    for step in range(steps):
        micro_batches = [batch_of(step, rank, i) for rank in mine for i in range(3)]
        result = engine.train_step(micro_batches, objective, 1e-2, False)
        total = job.all_reduce_sum(result.loss_sum.to(torch.float64))
        numbers += [float(mean_loss(total, result.global_count)), float(result.grad_norm)]
    held_out = engine.eval_step(batch_of(99, 0, 0), objective)
    assert held_out.count == 3
    return [*numbers, float(held_out.loss_sum)]


def curves(job: Job, deepspeed):
    """Curves of every form of output."""
    logits = {f: curve(job, "WithLogits", f, "classification", deepspeed) for f in LOGITS}
    return logits | {f"loss, {f}": curve(job, "WithLoss", f, "model_loss", deepspeed) for f in LOSSES}


@pytest.fixture(scope="module")
def oracle():
    return curve(ALONE, "WithLogits", "tensor", "classification", None)


def test_every_form_gives_the_same_curve_in_one_process(oracle):
    for form, numbers in curves(ALONE, None).items():
        assert numbers == pytest.approx(oracle, rel=1e-5), form


@pytest.mark.daily("ddp")
@pytest.mark.parametrize("split", SPLITS)
def test_every_form_gives_the_oracles_curve_on_two_ranks(ranks, oracle, split):
    for result in ranks(2).run(curves, SPLITS[split]):
        for form, numbers in result.items():
            assert numbers == pytest.approx(oracle, rel=1e-5), form
