"""Every kind of adapter under every way to split, and their table for docs/reference/measured-curves.md.

The activations of all blocks are recomputed (non-reentrant). The oracle is one process of plain PyTorch.
"""

from __future__ import annotations

import os
import platform
from datetime import date

from parity.measure import differences, oracle, train
from parity.splits import ALL, CPU, SEQUENCE_2, STEPS, TENSOR_2, TWO_STAGES, Split, cases, recomputed, zero
from support.rank_pool import RankPool

KINDS = ("lora", "rslora", "dora")
SEVERAL = {  # ranks are needed
    "tensor 2, ZeRO 1": zero(1) | TENSOR_2,
    "sequence 2, ZeRO 3": zero(3) | SEQUENCE_2,
    "pipeline 2, ZeRO 1": zero(1) | TWO_STAGES,
}
WAYS = {
    "DistributedDataParallel": {"torch": {"parallel": "ddp"}},
    "ZeRO 0": zero(0),
    "ZeRO 1": zero(1),
    "ZeRO 2": zero(2),
    "ZeRO 3": zero(3, stage3_param_persistence_threshold=0),
    "ZeRO 3, all on CPU": zero(3, offload_optimizer=CPU, offload_param=CPU),
    **SEVERAL,
}


def splits(kind: str) -> list[Split]:
    adapter = {"kind": kind, "rank": 4, "alpha": 8.0}
    return [
        Split(
            f"{kind}, {name}",
            json,
            worlds=(2, 4) if name in SEVERAL else (1, 2, 4),
            precisions=("fp32", "bf16") if "torch" in json else ALL,
            model=recomputed("full"),
            adapter=adapter,
        )
        for name, json in WAYS.items()
    ]


CASES = [case for kind in KINDS for case in cases(splits(kind))]


def adapters_table() -> str:
    """Return a row for each kind and split; progress goes to the terminal."""
    found: dict[str, list[list[float]]] = {}
    for world_size in (1, 2, 4):
        with RankPool(world_size) as pool:
            for case in CASES:
                if case.world_size == world_size and case.precision == "fp32":
                    got = pool.run(train, case.recipe, case.json, STEPS, timeout=900)[0]
                    found.setdefault(case.split.name, []).append(differences(got, oracle(case)))
                    print(case, found[case.split.name][-1], flush=True)
    ranks = {case.split.name: case.split.worlds for case in CASES}
    rows = []
    for name, measured in found.items():
        kind, _, way = name.partition(", ")
        largest = [f"{max(column):.1e}" for column in zip(*measured, strict=True)]
        rows.append(f"| {kind} | {way} | {', '.join(map(str, ranks[name]))} | {' | '.join(largest)} |")
    where = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, gloo"
    head = [
        f"*Written by `python tests/parity/table.py adapters` on {where}.*",
        "",
        "| adapter | split | ranks | loss | gradient norm | evaluation loss |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *sorted(rows)])
