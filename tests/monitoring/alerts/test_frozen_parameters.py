"""Parameters that are reported as unchanged, from the shards that ranks hold of them."""

from __future__ import annotations

import pytest
import torch

from pipeline.checkpoint.shards import WEIGHT, Region, Shard
from pipeline.monitoring.alerts import RowDetails
from pipeline.monitoring.alerts.rules import FROZEN_SAMPLE, FROZEN_STEPS, FrozenParameters

STEP = RowDetails({}, [1.0], skipped=[False])
SKIPPED = RowDetails({}, [1.0], skipped=[True])


class Held:
    """Shards of one rank: tensors by name, and the moments of some."""

    def __init__(self, moments=None, frozen=(), **weights):
        self.weights = weights
        self.moments = moments or {}
        self.frozen = frozen

    def shards(self):
        for kind, tensors in ((WEIGHT, self.weights), ("exp_avg", self.moments)):
            for name, tensor in tensors.items():
                region = Region(tuple(tensor.shape), None, 0, tensor.numel())
                yield Shard.of(name, kind, region, tensor.reshape(-1), name in self.frozen)


def said(held, change, steps=FROZEN_STEPS, gather=lambda mine: [mine]):
    alert = FrozenParameters(held.shards, gather)
    told = []
    for step in range(steps):
        change()
        told.append(alert(step + 1, STEP))
    return told


def test_one_that_moved_a_little_is_not_named_and_one_that_did_not_is():
    held = Held(still=torch.ones(3), moving=torch.ones(3))
    *before, event = said(held, lambda: held.weights["moving"].add_(1e-6))
    assert before == [None] * (FROZEN_STEPS - 1)
    assert event.name == "frozen_parameter"
    assert event.message == "trained parameters are not learning: still did not change in 20 steps"
    assert event.fields == {"parameters": 1, "first": "still"}


def test_one_that_is_not_trained_is_not_named():
    held = Held(still=torch.ones(3), frozen=("still",))
    assert said(held, lambda: None) == [None] * FROZEN_STEPS


def test_one_that_is_decayed_and_has_no_gradient():
    held = Held(
        {"dead": torch.zeros(4), "alive": torch.tensor([0.0, 1e-9])}, dead=torch.ones(4), alive=torch.ones(2)
    )
    event = said(held, lambda: [each.mul_(0.99) for each in held.weights.values()])[-1]
    assert event.message == "trained parameters are not learning: dead had only zero gradients in 20 steps"


def test_an_update_that_is_too_small_for_the_weights_precision():
    held = Held(norm=torch.ones(4, dtype=torch.bfloat16))
    assert said(held, lambda: held.weights["norm"].add_(1e-4))[-1] is not None


@pytest.mark.parametrize("shape", [(4096, 256), (3 * FROZEN_SAMPLE, 3)])
def test_an_embedding_of_which_a_few_rows_move(shape):
    held = Held(embedding=torch.ones(shape))
    rows = torch.arange(0, shape[0], 97)

    def move():
        held.weights["embedding"][rows] += 1e-3

    assert said(held, move)[-1] is None


def test_skipped_steps_move_nothing():
    held = Held(still=torch.ones(3))
    alert = FrozenParameters(held.shards, lambda mine: [mine])
    assert [alert(step, SKIPPED) for step in range(100)] == [None] * 100
    assert [alert(step, STEP) is None for step in range(FROZEN_STEPS)] == [True] * (FROZEN_STEPS - 1) + [
        False
    ]
    assert alert(200, STEP) is None  # once


def test_one_that_moved_on_another_rank():
    held = Held(here=torch.ones(3))
    assert said(held, lambda: None, gather=lambda mine: [mine, ({"here": True}, {})])[-1] is None
    event = said(held, lambda: None, gather=lambda mine: [mine, ({"there": False, "other": True}, {})])[-1]
    assert event.message == "trained parameters are not learning: here, there did not change in 20 steps"


def test_two_copies_that_changed_places_have_moved():
    """The checksum goes by where a value lies."""
    held = Held(weight=torch.tensor([1.0, 2.0]))
    assert said(held, lambda: held.weights["weight"].copy_(torch.tensor([2.0, 1.0])))[-1] is None
