"""Five hundred faults while a checkpoint is saved, on two ranks: python benchmarks/checkpoint_faults.py

Ours, and DeepSpeed's `engine.save_checkpoint` as it comes: steps 2 and 3 are saved while step 1 lies there,
and at some write, fsync, rename, ... of one rank something happens. Then what is said to be the newest
checkpoint must load, and be what was saved. Needs a C compiler. The exit code is 1 if ours ever fails.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import machine
from rich.console import Console
from rich.table import Table
from write_faults import KINDS, NO_FAULT, WORLD_SIZE, Ended, Fault, build, run_ranks

PRELOAD = "LD_PRELOAD"
OURS, THEIRS = "ours", "save_checkpoint"
FIRST = 1  # the step that is there before


@dataclass(frozen=True)
class Plan:
    """One trial: who saves, how, and what happens to it."""

    participant: str
    """Key of participants()."""
    fault: Fault


@dataclass(frozen=True)
class Result:
    """What came of it."""

    participant: str
    kind: str
    rank: int
    at: int
    call: str
    path: str
    went_on: bool
    """Every rank came to its end."""
    hung: bool
    seconds: float
    newest: int | None
    """The step that loads; None: what is said to be the newest does not load."""
    problem: str | None


def participants() -> dict[str, Any]:
    """By name. Imported here: after this, ranks are forks that have everything."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    from fault_participants import DeepSpeed, Store

    return {
        f"{OURS}, in the background": Store(wait=False, there=(FIRST,)),
        f"{OURS}, waited for": Store(wait=True, there=(FIRST,)),
        # The run went on from step 1, and repeats step 2.
        f"{OURS}, a step repeated": Store(wait=True, there=(FIRST, 2)),
        THEIRS: DeepSpeed(),
    }


def logged(scratch: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-800:] for path in sorted(scratch.glob("rank-*.log")))


class Bench:
    """Makes trials. Each is a handful of forks of the process that it is called in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.participants = participants()

    def prepare(self, name: str) -> tuple[str, ...]:
        """Saves what is there before, tries the participant without a fault; its calls, by rank.

        Raises:
            RuntimeError: it fails without a fault.
        """
        start = self._start(name)
        start.mkdir(parents=True)
        participant = self.participants[name]
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:

            def work(rank: int, _: object) -> None:
                participant.prepare(rank, start)
                Path(scratch, f"imported-{rank}").write_text("\n".join(sys.modules))

            ended = run_ranks(work, start, Path(scratch), limit=300.0)
            if any(ended.codes):
                raise RuntimeError(f"{name}: {ended.codes}\n{logged(Path(scratch))}")
            # What the ranks imported on the way is imported here: each trial's ranks are forks.
            for module in (Path(scratch) / "imported-0").read_text().splitlines():
                if module not in sys.modules and not module.startswith("__"):
                    with suppress(Exception):
                        importlib.import_module(module)
        result, ended = self.trial(Plan(name, NO_FAULT))
        if not result.went_on or result.newest != 3:
            raise RuntimeError(f"{name} without a fault: {result}")
        return ended.calls

    def trial(self, plan: Plan) -> tuple[Result, Ended]:
        """One save with a fault, and a look at what it left."""
        participant = self.participants[plan.participant]
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            folder = Path(scratch) / "checkpoints"
            shutil.copytree(self._start(plan.participant), folder, symlinks=True)
            logs = [Path(scratch) / name for name in ("save", "load")]
            for log in logs:
                log.mkdir()
            ended = run_ranks(
                lambda rank, arm: participant.save(rank, folder, arm), folder, logs[0], plan.fault
            )
            answer = Path(scratch) / "answer"
            loading = run_ranks(lambda rank, _: participant.load(rank, folder, answer), folder, logs[1])
            answers = {path.read_text() for path in Path(scratch).glob("answer-*")}
            newest = problem = None
            if any(loading.codes) or len(answers) != 1:
                said = logged(logs[1]).replace(scratch, "").strip().splitlines()
                problem = said[-1] if said else "died"
            else:
                newest = int(answers.pop())
            went_on = not ended.hung and not any(ended.codes)
            if not went_on and plan.fault is NO_FAULT:
                print(logged(logs[0]), file=sys.stderr)
        result = Result(
            plan.participant,
            plan.fault.kind,
            plan.fault.rank,
            plan.fault.at,
            *ended.hit,
            went_on=went_on,
            hung=ended.hung,
            seconds=round(ended.seconds, 2),
            newest=newest,
            problem=problem,
        )
        return result, ended

    def _start(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-")


def plans(calls: dict[str, tuple[str, ...]], count: int) -> list[Plan]:
    """`count` trials: kinds, ranks, participants in turn, each spread evenly over the calls it can be at."""
    groups = list(itertools.product(KINDS, range(WORLD_SIZE), calls))
    share = Counter(index % len(groups) for index in range(count))
    made = []
    for index, (kind, rank, name) in enumerate(groups):
        places = [at for at, call in enumerate(calls[name][rank], 1) if call in KINDS[kind].calls]
        made += [
            Plan(name, Fault(kind, rank, places[(2 * k + 1) * len(places) // (2 * share[index])]))
            for k in range(share[index])
        ]
    return made


def tabulate(results: list[Result], who: str) -> list[dict[str, Any]]:
    """A row a kind of fault."""
    rows = []
    for kind in (*KINDS, "all"):
        of = [r for r in results if r.participant.startswith(who) and kind in (r.kind, "all") and r.call]
        rows.append(
            {
                "fault": kind,
                "faults": len(of),
                "whole": sum(r.newest is not None for r in of),
                "incomplete": sum(r.newest is None for r in of),
                "hung": sum(r.hung for r in of),
                "run_went_on": sum(r.went_on for r in of),
                "longest_seconds": max((r.seconds for r in of), default=0.0),
            }
        )
    return rows


def print_table(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    heads = ("fault", "faults", "the newest is whole", "it is not", "hung", "the run went on", "longest s")
    for head in heads:
        table.add_column(head, justify="left" if head == "fault" else "right")
    for row in rows:
        if row["fault"] == "all":
            table.add_section()
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def measure(arguments: argparse.Namespace, folder: Path) -> list[Result]:
    import torch

    torch.set_num_threads(1)  # a fork finds no pool of threads
    bench = Bench(folder)
    wanted = {OURS: arguments.faults, THEIRS: arguments.peer_faults}
    calls = {name: bench.prepare(name) for name in bench.participants if wanted[name.partition(",")[0]]}
    for name, by_rank in calls.items():
        print(f"{name}: {' and '.join(str(len(c)) for c in by_rank)} calls by rank", flush=True)
    todo = []
    for who, count in wanted.items():
        todo += plans({name: each for name, each in calls.items() if name.startswith(who)}, count)
    results: list[Result] = []
    # Workers are forked before there is a thread, and fork each trial's ranks themselves.
    with multiprocessing.get_context("fork").Pool(arguments.jobs, _keep, (bench,)) as pool:
        for result in pool.imap_unordered(_trial, todo):
            results.append(result)
            if (result.newest is None and result.participant != THEIRS) or result.hung:
                print(result, flush=True)
            if len(results) % 50 == 0:
                print(f"{len(results)} of {len(todo)}", flush=True)
    return results


def _keep(bench: Bench) -> None:
    _trial.bench = bench  # type: ignore[attr-defined]


def _trial(plan: Plan) -> Result:
    try:
        return _trial.bench.trial(plan)[0]  # type: ignore[attr-defined,no-any-return]
    except Exception:  # of a pool's process: it arrives with the plan that led to it
        raise RuntimeError(f"{plan}: {traceback.format_exc()}") from None


def examples(results: list[Result]) -> Iterator[str]:
    """What the newest checkpoint's loading said, and how often."""
    said = Counter((r.participant, (r.problem or "")[:120]) for r in results if r.newest is None)
    for (participant, problem), count in said.most_common(8):
        yield f"{count:4d} x {participant}: {problem}"


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="checkpoint-faults-", dir=arguments.folder) as name:
        folder = Path(name)
        if "write_faults" not in os.environ.get(PRELOAD, ""):
            return _start_again(folder)
        results = measure(arguments, folder)
    console = Console(width=None if sys.stdout.isatty() else 130)
    tables = {who: tabulate(results, who) for who in (OURS, THEIRS)}
    print_table(console, "ours", tables[OURS])
    print_table(console, "deepspeed engine.save_checkpoint, ZeRO 1", tables[THEIRS])
    for line in examples(results):
        console.print(line)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine(), "command": sys.argv[1:], "tables": tables}
        text = json.dumps(found | {"trials": ["TRIALS"]}, indent=1)
        trials = ",\n  ".join(json.dumps(list(asdict(result).values())) for result in results)
        text = text.replace('"TRIALS"', f"{json.dumps(list(Result.__annotations__))},\n  {trials}")
        arguments.output.write_text(text + "\n")
    total = tables[OURS][-1]
    missed = len([r for r in results if r.participant != THEIRS and not r.call])
    if missed:
        print(f"{missed} faults of ours never happened", file=sys.stderr)
    return 1 if total["incomplete"] or total["hung"] or missed else 0


def _start_again(folder: Path) -> int:
    """This program with the library preloaded."""
    try:
        library = build(folder)
    except OSError as error:
        print(f"error: the faults are written in C, and it cannot be compiled: {error}", file=sys.stderr)
        return 2
    code = os.spawnvpe(
        os.P_WAIT, sys.executable, [sys.executable, *sys.argv], os.environ | {PRELOAD: str(library)}
    )
    return code


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--faults", type=int, default=500, help="in our saves")
    add("--peer-faults", type=int, default=150, help="in DeepSpeed's")
    add("--jobs", type=int, default=2, help="trials at the same time")
    add("--folder", type=Path, help="where checkpoints lie meanwhile")
    add("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
