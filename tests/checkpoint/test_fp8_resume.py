"""A run goes on with fp8 or without it, whatever it was saved with, under any split."""

from __future__ import annotations

import numpy as np
import pytest
from parity.measure import largest_difference
from parity.splits import LLAMA
from support.resume_across_splits import (
    HALF,
    SPLITS,
    assemble_tensors,
    gather_shards,
    make_recipe,
    run_on_split,
    train_and_save,
    train_resumed,
)

pytest.importorskip("torchao")

FP8 = LLAMA | {"fp8": "tensorwise"}


@pytest.mark.daily("plain-model1-zero3-other1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "model", "resumed", "other"), [("zero3", FP8, "plain", LLAMA), ("plain", LLAMA, "zero3", FP8)]
)
def test_with_and_without(ranks, saved, model, resumed, other):
    losses, source = train_and_save(ranks, saved, model)
    after = run_on_split(ranks, SPLITS[resumed], train_resumed, make_recipe(other), source, 0)
    back = assemble_tensors(gather_shards(after))
    kept = assemble_tensors(source)
    assert back.keys() == kept.keys()
    assert all(np.array_equal(back[key], values) for key, values in kept.items())
    assert largest_difference(after[0][0], losses[HALF:]) < 2e-3
