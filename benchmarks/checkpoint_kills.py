"""A run killed at a hundred random moments and started again each time: python benchmarks/checkpoint_kills.py

SIGKILL to a rank, to every process, or to one of the launcher's two; what remains has to end by itself. Then
the newest checkpoint must verify, the same command is given again, and in the end the record of the run and
its last checkpoint are those of a run that nobody touched, bit for bit. The exit code says whether they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint_victims import START_PATIENCE, Kill, Victim
from report import machine
from support.launch import numbers, run_directories

from pipeline.checkpoint.catalog import newest_good


class Record:
    """Counts and prints the kills, and keeps the results file up to date: a hundred of them take an hour."""

    def __init__(self, arguments: argparse.Namespace):
        self._output: Path | None = arguments.output
        self._wanted: int = arguments.kills
        self._lock = threading.Lock()
        self._kills: list[Kill] = []
        self._problems: list[str] = []
        self._equal = 0

    @property
    def wants_more(self) -> bool:
        return len(self._kills) < self._wanted and len(self._problems) < 5

    def add(self, kill: Kill) -> None:
        save = ", in a save" if kill.during_save else ""
        with self._lock:
            self._kills.append(kill)
            print(
                f"{len(self._kills):3d}  run {kill.run}  {kill.whom:9s} {kill.moment:5s} after "
                f"{kill.seconds_in:5.1f} s{save:11s}  ended in {kill.seconds_to_end:5.1f} s "
                f" step {kill.last_step}, newest {kill.newest_step}  {'; '.join(kill.problems)}",
                flush=True,
            )
            self.write()

    def conclude(self, victim: Victim, problems: list[str]) -> None:
        with self._lock:
            self._problems += problems
            self._equal += not problems
            said = "; ".join(problems) or "equals the unbroken one"
            print(f"run {victim.number}, {victim.launches} launches: {said}", flush=True)

    def write(self) -> dict[str, Any]:
        found = summary(self._kills, self._problems) | {"runs_equal_to_the_unbroken_one": self._equal}
        if self._output is not None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            about = {"machine": machine(), "command": sys.argv[1:], "summary": found}
            kills = [json.dumps(asdict(kill)) for kill in self._kills]  # a line each
            text = json.dumps(about | {"log": ["KILLS"]}, indent=1)
            self._output.write_text(text.replace('"KILLS"', ",\n  ".join(kills)) + "\n")
        return found


def kill_until_finished(victim: Victim, record: Record) -> list[str]:
    """Kills and starts again until the run is finished, or there have been enough; what was wrong."""
    problems: list[str] = []
    known = 0
    while not victim.is_finished:
        launch = victim.launch()
        try:
            kill = victim.kill(launch) if record.wants_more else None
            seconds, by_itself = launch.wait(victim.patience(kill))
        finally:
            launch.kill("all")
        where = f"run {victim.number}, launch {victim.launches}"
        if known and "going on with" in launch.output and f"step-{known:08d}" not in launch.output:
            problems.append(f"{where}: not gone on from step {known}")
        if kill is not None:
            kill.seconds_to_end, kill.ended_by_itself = seconds, by_itself
            if not by_itself:
                kill.problems.append(f"processes were left {seconds:.0f} s after the kill")
            victim.examine(kill, known)
            known = kill.newest_step
            record.add(kill)
        elif not victim.is_finished:
            problems.append(f"{where}: {launch.output[-2000:]}")
            break
    return problems


def compare(victim: Victim, whole: Victim) -> list[str]:
    """What differs from the unbroken run."""
    ours, theirs = victim.directory, whole.directory
    if ours is None or theirs is None or not (victim.is_finished and whole.is_finished):
        return [f"run {victim.number} did not finish"]
    problems = []
    if len(run_directories(victim.folder)) > 1:
        problems.append(f"run {victim.number}: the same command started a second run")
    if numbers(ours) != numbers(theirs):
        problems.append(f"run {victim.number}: metrics.jsonl differs")
    if last_checksums(ours) != last_checksums(theirs):
        problems.append(f"run {victim.number}: the last checkpoint differs")
    return problems


def last_checksums(run: Path) -> list[str]:
    """Of the files of the last checkpoint: weights and moments."""
    newest, _ = newest_good(run / "checkpoints")
    return [] if newest is None else [file.xxh3_128 for file in newest.files]


def summary(log: list[Kill], problems: list[str]) -> dict[str, Any]:
    ends = sorted(kill.seconds_to_end for kill in log)
    lost = Counter(kill.last_step - kill.newest_step for kill in log if kill.moment != "start")
    return {
        "kills": len(log),
        "of": dict(sorted(Counter(kill.whom for kill in log).items())),
        "during_a_save": sum(kill.during_save for kill in log),
        "at": dict(Counter(kill.moment for kill in log)),
        "newest_checkpoint_verified": sum(not kill.problems for kill in log),
        "steps_lost": {str(steps): count for steps, count in sorted(lost.items())},
        "seconds_until_all_had_ended": {
            "median": round(ends[len(ends) // 2], 2) if ends else None,
            "longest": round(ends[-1], 2) if ends else None,
        },
        "problems": problems + [problem for kill in log for problem in kill.problems],
    }


def main() -> int:
    arguments = parse_arguments()
    record = Record(arguments)
    with tempfile.TemporaryDirectory(prefix="checkpoint-kills-", dir=arguments.folder) as name:
        whole = Victim(0, Path(name) / "run-0", arguments)
        launch = whole.launch()
        launch.wait(START_PATIENCE)
        if not whole.is_finished:
            print(f"error: the unbroken run does not finish:\n{launch.output[-4000:]}", file=sys.stderr)
            return 2
        numbers_of_runs = itertools.count(1)

        def lead() -> None:
            while record.wants_more:
                number = next(numbers_of_runs)
                victim = Victim(number, Path(name) / f"run-{number}", arguments)
                problems = kill_until_finished(victim, record)
                record.conclude(victim, problems + compare(victim, whole))

        with ThreadPoolExecutor(arguments.jobs) as threads:
            for future in [threads.submit(lead) for _ in range(arguments.jobs)]:
                future.result()
        found = record.write()
    print(json.dumps(found, indent=1))
    return 1 if found["problems"] or not found["runs_equal_to_the_unbroken_one"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--kills", type=int, default=100)
    add("--steps", type=int, default=150, help="of a run; as many runs as it takes")
    add("--every", type=int, default=2, help="steps between saves")
    add("--window", type=float, default=4.0, help="seconds of training from which the moment is drawn")
    add("--patience", type=float, default=90.0, help="seconds in which what remains has to end by itself")
    add("--jobs", type=int, default=1, help="runs at the same time")
    add("--seed", type=int, default=0)
    add("--folder", type=Path, help="where the runs lie meanwhile")
    add("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
