"""A run goes on with fp8 or without it, whatever it was saved with, under any split."""

from __future__ import annotations

import numpy as np
import pytest
from parity.measure import largest_difference
from parity.splits import LLAMA
from support.exchange import HALF, SPLITS, gathered, gone_on, run_on, saved_run, tree, whole_of

pytest.importorskip("torchao")

FP8 = LLAMA | {"fp8": "tensorwise"}


@pytest.mark.daily("plain-model1-zero3-other1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "model", "resumed", "other"), [("zero3", FP8, "plain", LLAMA), ("plain", LLAMA, "zero3", FP8)]
)
def test_with_and_without(ranks, saved, model, resumed, other):
    losses, source = saved_run(ranks, saved, model)
    after = run_on(ranks, SPLITS[resumed], gone_on, tree(other), source, 0)
    back, kept = whole_of(gathered(after)), whole_of(source)
    assert back.keys() == kept.keys()
    assert all(np.array_equal(back[key], values) for key, values in kept.items())
    assert largest_difference(after[0][0], losses[HALF:]) < 2e-3
