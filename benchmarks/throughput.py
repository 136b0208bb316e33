"""Compares tokens per second of whole loops: `python benchmarks/throughput.py --ranks 1 2 --stages plain 2`.

The pipeline's loop, bare PyTorch and DeepSpeed loops (as they come, given our loss, compiled) and the Hugging
Face Trainer, as their users write them: same model, tokens, order, batch, numbers, precision, threads, JSON;
with --adapter all train LoRA, the peers by peft. All step in turn, in short bursts: drift hits all.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from processes import Participant, ParticipantError, Task
from report import (
    Row,
    append_line,
    disagreement,
    machine,
    new_console,
    print_rows,
    ratios,
    write_json,
)
from workload import DRAW_ON_DEVICE, FP8, FULL, JSON_FILES, MODELS, REPOSITORY, Workload, write_recipe

# (plain PyTorch or not, with an adapter or not) -> peers by default. peft's wrapper would have to make logits
# for our loss.
DEFAULT = {
    (True, False): ["pytorch", "pytorch+our-loss", "trainer"],
    (False, False): ["deepspeed", "deepspeed+our-loss", "trainer"],
    (True, True): [FULL, "pytorch", "trainer"],
    (False, True): [FULL, "deepspeed", "trainer"],
}
ON_REQUEST = {False: ["pytorch-compiled", "fsdp2-compiled", "trainer-liger", FP8], True: ["trainer-liger"]}
NEEDS = {"trainer-liger": "liger_kernel", FP8: "torchao"}
# Largest relative difference of the final losses among participants. With real text or packed rows the peers
# leave out the last target of each row (transformers shifts labels inside): not quite the same problem.
LOSS_BANDS = {("random", "unpacked", "fp32"): 1e-4, ("random", "unpacked", "bf16"): 1e-2}
LOSS_BAND = 2e-2


@dataclass(frozen=True)
class Group:
    """Participants that step in turn."""

    precision: str
    ranks: int
    split: str
    """`plain`, a ZeRO stage, or a file of ds_configs/."""
    work: Workload

    def __str__(self) -> str:
        kind = f"{self.work.rows}{', adapter' * self.work.adapter}"
        return f"{self.split}, {kind}, {self.precision}, {self.ranks} rank{'s' * (self.ranks > 1)}"


@dataclass
class Entrant:
    """A participant with what it trains."""

    participant: Participant
    work: Workload

    def tokens_per_second(self, steps: int) -> list[float]:
        """Return the rate of each burst of so many steps."""
        each = self.participant
        size = self.work.sequence_length * self.work.micro_batch_size
        return [size * each.task.world_size * steps / seconds for seconds in each.round_seconds]


class Benchmark:
    """Measures groups as the command line says. A participant that fails is reported and left out."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.failures: list[str] = []

    def fail(self, name: str, why: str) -> None:
        """Record that `name` failed, on the disk too: a kill afterwards loses nothing of it."""
        self.failures.append(why)
        print(why, file=sys.stderr, flush=True)
        append_line(self.arguments.append, {"failed": name, "why": why})

    def measure_all(self, work: Workload, precision: str, ranks: int) -> list[Row]:
        """Return the rows of every split and kind of rows. In each group all must agree in the loss."""
        rows = []
        for split, kind in itertools.product(self.arguments.stages, self.arguments.rows):
            group = Group(precision, ranks, split, replace(work, rows=kind))
            measured = self.measure(group)
            if len({row.micro_batch_size for row in measured}) == 1:
                spread, band = disagreement(measured), loss_band(group)
                line = f"{group}: losses of all participants agree within {spread:.1e} (allowed {band:.0e})"
                print(line, flush=True)
                if not spread <= band:
                    self.fail(str(group), f"not so: {line}")
            rows += measured
        return rows

    def measure(self, group: Group) -> list[Row]:
        """Return the rows of all participants of a group, which step in turn or, if asked for, alone."""
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            tasks = list(group_tasks(group, self.arguments.peers, self.arguments.warmup, Path(folder)))
            turns = [[task] for task in tasks] if self.arguments.one_at_a_time else [tasks]
            return [row for together in turns for row in self._measure(group.work, together)]

    def _measure(self, work: Workload, tasks: list[Task]) -> list[Row]:
        asked = self.arguments
        alive: list[Entrant] = []
        rows = []
        try:
            for task in tasks:
                alive.append(Entrant(Participant(task, asked.logs), work))
                if not asked.start_together:
                    self._warm_up(alive, alive[-1])
            for entrant in list(alive) if asked.start_together else []:
                self._warm_up(alive, entrant)
            for turn in range(asked.rounds):
                for entrant in alive[:: 1 if turn % 2 == 0 else -1]:
                    task = entrant.participant.task
                    try:
                        entrant.participant.burst(asked.steps)
                    except ParticipantError as error:
                        self.fail(task.name, str(error))
                        alive.remove(entrant)
                        continue
                    rate = entrant.tokens_per_second(asked.steps)[-1]
                    record = {"burst": task.name, "precision": task.precision, "ranks": task.world_size}
                    append_line(asked.append, record | vars(entrant.work) | {"tokens_per_second": rate})
            for entrant in alive:
                try:
                    rows.append(self._finished(entrant))
                except ParticipantError as error:
                    self.fail(entrant.participant.task.name, str(error))
            return rows
        finally:
            for entrant in alive:
                entrant.participant.close()

    def _warm_up(self, alive: list[Entrant], entrant: Entrant) -> None:
        """Wait for the first burst; where memory is short, start again with half the micro-batch."""
        while True:
            task = entrant.participant.task
            try:
                return entrant.participant.warm_up()
            except ParticipantError as error:
                self.fail(task.name, str(error))
                half = entrant.work.micro_batch_size // 2
                if "out of memory" not in str(error).lower() or half == 0:
                    return alive.remove(entrant)
            entrant.work = replace(entrant.work, micro_batch_size=half)
            folder = task.folder.with_name(f"{task.folder.name}-{half}")
            work = work_of(task.peer, entrant.work)
            write_recipe(task.recipe, work, task.precision, plain=task.json is None)
            entrant.participant = Participant(replace(task, folder=folder), self.arguments.logs)

    def _finished(self, entrant: Entrant) -> Row:
        each, task = entrant.participant, entrant.participant.task
        reports = each.finish()
        work = {key: value for key, value in vars(entrant.work).items() if key not in ("data", "fp8")}
        row = Row(
            name=task.name,
            peer=task.peer,
            split=task.split,
            precision=task.precision,
            ranks=task.world_size,
            round_tokens_per_second=entrant.tokens_per_second(self.arguments.steps),
            first_step_seconds=each.first_step_seconds,
            **work,
            **reports[0] | {"peak_memory_gib": max(report["peak_memory_gib"] for report in reports)},
        )
        append_line(self.arguments.append, row.as_dict())
        print(f"{row.name}, {row.rows}: {row.tokens_per_second:,.0f} tokens/s", flush=True)
        return row


def main() -> int:
    arguments = parse_arguments()
    console, about = new_console(), machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    append_line(arguments.append, {"machine": about, "command": sys.argv[1:]})
    read_libraries()
    benchmark = Benchmark(arguments)
    size = arguments.sequence_length, arguments.micro_batch_size
    work = Workload(arguments.model, arguments.data, "unpacked", *size, arguments.adapter)
    rows: list[Row] = []
    try:
        for precision, ranks in itertools.product(arguments.precision, arguments.ranks):
            part = benchmark.measure_all(work, precision, ranks)
            kind = f"{arguments.model}{', adapter' * arguments.adapter}, {precision}"
            print_rows(console, part, f"{kind}, {ranks} rank{'s' * (ranks > 1)}")
            rows += part
    except KeyboardInterrupt:
        benchmark.fail("interrupted", "interrupted: what follows was not measured")
    results = {"machine": about, "command": sys.argv[1:], "failures": benchmark.failures}
    results |= {"participants": [row.as_dict() for row in rows], "ratios": ratios(rows)}
    write_json(arguments.output, results)
    return 1 if benchmark.failures else 0


def read_libraries() -> None:
    """Bring the libraries' files into the system's cache: the first participant would pay for all."""
    imports = "import deepspeed, pipeline.training.api; from transformers import Trainer"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", imports], cwd=REPOSITORY, check=True, **quiet)


def loss_band(group: Group) -> float:
    """Return how far the participants' final losses may differ."""
    return LOSS_BANDS.get((group.work.data, group.work.rows, group.precision), LOSS_BAND)


def work_of(peer: str, work: Workload) -> Workload:
    """Return what this participant trains of the group's work."""
    return replace(work, adapter=work.adapter and peer != FULL, fp8=peer == FP8)


def files_of(peers: Sequence[str] | None, group: Group) -> dict[str, list[str | None]]:
    """Return participant -> files of ds_configs/ that it runs with, None: without one. Ours is first.

    Plain ours at several ranks is DDP twice, PyTorch's and DeepSpeed's stage 0. `peers` is None for the
    default ones; those that the split does not know are left out.
    """
    is_plain, adapter = group.split == "plain", group.work.adapter
    asked = DEFAULT[is_plain, adapter] if peers is None else peers
    others = ("deepspeed",) if is_plain else ("pytorch", "fsdp2")
    names = ["ours", *(peer for peer in asked if not peer.startswith(others))]
    file = None if is_plain else JSON_FILES.get(group.split, group.split)
    files: dict[str, list[str | None]] = {name: [file] for name in names}
    if is_plain and group.ranks > 1:
        files["ours"] = ["torch_ddp.json", "ddp.json"]
        if FULL in files:
            files[FULL] = ["torch_ddp.json"]
    return files


def group_tasks(group: Group, peers: Sequence[str] | None, warmup: int, folder: Path) -> Iterator[Task]:
    """Yield the participants of a group, ours first; their recipes are written to the folder."""
    for peer, names in files_of(peers, group).items():
        for name in names:
            recipe = folder / f"{peer}-{name}.yaml"
            write_recipe(recipe, work_of(peer, group.work), group.precision, plain=name is None)
            yield Task(
                peer=peer,
                split=group.split,
                precision=group.precision,
                world_size=group.ranks,
                warmup=warmup,
                folder=folder / f"{peer}-{name}",
                recipe=recipe,
                json=None if name is None else REPOSITORY / "ds_configs" / name,
                label=str(name) if len(names) > 1 else "",
            )


def parse_arguments() -> argparse.Namespace:
    choices = {
        adapter: dict.fromkeys([*DEFAULT[True, adapter], *DEFAULT[False, adapter], *ON_REQUEST[adapter]])
        for adapter in (False, True)
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="default")
    add("--data", choices=["stdlib", "random"], help="default: stdlib for the default model")
    add("--rows", choices=["unpacked", "packed"], nargs="+", default=["unpacked"])
    add("--sequence-length", type=int, help="default: the model's own")
    add("--micro-batch-size", type=int, help="default: the model's own; halved where memory is short")
    add("--ranks", type=int, nargs="+", default=[1, 2])
    add("--stages", nargs="+", default=["plain", "2"], help="plain, a ZeRO stage, or a file of ds_configs/")
    add("--precision", choices=["fp32", "bf16"], nargs="+", default=["bf16"])
    add("--adapter", action="store_true", help="LoRA of rank 32 on all linear layers; the peers by peft")
    add("--peers", choices=choices[False] | choices[True], nargs="*", help="beside ours")
    add("--steps", type=int, default=5, help="timed optimizer steps a burst")
    add("--rounds", type=int, default=5, help="bursts of each participant")
    add("--warmup", type=int, default=5, help="untimed steps before the first burst, at least 2")
    add("--start-together", action="store_true", help="faster on many cores; blurs `first step`")
    add("--one-at-a-time", action="store_true", help="where memory does not hold all participants of a group")
    add("--output", type=Path, help="JSON file of all numbers, once all are there")
    add("--append", type=Path, help="JSON lines: each burst and each participant as soon as it is there")
    add("--draw-on-device", action="store_true", help="first weights of all participants; not those of a run")
    add("--logs", type=Path, help="file that every participant's log is appended to")
    arguments = parser.parse_args()
    if arguments.draw_on_device:
        os.environ[DRAW_ON_DEVICE] = "1"  # the participants inherit it
    if arguments.warmup < 2:
        parser.error("--warmup: at least 2")
    for split in arguments.stages:
        if split not in {"plain", *JSON_FILES} and not (REPOSITORY / "ds_configs" / split).is_file():
            parser.error(f"--stages {split}: plain, {', '.join(JSON_FILES)} or a file of ds_configs/")
    for peer in list(arguments.peers or []):
        if peer not in choices[arguments.adapter]:
            parser.error(f"--peers {peer}: not {'with' if arguments.adapter else 'without'} --adapter")
        if peer in NEEDS and find_spec(NEEDS[peer]) is None:
            print(f"left out: {peer}, which needs the package {NEEDS[peer]}", file=sys.stderr)
            arguments.peers.remove(peer)
    if arguments.data is None:
        arguments.data = "stdlib" if arguments.model == "default" else "random"
    size = MODELS[arguments.model]
    arguments.sequence_length = arguments.sequence_length or size["sequence_length"]
    arguments.micro_batch_size = arguments.micro_batch_size or size["micro_batch_size"]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
