"""What measuring costs a step: python benchmarks/overhead.py --stages plain 2 --ranks 1 2

One run, whose steps come in bursts: with everything on (rows every 10 steps to metrics.jsonl, TensorBoard and
W&B offline, phases, memory, alerts, comparison of ranks and of their bits) and with all off, in turn and in
either order. So both have the same engine, weights and machine. The exit code says whether the median is
above 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import processes
from processes import Gate, Participant, ParticipantError, Task, on_cuda, wait_for_device
from report import append_line, machine
from throughput import Group, group_tasks
from workload import JSON_FILES, LOG_EVERY, MODELS, Workload

WARMUP = 2  # bursts of either kind that are not counted


class Off:
    """In the place of the meters and of the engine's phases: measures nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in ("measured", "exclude_from_step_time"):
            return lambda *_: nullcontext()
        return lambda *_, **__: {}


class Switched:
    """A loop that measures, or does not."""

    def __init__(self, parts: Any):
        from pipeline.training.loop import TrainLoop

        # A burst has its row in the middle: on a GPU the next step reads it, in the same burst.
        middle = _InTheMiddle()
        schedule = replace(parts.schedule, owes_evaluation=False, log=middle)
        self._parts = replace(parts, eval_loader=None, schedule=schedule)
        self.loop = TrainLoop(self._parts)
        self._phases = parts.engine.phases

    def switch(self, on: bool) -> None:
        from pipeline.monitoring.trackers.interface import Trackers
        from pipeline.training.loop import Cadence

        parts, off = self._parts, Off()
        parts.engine.phases = self._phases if on else off
        silent: dict[str, Any] = {"meters": off, "trackers": Trackers()}
        self.loop._parts = parts if on else replace(parts, **silent)
        self.loop._schedule = parts.schedule if on else replace(parts.schedule, log=Cadence(0, 0))
        self.loop._train_step._replica_check = parts.replica_check if on else None
        if on:
            self._phases.restart()  # what was off is nobody's time


class _InTheMiddle:
    def due(self, step: int) -> bool:
        return step % LOG_EVERY == LOG_EVERY // 2


def take_part(task: Task, gate: Gate) -> dict[str, Any]:
    """All bursts of a rank: their seconds, and the processor's; `gate` is not used."""
    import torch

    from pipeline.config.settings import load_settings
    from pipeline.data import prepare_data
    from pipeline.distributed.process_group import describe_device, start_job
    from pipeline.distributed.ranks import read_ranks
    from pipeline.training.assemble import assemble

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    overrides = ["log.price_per_device_hour=1"]
    overrides += ["log.tensorboard=true"] if find_spec("tensorboard") else []
    overrides += ["wandb.mode=offline"] if find_spec("wandb") else []
    if task.json is not None:
        overrides += [f"ds.bf16.enabled={task.precision == 'bf16'}".lower(), "ds.fp16.enabled=false"]
    settings = load_settings(task.recipe, task.json, overrides)
    ranks, data = read_ranks(os.environ), prepare_data(settings.config.data)
    job = start_job(ranks, distributed=task.json is not None or ranks.world_size > 1)
    resolved = settings.resolve(ranks.world_size, describe_device(job.device))
    parts = assemble(settings.config, resolved, job, data, task.folder)
    switched, bursts = Switched(parts), []
    with contextlib.suppress(BrokenPipeError), parts.trackers, switched.loop:
        for on in _order(int(os.environ["OVERHEAD_ROUNDS"]) + WARMUP):
            switched.switch(on)
            wait_for_device()
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(LOG_EVERY):
                switched.loop.step()
            wait_for_device()
            bursts.append((on, time.perf_counter() - wall, time.process_time() - processor))
        switched.switch(True)
    return {"bursts": bursts[2 * WARMUP :], "peak_memory_gib": 0.0}


def _order(rounds: int) -> Iterator[bool]:
    """On and off, off and on, and so forth: a drift favours neither. The first step has a row."""
    for number in range(rounds):
        yield from (False, True) if number % 2 else (True, False)


def compared(bursts: list[tuple[bool, float, float]], column: int) -> dict[str, Any]:
    """Of each pair of bursts, on over off; and what that is in seconds a step."""
    pairs = [sorted(bursts[at : at + 2], key=lambda each: each[0]) for at in range(0, len(bursts), 2)]
    ratios = [on[column] / off[column] for off, on in pairs]
    low, _, high = quantiles(ratios, n=4)
    return {
        "ratio": median(ratios),
        "quartiles": [low, high],
        "pairs": len(pairs),
        "step_seconds_off": median(off[column] for off, _ in pairs) / LOG_EVERY,
        "seconds_more": median(on[column] - off[column] for off, on in pairs) / LOG_EVERY,
    }


def main() -> int:
    arguments = parse_arguments()
    os.environ["OVERHEAD_ROUNDS"] = str(arguments.rounds)
    processes.PATIENCE = 3600.0  # the one answer comes at the end
    on_gpu, failures = on_cuda(), 0
    about = machine()
    print(" · ".join(f"{key} {value}" for key, value in about.items()))
    append_line(arguments.output, {"machine": about, "command": sys.argv[1:]})
    for ranks in arguments.ranks:
        for split in arguments.stages:
            group = Group(arguments.precision, ranks, split, Workload.of(arguments.model))
            with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
                task = next(group_tasks(arguments, group, Path(folder)))
                participant = Participant(replace(task, loops="overhead"))
                try:
                    bursts = participant.finish_all()[0]["bursts"]
                except ParticipantError as error:
                    print(error, file=sys.stderr)
                    failures += 1
                    continue
                finally:
                    participant.close()
            found = {"wall": compared(bursts, 1), "processor": compared(bursts, 2)}
            append_line(arguments.output, {"overhead": str(group), "model": arguments.model, **found})
            for clock, each in found.items():
                low, high = each["quartiles"]
                more, step = 1e6 * each["seconds_more"], 1e6 * each["step_seconds_off"]
                print(
                    f"{arguments.model}, {group}, {clock} time: on takes {each['ratio']:.4f} of off "
                    f"(quartiles {low:.4f} to {high:.4f}, {each['pairs']} pairs); "
                    f"{more:+.0f} of {step:.0f} us a step"
                )
            # Other programs on the same cores take wall time from whom they like, and no processor time.
            failures += found["wall" if on_gpu else "processor"]["ratio"] > 1 + arguments.most
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="default")
    add("--stages", nargs="+", choices=["plain", *JSON_FILES], default=["plain", "2"])
    add("--ranks", type=int, nargs="+", default=[1])
    add("--precision", choices=["fp32", "bf16"], default="fp32")
    add("--rounds", type=int, default=20, help=f"pairs of bursts of {LOG_EVERY} steps")
    add("--most", type=float, default=0.01, help="of a step that it may cost")
    add("--output", type=Path, help="JSON lines, one a group, as soon as it is there")
    arguments = parser.parse_args()
    arguments.peers, arguments.warmup = [], 0
    return arguments


if __name__ == "__main__":
    sys.exit(main())
