"""Whole-loop tokens per second, side by side: python benchmarks/throughput.py --ranks 1 2 --stages plain 2

The pipeline's loop, bare PyTorch and DeepSpeed loops (as they come, given our loss, compiled) and the Hugging
Face Trainer, as their users write them: same model, tokens, order, batch, numbers, precision, threads, JSON;
with --adapter all train LoRA, the peers by peft. All step in turn, in short bursts: drift hits all. The last
table says which claims hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from line_up import LOOPS, choices, files_of, leave_out, on_request, work_of
from processes import Participant, ParticipantError, Task, on_cuda
from report import Row, append_line, claims_of, disagreement, machine, print_claims, print_table, ratios
from rich.console import Console
from workload import DRAW_ON_DEVICE, JSON_FILES, MODELS, REPOSITORY, Workload, write_recipe

# Largest relative difference of the final losses among participants. With real text or packed rows the peers
# leave out the last target of each row (transformers shifts labels inside): not quite the same problem.
LOSS_BANDS = {("random", "unpacked", "fp32"): 1e-4, ("random", "unpacked", "bf16"): 1e-2}
LOSS_BAND = 2e-2


@dataclass
class Entrant:
    """A participant with what it was given."""

    participant: Participant
    work: Workload


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


def main() -> int:
    arguments = parse_arguments()
    on_gpu = on_cuda()
    console = Console(width=None if sys.stdout.isatty() else 150)
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    append_line(arguments.append, {"machine": about, "command": sys.argv[1:]})
    deadline = time.monotonic() + 60 * arguments.minutes
    failures = Failures(arguments.append)
    read_libraries()
    work = fastest(arguments, failures)
    rows: list[Row] = []
    for precision, ranks in itertools.product(arguments.precision, arguments.ranks):
        part: list[Row] = []
        for split, kind in itertools.product(arguments.stages, arguments.rows):
            group = Group(precision, ranks, split, replace(work, rows=kind))
            if time.monotonic() > deadline:
                console.print(f"not measured, out of time: {group}")
                continue
            measured = measure_group(arguments, group, failures)
            if (problem := check_losses(console, measured, group)) is not None:
                failures.add(str(group), problem)
            part += measured
        if part:
            kind = f"{arguments.model}{', adapter' * arguments.adapter}, {precision}"
            print_table(console, part, f"{kind}, {ranks} rank{'s' * (ranks > 1)}")
        rows += part
        if arguments.output is not None:
            write_results(arguments.output, about, rows, failures.all)
    print_claims(console, claims_of(rows, on_gpu=on_gpu))
    return 1 if failures.all else 0


class Failures:
    """Prints and appends each failure when it happens: a kill loses none of them."""

    def __init__(self, append: Path | None):
        self.all: list[str] = []
        self._append = append

    def add(self, name: str, why: str) -> None:
        """Record that `name` failed."""
        self.all.append(why)
        print(why, file=sys.stderr, flush=True)
        append_line(self._append, {"failed": name, "why": why})


def read_libraries() -> None:
    """Brings the libraries' files into the system's cache: the first participant would pay for all."""
    command = [
        sys.executable,
        "-c",
        "import deepspeed, pipeline.training.api; from transformers import Trainer",
    ]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def fastest(arguments: argparse.Namespace, failures: Failures) -> Workload:
    """The micro batch at which ours is fastest in the first group, of those to sweep."""
    size = arguments.sequence_length, arguments.micro_batch_size
    work = Workload(arguments.model, arguments.data, "unpacked", *size, arguments.adapter)
    if len(arguments.sweep) < 2 or arguments.largest_first:
        return replace(work, micro_batch_size=max(arguments.sweep)) if arguments.sweep else work
    alone = argparse.Namespace(**{**vars(arguments), "peers": [], "rounds": 1, "sweep": []})
    rows: list[Row] = []
    for size in arguments.sweep:
        sized = replace(work, micro_batch_size=size)
        group = Group(arguments.precision[0], arguments.ranks[0], arguments.stages[0], sized)
        rows += measure_group(alone, group, failures)
    best = max(rows, key=lambda row: row.tokens_per_second, default=None)
    return work if best is None else replace(work, micro_batch_size=best.micro_batch_size)


def check_losses(console: Console, rows: list[Row], group: Group) -> str | None:
    """Print how well the participants agree; return what is wrong where they do not."""
    if len({row.micro_batch_size for row in rows}) != 1:
        return None
    band = LOSS_BANDS.get((group.work.data, group.work.rows, group.precision), LOSS_BAND)
    spread = disagreement(rows)
    line = f"{group}: losses of all participants agree within {spread:.1e} (allowed {band:.0e})"
    console.print(line)
    return None if spread <= band else f"not so: {line}"


def write_results(path: Path, about: dict[str, str], rows: list[Row], failures: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {"machine": about, "command": sys.argv[1:], "failures": failures}
    claims = claims_of(rows, on_gpu=on_cuda())
    results |= {"participants": [row.as_dict() for row in rows], "ratios": ratios(rows)}
    results["claims"] = [vars(claim) for claim in claims]
    path.write_text(json.dumps(results, indent=1) + "\n")


def measure_group(arguments: argparse.Namespace, group: Group, failures: Failures) -> list[Row]:
    """All participants of a group, in turn or one at a time. One that fails is told of and left out."""
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        tasks = list(group_tasks(arguments, group, Path(folder)))
        if not arguments.one_at_a_time:
            return _measure(arguments, group, tasks, failures)
        return [row for task in tasks for row in _measure(arguments, group, [task], failures)]


def _measure(arguments: argparse.Namespace, group: Group, tasks: list[Task], failures: Failures) -> list[Row]:
    alive: list[Entrant] = []
    try:
        for task in tasks:
            alive.append(Entrant(Participant(task, arguments.logs), group.work))
            if not arguments.start_together:
                _warm_up(arguments, alive, alive[-1], failures)
        for entrant in list(alive) if arguments.start_together else []:
            _warm_up(arguments, alive, entrant, failures)
        for turn in range(arguments.rounds):
            for entrant in alive[:: 1 if turn % 2 == 0 else -1]:
                try:
                    entrant.participant.burst(arguments.steps)
                    _note_burst(arguments, entrant)
                except ParticipantError as error:
                    failures.add(entrant.participant.task.name, str(error))
                    alive.remove(entrant)
        return list(_finished(arguments, alive, failures))
    finally:
        for entrant in alive:
            entrant.participant.close()


def _warm_up(
    arguments: argparse.Namespace, alive: list[Entrant], entrant: Entrant, failures: Failures
) -> None:
    """Until the first burst; at the next smaller micro batch of the sweep where memory did not suffice."""
    while True:
        try:
            return entrant.participant.warm_up()
        except ParticipantError as error:
            failures.add(entrant.participant.task.name, str(error))
            smaller = [size for size in arguments.sweep if size < entrant.work.micro_batch_size]
            if "out of memory" not in str(error).lower() or not smaller:
                return alive.remove(entrant)
            entrant.work = replace(entrant.work, micro_batch_size=max(smaller))
            task = entrant.participant.task
            folder = task.folder.with_name(f"{task.folder.name}-{max(smaller)}")
            write_recipe(
                task.recipe, work_of(task.peer, entrant.work), task.precision, plain=task.json is None
            )
            entrant.participant = Participant(replace(task, folder=folder), arguments.logs)


def _tokens(arguments: argparse.Namespace, entrant: Entrant) -> int:
    work = entrant.work
    ranks = entrant.participant.task.world_size
    return work.sequence_length * work.micro_batch_size * ranks * arguments.steps


def _note_burst(arguments: argparse.Namespace, entrant: Entrant) -> None:
    each = entrant.participant
    rate = _tokens(arguments, entrant) / each.round_seconds[-1]
    record = {"burst": each.task.name, "precision": each.task.precision, "ranks": each.task.world_size}
    record |= {**vars(entrant.work), "tokens_per_second": rate, **each.burst_clocks[-1]}
    append_line(arguments.append, record)


def _finished(arguments: argparse.Namespace, alive: Iterable[Entrant], failures: Failures) -> Iterator[Row]:
    for entrant in alive:
        each, work = entrant.participant, entrant.work
        task, tokens = each.task, _tokens(arguments, entrant)
        try:
            told = each.finish()
        except ParticipantError as error:
            failures.add(task.name, str(error))
            continue
        clocks = [found for found in each.burst_clocks if found]
        row = Row(
            name=task.name,
            peer=task.peer,
            split=task.split,
            precision=task.precision,
            ranks=task.world_size,
            round_tokens_per_second=[tokens / seconds for seconds in each.round_seconds],
            first_step_seconds=each.first_step_seconds,
            sm_mhz=median(found["sm_mhz"] for found in clocks) if clocks else None,
            watts=median(found["watts"] for found in clocks) if clocks else None,
            notes=each.notes(),
            **{key: value for key, value in vars(work).items() if key not in ("data", "fp8")},
            **told,
        )
        append_line(arguments.append, row.as_dict())
        print(
            f"{row.name}, {row.rows}: {row.tokens_per_second:,.0f} tokens/s",
            *row.notes,
            sep="\n  ",
            flush=True,
        )
        yield row


def group_tasks(arguments: argparse.Namespace, group: Group, folder: Path) -> Iterator[Task]:
    """The participants of a group, ours first."""
    files = files_of(arguments.peers, group.split, group.ranks, group.work.adapter)
    for peer, names in files.items():
        for name in names:
            recipe = folder / f"{peer}-{name}.yaml"
            write_recipe(recipe, work_of(peer, group.work), group.precision, plain=name is None)
            yield Task(
                peer,
                group.split,
                group.precision,
                group.ranks,
                arguments.warmup,
                folder / f"{peer}-{name}",
                recipe,
                None if name is None else REPOSITORY / "ds_configs" / name,
                loops=LOOPS.get(peer, "participants"),
                label=str(name) if len(names) > 1 else "",
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="default")
    add("--data", choices=["stdlib", "random"], help="default: stdlib for the default model")
    add("--rows", choices=["unpacked", "packed"], nargs="+", default=["unpacked"])
    add("--sequence-length", type=int, help="default: the model's own")
    add("--sweep", type=int, nargs="+", default=[], metavar="SIZE", help="micro batches: ours picks one")
    add("--largest-first", action="store_true", help="of the sweep, the largest that memory holds")
    add("--ranks", type=int, nargs="+", default=[1, 2])
    add("--stages", nargs="+", default=["plain", "2"], help="plain, a ZeRO stage, or a file of ds_configs/")
    add("--precision", choices=["fp32", "bf16"], nargs="+", default=["bf16"])
    add("--adapter", action="store_true", help="LoRA of rank 32 on all linear layers; the peers by peft")
    add("--peers", choices=choices(), nargs="*", help="beside ours; default: all but " + on_request())
    add("--steps", type=int, default=5, help="timed optimizer steps a burst")
    add("--rounds", type=int, default=5, help="bursts of each participant")
    add("--warmup", type=int, default=5, help="untimed steps before the first burst, at least 2")
    add("--start-together", action="store_true", help="faster on many cores; blurs `first step`")
    add("--one-at-a-time", action="store_true", help="where memory does not hold all participants of a group")
    add("--minutes", type=float, default=float("inf"), help="start no further group after this")
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
    if others := sorted(set(arguments.peers or []) - set(choices(arguments.adapter))):
        parser.error(
            f"--peers {' '.join(others)}: not {'with' if arguments.adapter else 'without'} --adapter"
        )
    leave_out(arguments.peers or [])
    if arguments.data is None:
        arguments.data = "stdlib" if arguments.model == "default" else "random"
    size = MODELS[arguments.model]
    arguments.sequence_length = arguments.sequence_length or size["sequence_length"]
    arguments.micro_batch_size = size["micro_batch_size"]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
