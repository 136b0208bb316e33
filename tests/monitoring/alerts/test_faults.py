"""Each alert in a run in which its fault was really made, under every kind of split; and none in one without.

Only time is not real: each rank has a clock of its own, which its steps and its reading move on.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.captured_logs import capture_logs
from support.tiny import deepspeed_json, recipe, resolve, token_bundle
from torch.utils.data import Dataset

from pipeline.data.batches import collate_items
from pipeline.data.bundle import DataBundle
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

pytestmark = pytest.mark.slow
WORDS = 64
LENGTH = 16
STEPS = 230
SLOW_DATA = range(2, 40)
SLOW_STEPS = range(41, 140)
BAD_BATCH = 200
BAD_LOSS = 220

SPLITS = {
    "ddp": {"torch": {"parallel": "ddp"}},
    "ZeRO 3": deepspeed_json(3),
    "pipeline": deepspeed_json(1) | {"pipeline": {"stages": 2}},
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Counting(Dataset):
    """Rows that count on by one or, where they are held out, by another number each."""

    def __init__(self, samples, is_told_wrong=False):
        starts = torch.arange(samples)[:, None]
        by = 1 + 6 * (starts % 5) if is_told_wrong else 1
        self.tokens = (7 * starts + by * torch.arange(LENGTH + 1)) % WORDS

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index, :-1], "shift_labels": self.tokens[index, 1:]}


class Troubled:
    """A source of batches with faults: slow for a while, one batch of random words, a leak."""

    def __init__(self, loader, clock, rank):
        self._loader = loader
        self._clock = clock
        self._rank = rank
        self._kept = []
        self._steps = 0

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def next_group(self):
        self._steps += 1
        self._kept.append(np.ones(3 * 2**20, np.uint8))
        if self._steps in SLOW_DATA:
            self._clock.now += 1.0 if self._rank == 1 else 0.3
        group = self._loader.next_group()
        if self._steps == BAD_BATCH:
            group = [
                {
                    key: torch.randint_like(each, WORDS) if key == "shift_labels" else each
                    for key, each in batch.items()
                }
                for batch in group
            ]
        return group


class Engine:
    """Steps of a second; for a while they take four, and in one the loss is none."""

    def __init__(self, engine, clock, slow=(), bad=()):
        self._engine = engine
        self._clock = clock
        self._slow = slow
        self._bad = bad
        self._steps = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train_step(self, micro_batches, objective, learning_rate, flags, limits):
        self._steps += 1
        self._clock.now += 4.0 if self._steps in self._slow else 1.0
        given = NoNumber(objective) if self._steps in self._bad else objective
        return self._engine.train_step(micro_batches, given, learning_rate, flags, limits)


class NoNumber:
    """An objective that divides by zero."""

    def __init__(self, objective):
        self._objective = objective

    def __getattr__(self, name):
        return getattr(self._objective, name)

    def __call__(self, model, batch):
        loss = self._objective(model, batch)
        return replace(loss, loss_sum=loss.loss_sum * torch.nan)


def bundle(told_wrong):
    held_out = {"counting": Counting(16, told_wrong)}
    return DataBundle(Counting(64), held_out, collate_items, None, WORDS, None, "counting")


def tree(steps, **changes):
    found = recipe(max_steps=steps, eval={"every": 10}, batch={"micro_batch_size": 4, "global_batch_size": 8})
    found["schedule"] = {"kind": "constant"}
    found["optimizer"] = {"learning_rate": 5e-3}
    return found | changes


def assembled(clock, *arguments):
    """Assemble a run that measures its seconds with `clock`."""
    with ExitStack() as stack:
        for module in ("training.assemble", "engine.torch_engine", "engine.deepspeed_base"):
            stack.enter_context(patch(f"pipeline.{module}.time", SimpleNamespace(perf_counter=clock)))
        return assemble(*arguments)


def trained(job, folder, split, steps, is_troubled, changes=None):
    """Events in each rank's log, after a run with all faults or with none."""
    clock = Clock()
    config, resolved = resolve(tree(steps, **(changes or {})), split, job.ranks.world_size)
    parts = assembled(clock, config, resolved, job, bundle(is_troubled), folder)
    engine = Engine(parts.engine, clock)
    if is_troubled:
        engine = Engine(parts.engine, clock, SLOW_STEPS, [BAD_LOSS])
        parts = replace(parts, loader=Troubled(parts.loader, clock, job.ranks.rank))
        for name, module in parts.engine.module.named_modules():
            if name.endswith("mlp.down_proj") and "1" in name.split("."):
                module.register_forward_hook(lambda module, given, output: 0.0 * output)
    parts = replace(parts, engine=engine)
    alone_on_the_machine = patch("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    with (
        alone_on_the_machine,
        capture_logs("pipeline.monitoring.trackers") as lines,
        parts.trackers,
        TrainLoop(parts) as loop,
    ):
        loop.train()
    parts.loader.close()
    parts.engine.close()
    return [line for line in lines if "Wall time" not in line and not line.startswith("plan: ")]


def events(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event", "time") not in ("time", "plan", "non_finite_cause")]


def check(told):
    """The faults' events, each once, in the order in which they were made."""
    by_name = {event["event"]: event for event in told}
    assert len(by_name) == len(told), [event["message"] for event in told]
    assert all(event["level"] == "warning" and event["advice"] for event in told)
    assert by_name["loss_spike"]["at_step"] == by_name["grad_norm_spike"]["at_step"] == BAD_BATCH
    assert by_name["loss_spike"]["value"] > 3 * by_name["loss_spike"]["normal"]
    assert by_name["non_finite"]["step"] == BAD_LOSS
    assert by_name["throughput_drop"]["seconds"] == pytest.approx(4.0)
    assert by_name["throughput_drop"]["step"] in SLOW_STEPS
    assert by_name["memory_growth"]["kind"] == "host"
    assert by_name["data_starvation"]["step"] in SLOW_DATA
    assert by_name["eval_divergence"]["step"] % 10 == 0
    frozen = by_name["frozen_parameter"]
    assert frozen["step"] == 20
    assert frozen["parameters"] == 4
    # A vector that nothing decays stood still; matrices were decayed.
    assert ".post_attention_layernorm.weight did not change in 20 steps; " in frozen["message"]
    assert ".mlp.down_proj.weight" in frozen["message"]
    assert "had only zero gradients in 20 steps" in frozen["message"]
    return by_name


@pytest.mark.daily("pipeline")
@pytest.mark.parametrize("split", SPLITS)
def test_each_fault_is_told_of_on_two_ranks(ranks, tmp_path, split):
    first, second = ranks(2).run(trained, tmp_path, SPLITS[split], STEPS, True)
    assert first == second  # all ranks answer alike
    by_name = check(events(tmp_path))
    slow = by_name["slow_rank"]
    assert (slow["rank"], slow["phase"]) == (1, "data")
    assert slow["step"] <= 20
    assert set(by_name) == {
        *(
            "loss_spike",
            "grad_norm_spike",
            "non_finite",
            "throughput_drop",
            "memory_growth",
            "data_starvation",
        ),
        *("eval_divergence", "frozen_parameter", "slow_rank"),
    }


@pytest.mark.nightly
def test_faults_between_two_rows_are_told_with_the_next_one(ranks, tmp_path):
    ranks(1).run(trained, tmp_path, None, STEPS, True, {"log": {"every": 20}, "eval": {"every": 0}})
    by_name = {event["event"]: event for event in events(tmp_path)}
    assert by_name["loss_spike"]["at_step"] == BAD_BATCH == by_name["loss_spike"]["step"]
    assert by_name["non_finite"]["step"] == 220
    assert by_name["non_finite"]["message"].startswith("step 220 skipped: ")
    assert by_name["frozen_parameter"]["step"] == 20


@pytest.mark.daily("ddp")
@pytest.mark.parametrize("split", SPLITS)
def test_nothing_is_told_of_a_clean_run_on_two_ranks(ranks, tmp_path, split):
    assert ranks(2).run(trained, tmp_path, SPLITS[split], 60, False) == [[], []]
    assert events(tmp_path) == []


@pytest.mark.parametrize(("is_troubled", "changes"), [(False, {}), (True, {"watch": {"alerts": False}})])
def test_nothing_is_told_of_a_clean_run_or_where_nobody_wants_to_know(ranks, tmp_path, is_troubled, changes):
    assert ranks(1).run(trained, tmp_path, None, 60, is_troubled, changes) == [[]]
    assert events(tmp_path) == []


def overfitted(job, folder, split, steps):
    """A run whose held-out rows are told wrong, up to a step; in a folder where there is one it goes on."""
    changes = {"log": {"every": 5}, "checkpoint": {"every": 20}}
    config, resolved = resolve(tree(steps, **changes), split, job.ranks.world_size)
    clock = Clock()
    parts = assembled(clock, config, resolved, job, bundle(True), folder)
    parts = replace(parts, engine=Engine(parts.engine, clock))
    with parts.trackers, TrainLoop(parts) as loop:
        loop.train()
    parts.loader.close()
    parts.engine.close()


@pytest.mark.daily("None")
@pytest.mark.parametrize("goes_on_as", [None, "ddp", "ZeRO 3"])
def test_a_run_that_goes_on_is_told_of_at_the_same_step(ranks, tmp_path, goes_on_as):
    """A resume from two ranks to another number or split: the alert needs evaluations before that."""
    ranks(2).run(overfitted, tmp_path / "unbroken", SPLITS["ddp"], 100)
    (told,) = events(tmp_path / "unbroken")
    assert told["event"] == "eval_divergence"
    ranks(2).run(overfitted, tmp_path / "resumed", SPLITS["ddp"], told["step"] - 10)
    assert events(tmp_path / "resumed") == []
    split = SPLITS[goes_on_as] if goes_on_as is not None else None
    ranks(1 if split is None else 2).run(overfitted, tmp_path / "resumed", split, 100)
    (again,) = events(tmp_path / "resumed")
    assert (again["event"], again["step"], again["best_step"]) == (
        "eval_divergence",
        told["step"],
        told["best_step"],
    )


def rushed(job, folder, split, times):
    """A tiny language model whose learning rate is some times what suits it."""
    optimizer = {"learning_rate": times * 3e-3}
    config, resolved = resolve(recipe(max_steps=70, optimizer=optimizer), split, job.ranks.world_size)
    parts = assemble(config, resolved, job, token_bundle(), folder)
    with parts.trackers, TrainLoop(parts) as loop:
        loop.train()
    parts.loader.close()
    parts.engine.close()


@pytest.mark.daily("plain-100-told0")
@pytest.mark.parametrize(("times", "told"), [(100, ["loss_rise"]), (1, [])])
@pytest.mark.parametrize("split", ["plain", *SPLITS])
def test_a_rate_that_is_far_too_high_is_told_of(ranks, tmp_path, split, times, told):
    ranks(1 if split == "plain" else 2).run(rushed, tmp_path, SPLITS.get(split), times)
    found = [event for event in events(tmp_path) if event["event"].startswith("loss")]
    assert [event["event"] for event in found] == told
    if told:
        assert found[0]["at_step"] == 64
        assert found[0]["began"] == pytest.approx(math.log(257), abs=0.1)
        assert "optimizer.learning_rate" in found[0]["advice"]


def at_the_lowest_scale(job, folder, split):
    config, resolved = resolve(tree(6, eval={"every": 0}), split, job.ranks.world_size)
    parts = assemble(config, resolved, job, bundle(False), folder)
    parts = replace(parts, engine=Engine(parts.engine, Clock(), bad=[3, 4]))
    with parts.trackers, TrainLoop(parts) as loop:
        loop.train()
    parts.loader.close()
    parts.engine.close()


@pytest.mark.parametrize("split", ["ZeRO 3", "pipeline"])
def test_the_lowest_loss_scale_is_told_of(ranks, tmp_path, split):
    lowest = {"fp16": {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}}
    ranks(2).run(at_the_lowest_scale, tmp_path, SPLITS[split] | lowest)
    assert [(each["event"], each["step"]) for each in events(tmp_path)] == [
        ("loss_scale_floor", 3),
        ("loss_scale_floor", 4),
    ]
