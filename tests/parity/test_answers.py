"""Losses of preferences: one curve whatever the split, the micro-batch, and how many answers share a row."""

from __future__ import annotations

import pytest
from parity.answers import LOSS, NAMES, REFUSED, SPLITS, oracle
from support.launch import ROOT
from support.preferences import ALONE, LOSSES, make_recipe, train_preferences

# Of metrics: relative to log-probabilities of some -25, of which a margin is a small difference.
METRIC = 2e-5


def hold(rows, loss: str) -> None:
    for row, expected in zip(rows, oracle(loss), strict=True):
        assert set(row) == set(expected)
        for name, value in expected.items():
            allowed = {"rel": LOSS} if name in NAMES else {"rel": LOSS, "abs": METRIC}
            assert row[name] == pytest.approx(value, **allowed), name


@pytest.mark.slow
@pytest.mark.daily("dpo of means, sft-2-2", "kto-4-1", "reward-2-2")
@pytest.mark.parametrize(("micro", "in_row"), [(1, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("loss", ["dpo of means, sft", "kto", "reward"])
def test_however_it_is_cut(loss, micro, in_row):
    hold(train_preferences(ALONE, make_recipe(loss, micro, in_row), None, in_row), loss)


@pytest.mark.slow
@pytest.mark.daily(
    *("reward-ddp-2-1", "kto-ZeRO 2-2-1", "dpo of means, sft-ZeRO 3-2-1", "kto-tensor 2-2-1"),
    *("reward-sequence 2-2-1", "dpo of means, sft-stages 2-2-1"),
)
@pytest.mark.parametrize(("micro", "in_row"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_at_two_ranks_however_it_is_cut(ranks, loss, split, micro, in_row):
    if (loss, split) == REFUSED:
        pytest.skip("refused")
    is_shared = any(name in split for name in ("tensor", "sequence", "stages"))
    if micro * in_row * (1 if is_shared else 2) > 8:
        pytest.skip("more than a step takes")
    rows = ranks(2).run(train_preferences, make_recipe(loss, micro, in_row), SPLITS[split], in_row)
    assert rows[0] == rows[1]
    hold(rows[0], loss)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("split", ["ddp", "ZeRO 2", "ZeRO 3", "tensor 2", "sequence 2", "stages 2"])
@pytest.mark.parametrize("loss", ["dpo", "dpo of means, sft", "kto", "reward"])
def test_at_four_ranks(ranks, loss, split):
    if (loss, split) != REFUSED:
        hold(ranks(4).run(train_preferences, make_recipe(loss, 1), SPLITS[split])[0], loss)


def test_the_document_shows_every_loss_within_its_band():
    lines = (ROOT / "docs" / "reference" / "measured-curves.md").read_text().splitlines()
    for loss in LOSSES:
        (row,) = (line.split("|")[2:-1] for line in lines if line.startswith(f"| {loss} |"))
        assert len(row) == len(SPLITS)
        assert all(float(cell) < LOSS for cell in row if cell.strip() != "refused")
