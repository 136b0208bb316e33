"""The first infinite or NaN value is named: part of the model, forward or backward, samples, rank."""

from __future__ import annotations

import math
import re

import pytest
import torch
from support.corrupted_data import ALONE, BATCH, SPLITS, CorruptedTokens, read_events, train

AT = BATCH + 5
"""A bad value in the second micro-batch of a rank; with two ranks, of the last one."""


def corrupt_embedding(parts, corrupted) -> None:
    """The rows of corrupted samples are NaN behind the embedding."""

    def hook(layer, given, output):
        found = [tuple(row) in corrupted for row in given[0].tolist()]
        return torch.where(torch.tensor(found)[:, None, None], math.nan, output)

    for _, layer in parts.engine.module.named_modules():
        if isinstance(layer, torch.nn.Embedding):
            layer.register_forward_hook(hook)


class BackwardAlone(CorruptedTokens):
    """The root of nothing: 0, with a slope that is none."""

    def __call__(self, model, batch):
        loss = super(CorruptedTokens, self).__call__(model, batch)
        if not any(tuple(row) in self.loss_factors for row in batch["input_ids"].tolist()):
            return loss
        return type(loss)(loss.loss_sum + (loss.loss_sum * 0).sqrt(), loss.count)


FAULTS = {
    "forward": (
        {"prepare": corrupt_embedding},
        r"the output of \S*(embed|embedding)\S* \(Embedding\), in forward",
    ),
    "loss": ({}, r"the loss of sample train \d+,"),
    "backward": ({"objective": BackwardAlone}, r"the gradient of \S+, in backward"),
}


def faulty(job, split, folder: str, fault: str, watch):
    how, _ = FAULTS[fault]
    factor = math.nan if fault == "loss" else 1.0
    train(job, split, folder, {AT: factor}, max_steps=3, watch=watch, **how)


@pytest.mark.slow
@pytest.mark.daily("loss-zero3", "backward-zero2-bf16", "forward-pipeline")
@pytest.mark.parametrize("split", ["single", "ddp", "zero2-bf16", "zero3", "pipeline"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_is_named_with_its_samples_and_its_rank(ranks, split, fault, tmp_path):
    world_size, deepspeed = SPLITS[split]
    watch = {"on_nonfinite": "skip" if fault == "loss" else "log"}
    if split == "single":
        faulty(ALONE, deepspeed, str(tmp_path), fault, watch)
    else:
        ranks(world_size).run(faulty, deepspeed, str(tmp_path), fault, watch, timeout=500)
    (told,) = read_events(tmp_path, "non_finite_cause")
    assert told["step"] == 2
    assert re.search(FAULTS[fault][1], told["message"])
    if split == "single":
        assert "on this process" in told["message"]
    elif fault == "forward" and split == "pipeline":
        assert "on rank 0" in told["message"], "the first stage has the embedding"
    else:
        assert "on rank" in told["message"]
    if fault != "loss":
        (index,) = told["message"].rpartition("samples: ")[2].split(", ")
        assert re.fullmatch(r"\w+ \d+", index), "one row is broken, and one is named"


@pytest.mark.slow
@pytest.mark.nightly
def test_in_fp16_it_is_looked_for_where_the_loss_scale_is_not_why(ranks, tmp_path):
    world_size, deepspeed = SPLITS["zero2-fp16"]
    watch = {"on_nonfinite": "skip"}
    ranks(world_size).run(faulty, deepspeed, str(tmp_path), "forward", watch, timeout=500)
    (told,) = read_events(tmp_path, "non_finite_cause")
    assert told["step"] == 2
    assert re.search(FAULTS["forward"][1], told["message"])
