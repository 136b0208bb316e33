"""How collectives and the pipeline's engines scale here: python benchmarks/scaling.py [--ranks 1 2 4]

Measures all-reduces and all-gathers, and fits what a hop and a byte cost. Then steps of the engines at a few
numbers of ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
import torch.distributed as dist
from processes import Gate, Participant, Task
from report import append_line, machine, write_json
from throughput import Group, group_tasks
from workload import MODELS, Workload

SIZES = [1 << power for power in range(12, 25, 2)]  # bytes of a whole tensor
REPEATS = 10
Timing = tuple[str, int, int, float]
"""(collective, ranks, bytes of the whole tensor, seconds)"""


def take_part(task: Task, gate: Gate) -> list[Timing]:
    """Time collectives of the process group; `gate` is not used."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    timings: list[Timing] = []
    for size in SIZES:
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
        gathered = whole[: part.numel() * ranks]
        calls = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda to=gathered, part=part: dist.all_gather_into_tensor(to, part),
        }
        for name, call in calls.items():
            taken = []
            for _ in range(REPEATS):
                dist.barrier()
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
            timings.append((name, ranks, size, median(taken)))
    return timings


def fit(timings: list[Timing]) -> tuple[float, float]:
    """Return (seconds a hop, bytes a second) of rings, by least squares of the relative error."""
    rows, seconds = [], []
    for name, ranks, size, taken in timings:
        rounds = 2 if name == "all_reduce" else 1
        rows.append([rounds * (ranks - 1), rounds * (ranks - 1) / ranks * size])
        seconds.append(taken)
    matrix, taken_array = np.array(rows), np.array(seconds)
    weighted = matrix / taken_array[:, None]
    (hop, byte), *_ = np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=None)
    if hop < 0:  # sizes at which a hop does not show
        hop, byte = 0.0, float(np.mean(taken_array / matrix[:, 1]))
    return float(hop), 1 / max(float(byte), 1e-15)


def measure_collectives(ranks: list[int], folder: Path) -> list[Timing]:
    """Return the slowest rank's times at each number of ranks above one."""
    timings: list[Timing] = []
    for count in (each for each in ranks if each > 1):
        home = folder / f"collectives-{count}"
        task = Task("", "plain", "fp32", count, 0, home, home, None, module="scaling")
        with Participant(task) as participant:
            reports = participant.finish()
        timings += [
            (*by_rank[0][:3], max(one[3] for one in by_rank)) for by_rank in zip(*reports, strict=True)
        ]
    return timings


def measure_engines(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return seconds of a step at each number of ranks and stage: the median burst."""
    found = []
    for ranks in arguments.ranks:
        for split in arguments.stages:
            home = folder / f"{split}-{ranks}"
            home.mkdir()
            group = Group("fp32", ranks, split, Workload.of(arguments.model))
            with Participant(next(group_tasks(group, [], 3, home))) as participant:
                participant.warm_up()
                for _ in range(arguments.rounds):
                    participant.burst(arguments.steps)
                participant.finish()
            seconds = median(participant.round_seconds) / arguments.steps
            step = {"engine": participant.task.name, "split": split, "ranks": ranks, "seconds": seconds}
            append_line(arguments.append, step)
            print(f"{step['engine']:24} {ranks} ranks: {seconds * 1e3:8.1f} ms a step", flush=True)
            found.append(step)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4])
    add("--stages", nargs="+", choices=["plain", "1", "2", "3"], default=["plain", "1", "2", "3"])
    add("--model", choices=MODELS, default="llama-50k")
    add("--steps", type=int, default=4, help="optimizer steps a burst")
    add("--rounds", type=int, default=3)
    add("--append", type=Path, help="JSON lines: each engine as soon as it is measured")
    add("--output", type=Path, help="JSON file of all numbers")
    arguments = parser.parse_args()
    about = machine()
    print(" · ".join(f"{key} {value}" for key, value in about.items()))
    results: dict[str, Any] = {"machine": about, "command": sys.argv[1:]}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        timings = measure_collectives(arguments.ranks, Path(folder))
        if timings:
            hop, rate = fit(timings)
            print(f"a hop takes {hop * 1e6:.0f} microseconds, a ring carries {rate / 1e9:.2f} GB/s")
            results |= {"collectives": timings, "hop_seconds": hop, "bytes_per_second": rate}
        results["steps"] = measure_engines(arguments, Path(folder))
    write_json(arguments.output, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
