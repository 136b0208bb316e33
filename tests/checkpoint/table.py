"""Writes the measured table of docs/checkpoints.md: python tests/checkpoint/table.py

Every split of test_any_to_any.py saves once, and every other goes on from it, on real ranks of this machine.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from checkpoint.test_any_to_any import SPLITS, go_on, save
from parity.measure import largest_difference
from parity.splits import LLAMA
from parity.table import replace_block
from support.exchange import HALF, run_on, tree
from support.ranks import RankPool

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"
Cells = dict[tuple[str, str], list[float]]


def kind_of(split: str) -> str:
    """Without the number of ranks."""
    return split.partition(" x ")[0]


def measure(
    folder: Path, pool_of: Any, world_size: int, losses: dict[str, list[float]], cells: Cells
) -> None:
    """All that goes on at one number of ranks; progress goes to the terminal."""
    for resumed, split in SPLITS.items():
        if split.world_size != world_size:
            continue
        for saved, expected in losses.items():
            got = run_on(pool_of, split, go_on, tree(LLAMA), str(folder / saved))[0]
            difference = largest_difference(got, expected[HALF:])
            cells[kind_of(saved), kind_of(resumed)].append(difference)
            remark = " (not bit for bit)" if saved == resumed and difference else ""
            print(f"{saved} -> {resumed}: {difference:.1e}{remark}", flush=True)


def table() -> str:
    """A row for each kind of split that saved, a column for each that went on."""
    cells: Cells = defaultdict(list)
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="any-to-any-") as folder:
        for act in ("save", "go on"):
            for world_size in (1, 2, 4):
                with ExitStack() as stack:
                    pool = stack.enter_context(RankPool(world_size))

                    def pool_of(_: int, pool: RankPool = pool) -> RankPool:
                        return pool

                    if act == "go on":
                        measure(Path(folder), pool_of, world_size, losses, cells)
                        continue
                    for name, split in SPLITS.items():
                        if split.world_size == world_size:
                            arguments = tree(LLAMA), str(Path(folder) / name)
                            losses[name] = run_on(pool_of, split, save, *arguments)[0]
    kinds = list(dict.fromkeys(map(kind_of, SPLITS)))
    pairs = sum(map(len, cells.values()))
    where = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, gloo"
    return "\n".join(
        [
            f"*{pairs} pairs, by `python tests/checkpoint/table.py` on {where}.*",
            "",
            "| saved under | " + " | ".join(kinds) + " |",
            "|---" * (len(kinds) + 1) + "|",
            *(
                f"| {saved} | " + " | ".join(f"{max(cells[saved, resumed]):.0e}" for resumed in kinds) + " |"
                for saved in kinds
            ),
        ]
    )


if __name__ == "__main__":
    DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), "any to any", table()))
