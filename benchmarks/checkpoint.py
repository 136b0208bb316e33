"""Compares the cost of checkpoints, side by side: `python benchmarks/checkpoint.py [--quick]`.

The pipeline's store against torch.save, DeepSpeed's save_checkpoint and the Hugging Face Trainer: same model,
same steps, one save half-way through each burst, in turn, so that drift hits all. Peers have their files
forced to the disk after each save, on a clock of its own.
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

PLAIN, DEEPSPEED = ["ours", "torch.save", "trainer"], ["ours", "deepspeed", "trainer"]
COLUMNS = [
    *("participant", "ranks", "stall  (min-max)", "first stall", "until it counts", "on the disk"),
    *("training lost", "GB"),
]


@dataclass
class Save:
    """One save as one rank saw it. Seconds."""

    step: int
    """Steps that were done before it."""
    stall: float
    """Seconds in which training stood still."""
    total: float = 0.0
    """Seconds until the checkpoint counts: it is published, or the call has returned."""
    durable: float = 0.0
    """Seconds until it is on the disk."""
    num_bytes: int = 0
    """Bytes of the whole checkpoint; 0 on other ranks than the first."""


class SavingGate(Gate):
    """A gate that saves half-way through each burst, and notes what steps and saves take."""

    def __init__(self, gate: Gate, task: Task):
        self.steps: list[float] = []
        self.saves: list[Save] = []
        self._gate = gate
        self._half = task.warmup // 2
        self._folder = task.folder
        self._is_first_rank = os.environ.get("RANK", "0") == "0"
        self._in_burst = 0
        self._began: float | None = None
        self._ended: list[Any] = []

    def offer_save(self, save: Callable[[Path, int], object], store: Any = None) -> None:
        self._call, self._store = save, store
        if store is not None:
            poll = store.poll

            def noted_poll() -> list[Any]:
                outcomes = poll()
                self._ended.extend(outcomes)
                return outcomes

            store.poll = noted_poll

    def __call__(self) -> None:
        wait_for_device()
        if self._began is not None:
            self.steps.append(time.perf_counter() - self._began)
        if self._gate.ends_burst:
            self._in_burst = 0
            self._end_background()
        self._gate()
        if self._in_burst == self._half:
            self._save()
        self._in_burst += 1
        self._began = time.perf_counter()

    def _save(self) -> None:
        step = len(self.steps)
        folder = self._folder / f"checkpoint-{step}"
        save = Save(step, self._seconds(lambda: self._call(folder, step)))
        self.saves.append(save)
        if self._store is not None:
            return
        save.total = save.stall
        save.durable = save.total + self._seconds(lambda: force_to_disk(folder, self._is_first_rank))
        if self._is_first_rank:
            save.num_bytes = tree_bytes(folder)
            for other in self._folder.glob("checkpoint-*"):
                if other != folder:
                    shutil.rmtree(other)
        meet()

    def _end_background(self) -> None:
        """Wait for a save that goes on beside training, and note how long it took."""
        if self._store is None:
            return
        self._store.wait()
        self._store.poll()
        save, outcome = self.saves[-1], self._ended[-1]
        if outcome.problem is not None:
            raise RuntimeError(outcome.problem)
        save.total = save.durable = save.stall + outcome.write_seconds
        if self._is_first_rank:
            save.num_bytes = tree_bytes(max(self._store.folder.glob("step-*[0-9]")))

    def _seconds(self, call: Callable[[], object]) -> float:
        """Return what a call takes, the ranks having met and the device idle."""
        wait_for_device()
        meet()
        start = time.perf_counter()
        call()
        wait_for_device()
        return time.perf_counter() - start


def meet() -> None:
    """Wait for all ranks."""
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
    meet()


def take_part(task: Task, gate: Gate) -> dict[str, Any]:
    """Train and save until the gate has enough."""
    import loops

    saving = SavingGate(gate, task)
    loops.train(task, saving)
    return {"steps": saving.steps, "saves": [asdict(save) for save in saving.saves]}


@dataclass(frozen=True)
class Saver:
    """One participant: of each save the slowest rank's seconds. The first save of the process is apart."""

    name: str
    split: str
    ranks: int
    first_stall: float
    """Seconds of the first save, which makes buffers and loads libraries."""
    stall: list[float]
    total: list[float]
    durable: list[float]
    lost: list[float]
    """The stall, and by how much the steps after the save are slower than those before."""
    num_bytes: int

    @staticmethod
    def of(task: Task, reports: list[dict[str, Any]]) -> Saver:
        """Return the numbers of a participant from its ranks' reports."""
        by_save = list(zip(*(report["saves"] for report in reports), strict=True))
        stall, total, durable = (
            [max(save[key] for save in saves) for saves in by_save] for key in ("stall", "total", "durable")
        )
        half, steps, lost = task.warmup // 2, reports[0]["steps"], []
        for stood_still, saves in zip(stall, by_save, strict=True):
            at = saves[0]["step"]
            after = steps[at : at + half]
            lost.append(stood_still + sum(after) - len(after) * median(steps[at - half : at]))
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
    arguments = parse_arguments()
    console, about = new_console(), machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    savers: list[Saver] = []
    failures: list[str] = []
    for group in arguments.groups:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as folder:
            try:
                part = measure_group(arguments, group, Path(folder))
            except ParticipantError as error:
                failures.append(str(error))
                continue
        savers += part
        title = f"one save of {arguments.model}, {arguments.precision}: medians, seconds"
        print_table(console, title, COLUMNS, [table_line(saver) for saver in part])
    results = {"machine": about, "command": sys.argv[1:], "failures": failures}
    results |= {"savers": [asdict(each) for each in savers]}
    write_json(arguments.output, results)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def measure_group(arguments: argparse.Namespace, group: str, folder: Path) -> list[Saver]:
    """Return all participants of a split and number of ranks, which take turns.

    Raises:
        ParticipantError: one of them failed.
    """
    split, _, ranks = group.rpartition("-")
    file = None if split == "plain" else REPOSITORY / "ds_configs" / JSON_FILES[split]
    alive: list[Participant] = []
    with ExitStack() as stack:
        for peer in PLAIN if file is None else DEEPSPEED:
            recipe = folder / f"{peer}.yaml"
            write_recipe(recipe, Workload.of(arguments.model), arguments.precision, plain=file is None)
            # The warm-up is a burst, too: its save is the first one.
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
            alive.append(stack.enter_context(Participant(task)))
            alive[-1].warm_up()
        for turn in range(arguments.rounds):
            for each in alive[:: 1 if turn % 2 == 0 else -1]:
                each.burst(arguments.steps)
        return [Saver.of(each.task, each.finish()) for each in alive]


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-70m")
    add("--groups", nargs="+", default=["plain-1", "2-1", "2-2"], help="split-ranks: `plain` or a ZeRO stage")
    in_bf16 = choose_accelerator() == "cuda"  # many CPUs have no instructions for it
    add("--precision", choices=["fp32", "bf16"], default="bf16" if in_bf16 else "fp32")
    add("--steps", type=int, default=16, help="a burst, with one save half-way; even")
    add("--rounds", type=int, default=5, help="bursts of each participant")
    add("--quick", action="store_true", help="a tiny model, few rounds: that it runs, not what it takes")
    add("--folder", type=Path, help="where checkpoints are written; default: the system's temporary folder")
    add("--output", type=Path, help="JSON file of all numbers")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.steps % 2:
        parser.error("--steps: even, and at least 2")
    if arguments.quick:
        arguments.model, arguments.steps, arguments.rounds = "tiny", 2, 2
    return arguments


if __name__ == "__main__":
    sys.exit(main())
