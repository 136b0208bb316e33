"""Measures how collectives and engines scale on this machine: `python benchmarks/scaling.py [--ranks 1 2 4]`.

It measures all-reduces and all-gathers of several sizes, and then steps of the engines, at a few numbers of
ranks.
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

import torch
import torch.distributed as dist
from processes import Gate, Participant, Task
from report import machine, write_json
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
        whole = torch.zeros(size // 4)
        part = torch.zeros(size // 4 // ranks)
        gathered = whole[: part.numel() * ranks]
        calls = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda to=gathered, part=part: dist.all_gather_into_tensor(to, part),
        }
        for name, call in calls.items():
            seconds = []
            for _ in range(REPEATS):
                dist.barrier()
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            timings.append((name, ranks, size, median(seconds)))
    return timings


def measure_collectives(ranks: list[int], folder: Path) -> list[Timing]:
    """Return the slowest rank's times at each number of ranks above one."""
    timings: list[Timing] = []
    for count in (each for each in ranks if each > 1):
        home = folder / f"collectives-{count}"
        task = Task(
            peer="",
            split="plain",
            precision="fp32",
            world_size=count,
            warmup=0,
            folder=home,
            recipe=home,
            json=None,
            module="scaling",
        )
        with Participant(task) as participant:
            reports = participant.finish()
        timings += [
            (*by_rank[0][:3], max(timing[3] for timing in by_rank)) for by_rank in zip(*reports, strict=True)
        ]
    return timings


def measure_engines(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the seconds of a step at each number of ranks and stage, from the median burst."""
    steps = []
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
            print(f"{step['engine']:24} {ranks} ranks: {seconds * 1e3:8.1f} ms per step", flush=True)
            steps.append(step)
    return steps


def main() -> int:
    """Measure collectives and engines, and print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks to measure")
    stages = ["plain", "1", "2", "3"]
    add("--stages", nargs="+", choices=stages, default=stages, help="plain PyTorch or ZeRO stages")
    add("--model", choices=MODELS, default="llama-50k")
    add("--steps", type=int, default=4, help="optimizer steps of a burst")
    add("--rounds", type=int, default=3, help="number of bursts")
    add("--output", type=Path, help="JSON file for all numbers")
    arguments = parser.parse_args()
    about = machine()
    print(" · ".join(f"{key} {value}" for key, value in about.items()))
    results: dict[str, Any] = {"machine": about, "command": sys.argv[1:]}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        timings = measure_collectives(arguments.ranks, Path(folder))
        for name, count, size, seconds in timings:
            print(f"{name:24} {count} ranks: {size / 1024:8,.0f} KiB in {seconds * 1e6:,.0f} microseconds")
        results["collectives"] = timings
        results["steps"] = measure_engines(arguments, Path(folder))
    write_json(arguments.output, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
