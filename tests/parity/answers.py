"""Tolerances of preference losses under every split, and the table of their distances from one process."""

from __future__ import annotations

import os
import platform
from datetime import date
from functools import cache
from typing import Any

from parity.splits import zero
from support.preferences import ALONE, LOSSES, make_recipe, train_preferences
from support.rank_pool import RankPool

LOSS = 1e-6  # relative, of the loss, its gradient's norm and the loss of an evaluation
NAMES = ("train/loss", "train/grad_norm", "eval/loss")
SPLITS: dict[str, dict[str, Any]] = {
    "ddp": {"torch": {"parallel": "ddp"}},
    **{f"ZeRO {stage}": zero(stage) for stage in range(4)},
    "tensor 2": zero(1) | {"tensor_parallel": {"autotp_size": 2}},
    "tensor 2, ZeRO 3": zero(3) | {"tensor_parallel": {"autotp_size": 2}},
    "sequence 2": zero(1) | {"sequence_parallel_size": 2},
    "sequence 2, ZeRO 3": zero(3) | {"sequence_parallel_size": 2},
    "stages 2": zero(1) | {"pipeline": {"stages": 2}},
}
REFUSED = ("kto", "stages 2")
CUTS = ((1, 1), (4, 1), (2, 2))  # micro-batch, pairs in a row


@cache
def oracle(loss: str) -> list[dict[str, float]]:
    """One process, a pair a row, all of them in one micro-batch."""
    return train_preferences(ALONE, make_recipe(loss), None)


def difference(rows: list[dict[str, float]], loss: str) -> float:
    """Relative, the largest of all steps and NAMES."""
    pairs = (
        (row, expected, name) for row, expected in zip(rows, oracle(loss), strict=True) for name in NAMES
    )
    return max(abs(row[name] / expected[name] - 1) for row, expected, name in pairs if name in expected)


def answers_table() -> str:
    """Return a row for each loss; progress goes to the terminal."""
    rows = []
    with RankPool(2) as pool:
        for loss in LOSSES:
            cells = []
            for split, json in SPLITS.items():
                found = [
                    difference(
                        pool.run(train_preferences, make_recipe(loss, micro, in_row), json, in_row)[0], loss
                    )
                    for micro, in_row in CUTS
                    if (loss, split) != REFUSED
                ]
                cells.append(f"{max(found):.1e}" if found else "refused")
            print(loss, *cells, flush=True)
            rows.append("| " + " | ".join([loss, *cells]) + " |")
    where = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, gloo"
    cuts = ", ".join(f"{micro} x {in_row}" for micro, in_row in CUTS)
    return "\n".join(
        [
            "Every loss at two ranks. The differences of loss, gradient norm and evaluation loss are",
            "relative to one process, which has one pair in a row and all rows in one micro-batch. A cell",
            f"has the largest of three steps and of these micro-batches x pairs in a row: {cuts}.",
            "",
            f"*Written by `python tests/parity/table.py answers` on {where}.*",
            "",
            "| loss | " + " | ".join(SPLITS) + " |",
            "|---" * (len(SPLITS) + 1) + "|",
            *rows,
        ]
    )
