"""How training scales: python benchmarks/scaling.py [--ranks 1 2 4]

Measures collectives and the pipeline's own engines at a few ranks here, fits what a hop and a byte cost, and
holds pipeline/planner/timing.py to those steps; then its model beside published runs, and to 1,024 GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
from processes import Gate, Participant, Task
from report import append_line, machine
from scaled_runs import compared, forecasts, markdown
from throughput import Group, group_tasks
from workload import MODELS, Workload

from pipeline.planner.hardware import Rates
from pipeline.planner.timing import Job, fitted, step_time

SIZES = [1 << power for power in range(12, 25, 2)]  # bytes of a whole tensor
REPEATS = 10
Timing = tuple[str, int, int, float]
"""(collective, ranks, bytes of the whole tensor, seconds)"""


def take_part(task: Task, gate: Gate) -> dict[str, Any]:
    """A rank that times collectives of the process group; `gate` is not used."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    timings: list[Timing] = []
    for size in SIZES:
        whole = torch.zeros(size // 4)
        part = torch.zeros(size // 4 // ranks)
        calls = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(
                whole[: part.numel() * ranks], part
            ),
        }
        for name, call in calls.items():
            taken = []
            for _ in range(REPEATS):
                dist.barrier()
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
            timings.append((name, ranks, size, median(taken)))
    return {"timings": timings, "peak_memory_gib": 0.0}


def fit(timings: list[Timing]) -> tuple[float, float]:
    """(seconds a hop, bytes a second) of rings, by least squares of the relative error; none is negative."""
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
    """Slowest rank's, at each number of ranks above one."""
    timings: list[Timing] = []
    for count in (each for each in ranks if each > 1):
        home = folder / f"collectives-{count}"
        participant = Participant(Task("", "plain", "fp32", count, 2, home, home, None, "scaling"))
        try:
            told = [report["timings"] for report in participant.finish_all()]
        finally:
            participant.close()
        timings += [(*of_all[0][:3], max(one[3] for one in of_all)) for of_all in zip(*told, strict=True)]
    return timings


def measure_engines(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Seconds a step of ours at each number of ranks and stage: the median burst."""
    found = []
    work = Workload.of(arguments.model)
    asked = argparse.Namespace(peers=[], warmup=3)
    for ranks in arguments.ranks:
        for split in arguments.stages:
            home = folder / f"{split}-{ranks}"
            home.mkdir()
            task = next(iter(group_tasks(asked, Group("fp32", ranks, split, work), home)))
            participant = Participant(task)
            try:
                participant.warm_up()
                for _ in range(arguments.rounds):
                    participant.burst(arguments.steps)
                participant.finish()
            finally:
                participant.close()
            seconds = median(participant.round_seconds) / arguments.steps
            found.append({"engine": task.name, "split": split, "ranks": ranks, "seconds": seconds})
            append_line(arguments.append, found[-1])
    return found


def job_of(model: str) -> Job:
    """One rank's micro-batch of one of the benchmark's models."""
    size, work = MODELS[model]["model"], Workload.of(model)
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    share = size.get("num_key_value_heads", size["num_heads"]) / size["num_heads"]
    blocks = size["num_layers"] * ((2 + 2 * share) * hidden**2 + 3 * hidden * inner)
    words = MODELS[model]["vocab_size"]
    return Job(
        parameters=blocks + 2 * hidden * words,
        blocks=blocks,
        layers=size["num_layers"],
        hidden=hidden,
        length=work.sequence_length,
        vocabulary=words,
        rows=work.micro_batch_size,
        weight_bytes=4,
        reduce_bytes=4,
    )


def predicted_here(steps: list[dict[str, Any]], hop: float, rate: float, model: str) -> list[dict[str, Any]]:
    """Each measured step beside the predicted one. Every stage's speed is fitted to its own single rank; n
    ranks share the cores, so each of them has an n-th, and nothing runs beside a collective."""
    job = job_of(model)
    here = Rates(1e9, 1e9, 1e10, rate, rate, hop, hop, per_node=1 << 20, overlap=0.0)
    found = []
    for step in steps:
        split = replace(job, stage=0 if step["split"] == "plain" else int(step["split"]))
        alone = next((e for e in steps if e["split"] == step["split"] and e["ranks"] == 1), None)
        if alone is None:
            continue
        one = fitted(split, here, split.tokens / alone["seconds"])
        shared = replace(one, speed=one.speed / step["ranks"])
        seconds = step_time(replace(split, data=step["ranks"]), shared).seconds
        found.append({**step, "predicted": seconds, "error": seconds / step["seconds"] - 1})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4])
    add("--stages", nargs="+", choices=["plain", "1", "2", "3"], default=["plain", "1", "2", "3"])
    add("--model", choices=[name for name in MODELS if MODELS[name]["model"]], default="llama-50k")
    add("--steps", type=int, default=4, help="optimizer steps a burst")
    add("--rounds", type=int, default=3)
    add("--append", type=Path, help="JSON lines: each engine as soon as it is measured")
    add("--output", type=Path, help="JSON file of all numbers")
    arguments = parser.parse_args()
    about = machine()
    print(" · ".join(f"{key} {value}" for key, value in about.items()))
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        timings = measure_collectives(arguments.ranks, Path(folder))
        hop, rate = fit(timings)
        print(f"a hop takes {hop * 1e6:.0f} microseconds, a ring carries {rate / 1e9:.2f} GB/s")
        steps = measure_engines(arguments, Path(folder))
    steps = predicted_here(steps, hop, rate, arguments.model)
    for step in steps:
        print(
            f"{step['engine']:24} {step['ranks']} ranks: {step['seconds'] * 1e3:8.1f} ms a step, "
            f"predicted {step['predicted'] * 1e3:8.1f}, {step['error']:+.0%}"
        )
    print("\n" + markdown())
    if arguments.output is not None:
        results = {"machine": about, "command": sys.argv[1:], "hop_seconds": hop, "bytes_per_second": rate}
        results |= {"collectives": timings, "steps": steps, "forecasts": forecasts()}
        results["published"] = [{**asdict(each), "error": each.error} for each in compared()]
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
