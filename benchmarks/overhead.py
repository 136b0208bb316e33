"""What measuring costs a step: python benchmarks/overhead.py --stages plain 2 --ranks 1 2

One run, whose steps come in bursts: with everything on (rows every 10 steps to metrics.jsonl, TensorBoard and
W&B offline, phases, memory, alerts, comparison of ranks and of their bits) and with all off, in turn and in
either order. So both have the same engine, weights and machine. The exit code says whether the median is
above 1 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from processes import Gate, Participant, ParticipantError, Task, wait_for_device
from report import append_line, machine
from throughput import Group, group_tasks
from workload import JSON_FILES, LOG_EVERY, MODELS, Workload

from pipeline.distributed.accelerator import choose_accelerator

WARMUP = 2  # pairs of bursts that are not counted
ROUNDS = "BENCHMARK_ROUNDS"  # environment variable of participants


class Off:
    """In the place of the meters and of the engine's phases: measures nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in ("measured", "exclude_from_step_time"):
            return lambda *_: nullcontext()
        return lambda *_, **__: {}


class MiddleOfBurst:
    """In the place of the log's cadence: on a GPU the next step reads a row, so it is in the same burst."""

    def due(self, step: int) -> bool:
        return step % LOG_EVERY == LOG_EVERY // 2


class Switch:
    """Turns a run's measuring on and off."""

    def __init__(self, run: Any):
        from pipeline.monitoring.trackers.interface import Trackers
        from pipeline.training.loop import Cadence

        self._loop, self._parts = run._loop, run._parts
        self._phases = self._parts.engine.phases
        self._silent = replace(self._parts, meters=Off(), trackers=Trackers())  # type: ignore[arg-type]
        logs = {True: MiddleOfBurst(), False: Cadence(0, 0)}
        schedule = replace(self._loop._schedule, owes_evaluation=False)
        self._schedules = {on: replace(schedule, log=log) for on, log in logs.items()}

    def turn(self, on: bool) -> None:
        loop, parts = self._loop, self._parts
        parts.engine.phases = self._phases if on else Off()
        loop._parts = parts if on else self._silent
        loop._schedule = self._schedules[on]
        loop._train_step._replica_check = parts.replica_check if on else None
        if on:
            self._phases.restart()  # what was off is nobody's time


def take_part(task: Task, gate: Gate) -> list[tuple[bool, float, float]]:
    """Return (on, seconds, the processor's seconds) of each burst; `gate` is not used."""
    import loops

    import pipeline

    overrides = ["log.price_per_device_hour=1"]
    overrides += ["log.tensorboard=true"] * (find_spec("tensorboard") is not None)
    overrides += ["wandb.mode=offline"] * (find_spec("wandb") is not None)
    run, bursts = pipeline.Run(loops.read_settings(task, tuple(overrides))), []
    switch = Switch(run)
    for on in order(int(os.environ[ROUNDS]) + WARMUP):
        switch.turn(on)
        wait_for_device()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(LOG_EVERY):
            run.step()
        wait_for_device()
        bursts.append((on, time.perf_counter() - wall, time.process_time() - processor))
    switch.turn(True)
    with suppress(BrokenPipeError):  # W&B's service may be gone
        run.close()
    return bursts[2 * WARMUP :]


def order(rounds: int) -> Iterator[bool]:
    """Yield on and off, off and on, and so forth: a drift favours neither. The first step has a row."""
    for number in range(rounds):
        yield from (False, True) if number % 2 else (True, False)


def compared(bursts: list[tuple[bool, float, float]], column: int) -> dict[str, Any]:
    """Return on over off of each pair of bursts; and what that is in seconds a step."""
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
    os.environ[ROUNDS] = str(arguments.rounds)
    about, failed = machine(), False
    print(" · ".join(f"{key} {value}" for key, value in about.items()))
    append_line(arguments.output, {"machine": about, "command": sys.argv[1:]})
    # Other programs on the same cores take wall time from whom they like, and no processor time.
    judged = "wall" if choose_accelerator() == "cuda" else "processor"
    for ranks in arguments.ranks:
        for split in arguments.stages:
            group = Group(arguments.precision, ranks, split, Workload.of(arguments.model))
            with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
                task = next(group_tasks(group, [], 0, Path(folder)))
                task = replace(task, module="overhead", silence_seconds=3600.0)  # one answer, at the end
                try:
                    with Participant(task) as participant:
                        bursts = participant.finish()[0]
                except ParticipantError as error:
                    print(error, file=sys.stderr)
                    failed = True
                    continue
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
            failed |= found[judged]["ratio"] > 1 + arguments.most
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
