"""Writes the tables of docs/reference/measured-curves.md: `python tests/parity/table.py`.

They are measured: every case of splits.py runs once, on real ranks of this machine.
"""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from parity.activations import activation_table
from parity.adapters import adapters_table
from parity.answers import answers_table
from parity.measure import largest_difference, missing, oracle, train
from parity.splits import STEPS, cases
from support.rank_pool import RankPool

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "measured-curves.md"


def replace_block(text: str, name: str, block: str) -> str:
    """Replace the text between `<!-- name -->` and `<!-- end of name -->`."""
    head, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition(f"<!-- end of {name} -->")
    assert end, f"the document has no block {name}"
    return f"{head}{begin}{block}\n{end}{tail}"


def parity_table() -> str:
    """Return a row for each case; progress goes to the terminal."""
    rows = []
    for case in cases():
        if why := missing(case):
            raise SystemExit(f"{case}: {why}")
        with RankPool(case.world_size) as pool:  # a fresh one: engines leave memory behind in their process
            got = pool.run(train, case.recipe, case.json, STEPS, True, timeout=900)[0]
        expected = oracle(case)
        row = (
            case.split.name,
            str(case.world_size),
            case.precision,
            f"{largest_difference(got.losses, expected.losses):.1e}",
            f"{largest_difference(got.grad_norms, expected.grad_norms):.1e}",
            f"{got.tokens_per_second:,.0f}",
            # What DeepSpeed swaps lies on the disk, and its buffers depend on the file system.
            "-" if "NVMe" in case.split.name else f"{got.bytes_per_parameter:.2f}",
        )
        print(*row, flush=True)
        rows.append("| " + " | ".join(row) + " |")
    where = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, gloo"
    head = [
        f"The recipe is the same under every split: {STEPS} steps of a small model, 16 samples a step in",
        "two micro-batches, uneven loss masks, gradient clipping, no dropout. A difference is the largest of",
        "all steps. `bytes/parameter` is the memory of a rank between two steps, on its device and in host",
        "memory, divided by the parameters of the whole model. It counts parameters, optimizer states, and",
        "gradients where they are kept. `tokens/s` only shows that a split runs: the ranks share the cores.",
        "",
        f"*Written by `python tests/parity/table.py` on {where}.*",
        "",
        "| split | ranks | precision | loss | gradient norm | tokens/s | bytes/parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows])


def main() -> None:
    """Replace the blocks, each as soon as it is known."""
    blocks = {
        "activation checkpointing": activation_table,
        "adapters": adapters_table,
        "answers": answers_table,
        "parity": parity_table,
    }
    for name in sys.argv[1:] or blocks:
        block = blocks[name]()
        DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), name, block))


if __name__ == "__main__":
    main()
