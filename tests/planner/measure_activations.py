"""Writes pipeline/planner/activations.json: what a family's blocks keep and need, in terms of their sizes.

Each allocation of a block is a sum of products of sizes (tokens x hidden, ...): the coefficients are solved
for from trials of different sizes, and what another allocation always exceeds is dropped.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from planner.traced_blocks import LAYERS, Case, Sizes, trace  # noqa: E402

from pipeline.planner.activations import COEFFICIENTS_FILE, WEIGHT_TERMS, compute_terms, format_row_name  # noqa: E402

# Of a block's products those that most families have; and what others have besides.
BASE = ("ND", "NI", "NQ", "NK", "NH", "NW", "N", "T", "DI", "DQ", "DK", "D", "TW", "1")
BESIDES = {
    "qwen2": ("Q", "K"),
    "qwen3": ("NG", "W"),
    "gpt2": ("I", "TD"),
    "gpt2_dropout": ("I", "TD"),
    "gemma3_text": ("NG", "W"),
    "olmo2": ("Q", "K"),
    "gemma2": ("NTH", "NG"),
    "mixtral": ("E", "NE", "NA", "NAD", "NAI", "EDI", "ED"),
    "qwen3_moe": ("NG", "W", "E", "NE", "NA", "NAD", "NAI", "EDI", "ED"),
}
OF_ADAPTERS = ("NR", "DR", "IR", "QR", "KR")
STRETCHES = {"start": "start", "forward 1": "forward", f"forward {LAYERS}": "end", "backward 1": "backward"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--adapted", action="store_true", help="train low-rank matrices alone")
    parser.add_argument("--output", type=Path, default=COEFFICIENTS_FILE)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.adapted:
        import peft  # noqa: F401  # here: what it imports looks for a real GPU
    for device in given.devices:
        with _device(device) as there:
            for case in cases(given.families, device, given.compiled, given.adapted):
                try:
                    found, error = solved(case, there)
                except Exception as problem:  # an operator has no meta function: the other rows have theirs
                    print(
                        format_row_name(case),
                        "FAILED",
                        type(problem).__name__,
                        str(problem)[:200],
                        flush=True,
                    )
                    continue
                if error > 0.01:
                    print(
                        format_row_name(case), f"FAILED other sizes take {error:.0%} more or less", flush=True
                    )
                    continue
                _write(given.output, format_row_name(case), found)
                print(format_row_name(case), f"worst {error:.4%}", flush=True)


FAMILIES: dict[str, tuple[tuple[str, Any], ...]] = {
    "llama": (),
    "gpt2": (("resid_pdrop", 0.0), ("embd_pdrop", 0.0), ("attn_pdrop", 0.0)),
    "gpt2_dropout": (),
    "qwen2": (),
    "qwen3": (),
    "phi3": (("pad_token_id", 0),),
    "olmo2": (),
    "gemma3_text": (),
    "gemma2": (),
    "mixtral": (),
    "qwen3_moe": (),
}


MIXTURES = ("mixtral", "qwen3_moe")
GROUPED = {
    "llama": (True, False),
    "gpt2": (False,),
    "gpt2_dropout": (False,),
    "phi3": (True, False),
    "olmo2": (True, False),
}


def cases(families: list[str], device: str, compiled: bool, adapted: bool) -> Iterator[Case]:
    for family in families:
        for selective in (False,) if adapted else (False, True):
            for precision in ("fp32", "autocast", "half"):
                for apart in (False, True):
                    for grouped in GROUPED.get(family, (True,)):
                        how = (selective, apart, compiled, grouped, adapted)
                        yield Case(family, device, precision, *how, FAMILIES[family])


@contextmanager
def _device(kind: str) -> Iterator[torch.device]:
    if kind == "cpu":
        yield torch.device("cpu")
        return
    from support.fake_cuda import DEVICE, hopper

    with hopper():
        yield DEVICE


def drawn(case: Case, generator: random.Random) -> Sizes:
    heads, groups = generator.choice([(4, 2), (8, 4), (6, 3), (6, 2), (8, 2), (9, 3)])
    if not case.grouped:
        groups = heads = generator.choice([2, 3, 4, 5, 6])
    width = generator.choice([16, 32, 48, 64])
    hidden = heads * 8 * generator.randint(2, 14)
    if not case.has_own_width:
        hidden = heads * width
    rows = generator.randint(1, 3)
    if case.device == "cuda":  # of one row less is copied; documents are filled up to a power of two
        rows = generator.choice([2, 4])
    elif case.apart:
        rows = 1
    # A kernel for fp32 on a GPU pads rows to a multiple of 32.
    length = 64 * generator.randint(2, 7) if case.device == "cuda" else 2 * generator.randint(66, 120)
    sizes = Sizes(rows, length, hidden, 8 * generator.randint(6, 60), heads, groups, width)
    if case.adapted:
        sizes = replace(sizes, rank=generator.randint(1, 12))
    if case.family in MIXTURES:
        # One expert a token is computed otherwise, and so are all of them.
        experts = generator.choice([4, 6, 8])
        chosen = generator.choice([2, 3])
        sizes = replace(sizes, experts=experts, experts_per_token=chosen)
    return sizes


def solved(case: Case, device: torch.device) -> tuple[dict[str, Any], float]:
    names = [*BASE, *BESIDES.get(case.family, ()), *(OF_ADAPTERS if case.adapted else ())]
    generator = random.Random(0)
    many = random.Random(1)
    wide = _table([drawn(case, many) for _ in range(60)], names)
    # Of products that are the same in this family's models, the first one.
    columns: list[int] = []
    for index in range(len(names)):
        if _rank(wide[:, [*columns, index]]) == len(columns) + 1:
            columns.append(index)
    sizes = [drawn(case, generator) for _ in range(len(columns) + 3)]
    while _rank(_table(sizes, names)[:, columns]) < len(columns):
        sizes.append(drawn(case, generator))
    trials = len(sizes)
    sizes.append(drawn(case, generator))  # held to what was solved
    run = replace(case, family=case.family.removesuffix("_dropout"))
    trace(run, sizes[0], device)
    gc.collect()
    gc.freeze()
    traces = [trace(run, each, device) for each in sizes]
    rows = _table(sizes, names)
    known = rows[:trials]
    worst = 0.0

    def solve(values: Any) -> dict[str, float]:
        nonlocal worst
        y = np.array(values, dtype=float)
        scale = known[:, columns].max(0)
        x = np.linalg.lstsq(known[:, columns] / scale, y[:trials], rcond=None)[0] / scale
        x = np.where(np.abs(x - x.round()) < 0.02, x.round(), x.round(3))
        top = np.maximum(np.abs(y), 1).max()
        worst = max(worst, float((np.abs(rows[:, columns] @ x - y) / np.abs(y).clip(top / 10)).max()))
        return {names[c]: float(v) for c, v in zip(columns, x, strict=True) if v}

    def live(name: str) -> Any:
        return np.array([t[name][0] for t in traces], dtype=float)

    before = live("forward 0")
    left = solve(live("backward 1") - live("backward 0"))
    # What a model's variables hold for a while is no block's: in a forward autocast's weights alone are more.
    cast = {n: f for n, f in solve(live("forward 1") - before).items() if n in WEIGHT_TERMS}
    kept = {n: f for n, f in left.items() if n not in WEIGHT_TERMS} | cast
    of_block = rows @ np.array([kept.get(name, 0.0) for name in names])
    behind = before + LAYERS * of_block
    found: dict[str, Any] = {
        "before": solve(before),
        "kept": kept,
        "loss": solve(live("loss") - behind),
        "left": solve(live("backward 0")),
        "kept_backward": left,
    }
    bases = {"start": 0 * before, "forward 1": before + of_block, "backward 1": live("backward 1")}
    for marked, name in STRETCHES.items():
        base = bases.get(marked, behind)
        found[name] = _envelope([np.array(t[marked]) - b for t, b in zip(traces, base, strict=True)], solve)
    return found, worst


def _rank(table: Any) -> int:
    return int(np.linalg.matrix_rank(table / table.max(0).clip(1), tol=1e-4))


def _envelope(events: list[Any], solve: Any) -> list[dict[str, float]]:
    """Return the bytes that allocations add to a stretch's beginning; only those that may be the peak."""
    if len({len(each) for each in events}) > 1:
        raise ValueError(f"other allocations: {sorted({len(e) for e in events})}")
    forms: list[dict[str, float]] = []
    values = np.array(events, dtype=float)
    seen: set[bytes] = set()
    for index in range(values.shape[1]):
        column = values[:, index]
        if column.tobytes() in seen or any(
            (values[:, other] >= column).all() and (values[:, other] > column).any()
            for other in range(values.shape[1])
        ):
            continue
        seen.add(column.tobytes())
        forms.append(solve(column))
    return forms


def _table(sizes: list[Sizes], names: list[str]) -> Any:
    return np.array(
        [[compute_terms(each, each.rows, each.length, each.rank)[name] for name in names] for each in sizes],
        dtype=float,
    )


def _write(file: Path, key: str, found: dict[str, Any]) -> None:
    tree = (json.loads(file.read_text()) if file.exists() else {}) | {key: found}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(tree.items()))
    file.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
