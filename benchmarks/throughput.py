"""Compares tokens per second of whole loops: `python benchmarks/throughput.py --ranks 1 2 --stages plain 2`.

The participants are the pipeline, the Hugging Face Trainer, and bare PyTorch and DeepSpeed loops: with the
loss of transformers, with our loss, or compiled. Each loop is written as its users write it. All train the
same model on the same tokens in the same order, with equal batch, hyperparameters, precision, threads and
JSON. With --adapter all train LoRA, the peers by peft. They take turns in short bursts, so that drift of the
machine affects all.
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

# (is plain PyTorch, has an adapter) -> default peers. Adapters have no peer with our loss, because peft's
# wrapper would have to compute logits for it.
DEFAULT = {
    (True, False): ["pytorch", "pytorch+our-loss", "trainer"],
    (False, False): ["deepspeed", "deepspeed+our-loss", "trainer"],
    (True, True): [FULL, "pytorch", "trainer"],
    (False, True): [FULL, "deepspeed", "trainer"],
}
ON_REQUEST = {False: ["pytorch-compiled", "fsdp2-compiled", "trainer-liger", FP8], True: ["trainer-liger"]}
NEEDS = {"trainer-liger": "liger_kernel", FP8: "torchao"}
# (data, rows, precision) -> largest relative difference of the final losses of participants. With real text
# or packed rows the problem of the peers is slightly different: transformers shifts the labels, and so leaves
# out the last target of each row.
LOSS_TOLERANCES = {("random", "unpacked", "fp32"): 1e-4, ("random", "unpacked", "bf16"): 1e-2}
DEFAULT_LOSS_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Group:
    """Participants that take turns."""

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
    """Participant with its workload."""

    participant: Participant
    work: Workload

    def tokens_per_second(self, steps: int) -> list[float]:
        """Return the tokens per second of each burst of `steps` steps."""
        tokens = self.work.sequence_length * self.work.micro_batch_size
        tokens *= self.participant.task.world_size * steps
        return [tokens / seconds for seconds in self.participant.round_seconds]


class Benchmark:
    """Measures groups of participants. A participant that fails is reported and left out.

    Args:
        arguments: Result of `parse_arguments`.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.failures: list[str] = []

    def fail(self, name: str, reason: str) -> None:
        """Record that `name` failed, and append the record to the file at once."""
        self.failures.append(reason)
        print(reason, file=sys.stderr, flush=True)
        append_line(self.arguments.append, {"failed": name, "why": reason})

    def measure_all(self, work: Workload, precision: str, ranks: int) -> list[Row]:
        """Measure every split and kind of rows, and check that the losses of each group agree."""
        rows = []
        for split, kind in itertools.product(self.arguments.stages, self.arguments.rows):
            group = Group(precision, ranks, split, replace(work, rows=kind))
            measured = self.measure(group)
            if len({row.micro_batch_size for row in measured}) == 1:
                spread = disagreement(measured)
                tolerance = loss_tolerance(group)
                if spread <= tolerance:
                    line = f"losses of all participants agree within {spread:.1e} (allowed {tolerance:.0e})"
                    print(f"{group}: {line}", flush=True)
                else:
                    line = f"losses of participants differ by {spread:.1e} (allowed {tolerance:.0e})"
                    self.fail(str(group), f"{group}: {line}")
            rows += measured
        return rows

    def measure(self, group: Group) -> list[Row]:
        """Measure the participants of a group, which take turns, or run alone with --one-at-a-time."""
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            tasks = list(group_tasks(group, self.arguments.peers, self.arguments.warmup, Path(folder)))
            parts = [[task] for task in tasks] if self.arguments.one_at_a_time else [tasks]
            return [row for part in parts for row in self._measure_together(group.work, part)]

    def _measure_together(self, work: Workload, tasks: list[Task]) -> list[Row]:
        """Measure participants that live together and take turns."""
        arguments = self.arguments
        alive: list[Entrant] = []
        rows = []
        try:
            for task in tasks:
                alive.append(Entrant(Participant(task, arguments.logs), work))
                if not arguments.start_together:
                    self._warm_up(alive, alive[-1])
            for entrant in list(alive) if arguments.start_together else []:
                self._warm_up(alive, entrant)
            for turn in range(arguments.rounds):
                for entrant in alive[:: 1 if turn % 2 == 0 else -1]:
                    task = entrant.participant.task
                    try:
                        entrant.participant.burst(arguments.steps)
                    except ParticipantError as error:
                        self.fail(task.name, str(error))
                        alive.remove(entrant)
                        continue
                    rate = entrant.tokens_per_second(arguments.steps)[-1]
                    record = {"burst": task.name, "precision": task.precision, "ranks": task.world_size}
                    append_line(arguments.append, record | vars(entrant.work) | {"tokens_per_second": rate})
            for entrant in alive:
                try:
                    rows.append(self._finish(entrant))
                except ParticipantError as error:
                    self.fail(entrant.participant.task.name, str(error))
            return rows
        finally:
            for entrant in alive:
                entrant.participant.close()

    def _warm_up(self, alive: list[Entrant], entrant: Entrant) -> None:
        """Wait for the warm-up; after out of memory, start again with half the micro-batch."""
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

    def _finish(self, entrant: Entrant) -> Row:
        """End the participant's loop, and return and record its row."""
        participant = entrant.participant
        task = participant.task
        reports = participant.finish()
        work = {key: value for key, value in vars(entrant.work).items() if key not in ("data", "fp8")}
        row = Row(
            name=task.name,
            peer=task.peer,
            split=task.split,
            precision=task.precision,
            ranks=task.world_size,
            round_tokens_per_second=entrant.tokens_per_second(self.arguments.steps),
            first_step_seconds=participant.first_step_seconds,
            **work,
            **reports[0] | {"peak_memory_gib": max(report["peak_memory_gib"] for report in reports)},
        )
        append_line(self.arguments.append, row.as_dict())
        print(f"{row.name}, {row.rows}: {row.tokens_per_second:,.0f} tokens/s", flush=True)
        return row


def main() -> int:
    """Measure all groups, print and write the results, and return the exit code."""
    arguments = parse_arguments()
    console = new_console()
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    append_line(arguments.append, {"machine": about, "command": sys.argv[1:]})
    read_libraries()
    benchmark = Benchmark(arguments)
    size = arguments.sequence_length, arguments.micro_batch_size
    work = Workload(arguments.model, arguments.data, "unpacked", *size, arguments.adapter)
    rows: list[Row] = []
    try:
        for precision, ranks in itertools.product(arguments.precision, arguments.ranks):
            measured = benchmark.measure_all(work, precision, ranks)
            kind = f"{arguments.model}{', adapter' * arguments.adapter}, {precision}"
            print_rows(console, measured, f"{kind}, {ranks} rank{'s' * (ranks > 1)}")
            rows += measured
    except KeyboardInterrupt:
        benchmark.fail("interrupted", "interrupted: the participants that follow were not measured")
    results = {"machine": about, "command": sys.argv[1:], "failures": benchmark.failures}
    results |= {"participants": [row.as_dict() for row in rows], "ratios": ratios(rows)}
    write_json(arguments.output, results)
    return 1 if benchmark.failures else 0


def read_libraries() -> None:
    """Read the libraries' files into the page cache, or the first participant would pay for it."""
    imports = "import deepspeed, pipeline.training.api; from transformers import Trainer"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", imports], cwd=REPOSITORY, check=True, **quiet)


def loss_tolerance(group: Group) -> float:
    """Return the largest relative difference that the final losses of a group may have."""
    key = (group.work.data, group.work.rows, group.precision)
    return LOSS_TOLERANCES.get(key, DEFAULT_LOSS_TOLERANCE)


def work_of(peer: str, work: Workload) -> Workload:
    """Return the workload of one participant: `ours-full` has no adapter, and only `ours-fp8` uses fp8."""
    return replace(work, adapter=work.adapter and peer != FULL, fp8=peer == FP8)


def files_of(peers: Sequence[str] | None, group: Group) -> dict[str, list[str | None]]:
    """Return the files of ds_configs/ with which each participant runs, `None` for no file; ours is first.

    With plain PyTorch on several ranks, ours runs twice: with PyTorch's DDP and with DeepSpeed's stage 0.

    Args:
        peers: Names of peers, `None` for the default ones. Peers that do not support the split are left out.
    """
    is_plain = group.split == "plain"
    requested = DEFAULT[is_plain, group.work.adapter] if peers is None else peers
    unsupported = ("deepspeed",) if is_plain else ("pytorch", "fsdp2")
    names = ["ours", *(peer for peer in requested if not peer.startswith(unsupported))]
    file = None if is_plain else JSON_FILES.get(group.split, group.split)
    files: dict[str, list[str | None]] = {name: [file] for name in names}
    if is_plain and group.ranks > 1:
        files["ours"] = ["torch_ddp.json", "ddp.json"]
        if FULL in files:
            files[FULL] = ["torch_ddp.json"]
    return files


def group_tasks(group: Group, peers: Sequence[str] | None, warmup: int, folder: Path) -> Iterator[Task]:
    """Write the recipes of a group's participants to the folder, and yield their tasks, ours first."""
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
    """Read the command line, and fill in the defaults of the model."""
    choices = {
        adapter: dict.fromkeys([*DEFAULT[True, adapter], *DEFAULT[False, adapter], *ON_REQUEST[adapter]])
        for adapter in (False, True)
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="default")
    add("--data", choices=["stdlib", "random"], help="default: stdlib for the default model, else random")
    add("--rows", choices=["unpacked", "packed"], nargs="+", default=["unpacked"])
    add("--sequence-length", type=int, help="default: the model's own")
    micro_batch_size = "default: the model's own; halved for a participant that runs out of memory"
    add("--micro-batch-size", type=int, help=micro_batch_size)
    add("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    add("--stages", nargs="+", default=["plain", "2"], help="plain, a ZeRO stage, or a file of ds_configs/")
    add("--precision", choices=["fp32", "bf16"], nargs="+", default=["bf16"])
    add("--adapter", action="store_true", help="train LoRA of rank 32 on all linear layers; peers use peft")
    add("--peers", choices=choices[False] | choices[True], nargs="*", help="participants besides ours")
    add("--steps", type=int, default=5, help="timed optimizer steps of a burst")
    add("--rounds", type=int, default=5, help="number of bursts of each participant")
    add("--warmup", type=int, default=5, help="untimed steps before the first burst, at least 2")
    start_together = "start all participants at once: faster on many cores, but `first step` is less exact"
    add("--start-together", action="store_true", help=start_together)
    one_at_a_time = "run one participant after the other, if memory cannot hold all of a group"
    add("--one-at-a-time", action="store_true", help=one_at_a_time)
    add("--output", type=Path, help="JSON file for all numbers, written at the end")
    append = "file of JSON lines; each burst and each participant is appended at once"
    add("--append", type=Path, help=append)
    draw_on_device = "draw first weights on the GPU, which is fast but gives other weights than a run has"
    add("--draw-on-device", action="store_true", help=draw_on_device)
    add("--logs", type=Path, help="file to which the log of every participant is appended")
    arguments = parser.parse_args()
    if arguments.draw_on_device:
        os.environ[DRAW_ON_DEVICE] = "1"  # the participants inherit it
    if arguments.warmup < 2:
        parser.error(f"--warmup {arguments.warmup}: expected at least 2")
    for split in arguments.stages:
        if split not in {"plain", *JSON_FILES} and not (REPOSITORY / "ds_configs" / split).is_file():
            expected = f"plain, {', '.join(JSON_FILES)} or the name of a file in ds_configs/"
            parser.error(f"--stages {split}: expected {expected}")
    for peer in list(arguments.peers or []):
        if peer not in choices[arguments.adapter]:
            option = "without" if arguments.adapter else "with"
            parser.error(f"--peers {peer}: runs only {option} --adapter")
        if peer in NEEDS and find_spec(NEEDS[peer]) is None:
            print(f"skipping {peer}: it needs the package {NEEDS[peer]}", file=sys.stderr)
            arguments.peers.remove(peer)
    if arguments.data is None:
        arguments.data = "stdlib" if arguments.model == "default" else "random"
    size = MODELS[arguments.model]
    arguments.sequence_length = arguments.sequence_length or size["sequence_length"]
    arguments.micro_batch_size = arguments.micro_batch_size or size["micro_batch_size"]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
