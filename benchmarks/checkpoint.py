"""Compares the cost of checkpoints, side by side: `python benchmarks/checkpoint.py [--quick]`.

The participants are the pipeline's store, torch.save, DeepSpeed's save_checkpoint and the Hugging Face
Trainer. They train the same model for the same steps, with one save half-way through each burst. They take
turns, so that drift of the machine affects all. After each save of a peer, its files are forced to the disk,
which is timed separately.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch.distributed as dist
from processes import Gate, Participant, ParticipantError, Task, wait_for_device
from report import machine, new_console, print_table, write_json
from workload import JSON_FILES, MODELS, REPOSITORY, Workload, write_recipe

from pipeline.distributed.accelerator import choose_accelerator

PLAIN = ["ours", "torch.save", "trainer"]
DEEPSPEED = ["ours", "deepspeed", "trainer"]
COLUMNS = [
    *("participant", "ranks", "stall  (min-max)", "first stall", "until it counts", "on the disk"),
    *("training lost", "GB"),
]


@dataclass
class Save:
    """Durations of one save in seconds, measured by one rank."""

    step: int
    """Number of steps before the save."""
    stall: float
    """Seconds in which training stood still."""
    total: float = 0.0
    """Seconds until the checkpoint is published, or for a peer until the call returns."""
    durable: float = 0.0
    """Seconds until the checkpoint is on the disk."""
    num_bytes: int = 0
    """Bytes of the whole checkpoint; 0 on other ranks than the first."""


class SavingGate(Gate):
    """Saves half-way through each burst, and records the durations of steps and saves."""

    def __init__(self, gate: Gate, task: Task):
        self.steps: list[float] = []
        self.saves: list[Save] = []
        self._gate = gate
        self._half = task.warmup // 2
        self._folder = task.folder
        self._is_first_rank = os.environ.get("RANK", "0") == "0"
        self._in_burst = 0
        self._step_start: float | None = None
        self._outcomes: list[Any] = []

    def offer_save(self, save: Callable[[Path, int], object], store: Any = None) -> None:
        """Keep the loop's function that saves, and collect the outcomes of a store in the background."""
        self._save_to = save
        self._store = store
        if store is not None:
            poll = store.poll

            def poll_and_record() -> list[Any]:
                outcomes = poll()
                self._outcomes.extend(outcomes)
                return outcomes

            store.poll = poll_and_record

    def __call__(self) -> None:
        wait_for_device()
        if self._step_start is not None:
            self.steps.append(time.perf_counter() - self._step_start)
        if self._gate.ends_burst:
            self._in_burst = 0
            self._finish_background_save()
        self._gate()
        if self._in_burst == self._half:
            self._save()
        self._in_burst += 1
        self._step_start = time.perf_counter()

    def _save(self) -> None:
        step = len(self.steps)
        folder = self._folder / f"checkpoint-{step}"
        save = Save(step, self._time(lambda: self._save_to(folder, step)))
        self.saves.append(save)
        if self._store is not None:
            return
        save.total = save.stall
        save.durable = save.total + self._time(lambda: force_to_disk(folder, self._is_first_rank))
        if self._is_first_rank:
            save.num_bytes = tree_bytes(folder)
            for other in self._folder.glob("checkpoint-*"):
                if other != folder:
                    shutil.rmtree(other)
        wait_for_ranks()

    def _finish_background_save(self) -> None:
        """Wait for the save that the store writes in the background, and record how long it took."""
        if self._store is None:
            return
        self._store.wait()
        self._store.poll()
        save = self.saves[-1]
        outcome = self._outcomes[-1]
        if outcome.problem is not None:
            raise RuntimeError(outcome.problem)
        save.total = save.durable = save.stall + outcome.write_seconds
        if self._is_first_rank:
            save.num_bytes = tree_bytes(max(self._store.folder.glob("step-*[0-9]")))

    def _time(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call that starts on all ranks together, with the device idle."""
        wait_for_device()
        wait_for_ranks()
        start = time.perf_counter()
        call()
        wait_for_device()
        return time.perf_counter() - start


def wait_for_ranks() -> None:
    """Wait until all ranks are here. Collective."""
    if dist.is_initialized():
        dist.barrier()


def tree_bytes(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def force_to_disk(folder: Path, is_first_rank: bool) -> None:
    """Have the first rank force all files of a folder, and their names, to the disk. Collective."""
    if is_first_rank:
        for path in [*folder.rglob("*"), folder, folder.parent]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    wait_for_ranks()


def take_part(task: Task, gate: Gate) -> dict[str, Any]:
    """Train and save until the gate ends the loop, and return the durations of steps and saves."""
    import loops

    saving = SavingGate(gate, task)
    loops.train(task, saving)
    return {"steps": saving.steps, "saves": [asdict(save) for save in saving.saves]}


@dataclass(frozen=True)
class Saver:
    """Durations of one participant's saves: the slowest rank's seconds of each, without the first save."""

    name: str
    split: str
    ranks: int
    first_stall: float
    """Seconds of the first save of the process, which makes buffers and loads libraries."""
    stall: list[float]
    total: list[float]
    durable: list[float]
    lost: list[float]
    """Seconds of training lost: the stall, and the extra time of the steps after the save."""
    num_bytes: int

    @staticmethod
    def of(task: Task, reports: list[dict[str, Any]]) -> Saver:
        """Return the numbers of a participant from its ranks' reports."""
        by_save = list(zip(*(report["saves"] for report in reports), strict=True))
        stall, total, durable = (
            [max(save[key] for save in saves) for saves in by_save] for key in ("stall", "total", "durable")
        )
        half = task.warmup // 2
        steps = reports[0]["steps"]
        lost = []
        for stall_seconds, saves in zip(stall, by_save, strict=True):
            step = saves[0]["step"]
            after = steps[step : step + half]
            lost.append(stall_seconds + sum(after) - len(after) * median(steps[step - half : step]))
        return Saver(
            name=task.name,
            split=task.split,
            ranks=task.world_size,
            first_stall=stall[0],
            stall=stall[1:],
            total=total[1:],
            durable=durable[1:],
            lost=lost[1:],
            num_bytes=by_save[-1][0]["num_bytes"],
        )


def main() -> int:
    """Measure all groups, print their tables, and return the exit code."""
    arguments = parse_arguments()
    console = new_console()
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    savers: list[Saver] = []
    failures: list[str] = []
    for group in arguments.groups:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as folder:
            try:
                measured = measure_group(arguments, group, Path(folder))
            except ParticipantError as error:
                failures.append(str(error))
                continue
        savers += measured
        title = f"one save of {arguments.model}, {arguments.precision}: medians, seconds"
        print_table(console, title, COLUMNS, [table_line(saver) for saver in measured])
    results = {"machine": about, "command": sys.argv[1:], "failures": failures}
    results |= {"savers": [asdict(each) for each in savers]}
    write_json(arguments.output, results)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def measure_group(arguments: argparse.Namespace, group: str, folder: Path) -> list[Saver]:
    """Measure the participants of a split and number of ranks, which take turns.

    Raises:
        ParticipantError: A participant failed.
    """
    split, _, ranks = group.rpartition("-")
    file = None if split == "plain" else REPOSITORY / "ds_configs" / JSON_FILES[split]
    participants: list[Participant] = []
    with ExitStack() as stack:
        for peer in PLAIN if file is None else DEEPSPEED:
            recipe = folder / f"{peer}.yaml"
            write_recipe(recipe, Workload.of(arguments.model), arguments.precision, plain=file is None)
            # The warm-up is a burst too, with the first save.
            task = Task(
                peer=peer,
                split=split,
                precision=arguments.precision,
                world_size=int(ranks),
                warmup=arguments.steps,
                folder=folder / peer,
                recipe=recipe,
                json=file,
                module="checkpoint",
            )
            participants.append(stack.enter_context(Participant(task)))
            participants[-1].warm_up()
        for turn in range(arguments.rounds):
            for participant in participants[:: 1 if turn % 2 == 0 else -1]:
                participant.burst(arguments.steps)
        return [Saver.of(participant.task, participant.finish()) for participant in participants]


def table_line(saver: Saver) -> list[str]:
    """Return a participant's line of the table."""
    return [
        saver.name,
        str(saver.ranks),
        f"{median(saver.stall):.3f}  ({min(saver.stall):.3f}-{max(saver.stall):.3f})",
        f"{saver.first_stall:.2f}",
        f"{median(saver.total):.2f}",
        f"{median(saver.durable):.2f}",
        f"{median(saver.lost):.2f}",
        f"{saver.num_bytes / 1e9:.4f}",
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-70m")
    add(
        "--groups",
        nargs="+",
        default=["plain-1", "2-1", "2-2"],
        help="SPLIT-RANKS: `plain` or a ZeRO stage, and a number of ranks",
    )
    in_bf16 = choose_accelerator() == "cuda"  # many CPUs have no instructions for bf16
    add("--precision", choices=["fp32", "bf16"], default="bf16" if in_bf16 else "fp32")
    add("--steps", type=int, default=16, help="steps of a burst, an even number; one save half-way")
    add("--rounds", type=int, default=5, help="number of bursts of each participant")
    add(
        "--quick",
        action="store_true",
        help="check that the benchmark runs: a tiny model and two short rounds",
    )
    add("--folder", type=Path, help="folder for checkpoints; default: the system's temporary folder")
    add("--output", type=Path, help="JSON file for all numbers")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.steps % 2:
        parser.error(f"--steps {arguments.steps}: expected an even number of at least 2")
    if arguments.quick:
        arguments.model = "tiny"
        arguments.steps = 2
        arguments.rounds = 2
    return arguments


if __name__ == "__main__":
    sys.exit(main())
