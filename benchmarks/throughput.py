"""Whole-loop tokens per second, side by side: python benchmarks/throughput.py --ranks 1 2 --stages plain 2

The pipeline's loop, a bare PyTorch loop, a bare deepspeed.initialize loop and the Hugging Face Trainer, as
their users write them: same model, tokens, order, batch, numbers, precision, threads, JSON. Our lead is the
blockwise cross entropy: see the row `pytorch+our-loss`. All step in turn, in short bursts: drift hits all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from processes import Participant, ParticipantError, Task
from report import Row, disagreement, machine, print_table, ratios
from rich.console import Console
from workload import JSON_FILES, MODELS, REPOSITORY, write_recipe

PLAIN = ["ours", "pytorch", "pytorch+our-loss", "trainer"]
DEEPSPEED = ["ours", "deepspeed", "trainer"]
SPLITS = ["plain", "0", "1", "2", "3"]
# Largest relative difference of the final losses among participants. With --data stdlib the peers leave out
# the last target of each sequence (transformers shifts labels inside): not quite the same problem.
LOSS_BANDS = {("random", "fp32"): 1e-4, ("random", "bf16"): 1e-2}
LOSS_BAND = 2e-2


def main() -> int:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 130)
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[Row] = []
    failures: list[str] = []
    for precision, ranks in itertools.product(arguments.precision, arguments.ranks):
        part: list[Row] = []
        for split in arguments.stages:
            if time.monotonic() > deadline:
                console.print(f"not measured, out of time: {split}, {precision}, {ranks} ranks")
                continue
            with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
                part += measure_group(arguments, precision, ranks, split, Path(folder), failures)
        if part:
            print_table(console, part, f"{arguments.model}, {precision}, {ranks} rank{'s' * (ranks > 1)}")
            failures += check_losses(console, part, LOSS_BANDS.get((arguments.data, precision), LOSS_BAND))
        rows += part
        if arguments.output is not None:
            write_results(arguments.output, about, rows, failures)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def check_losses(console: Console, rows: list[Row], band: float) -> list[str]:
    """Says how well the participants agree; a failure where they do not."""
    spread = disagreement(rows)
    line = f"losses of all participants agree within {spread:.1e} (allowed {band:.0e})"
    console.print(line + "\n")
    return [] if spread <= band else [f"not so: {line}"]


def write_results(path: Path, about: dict[str, str], rows: list[Row], failures: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {"machine": about, "command": sys.argv[1:], "failures": failures}
    results |= {"participants": [row.as_dict() for row in rows], "ratios": ratios(rows)}
    path.write_text(json.dumps(results, indent=1) + "\n")


def measure_group(
    arguments: argparse.Namespace, precision: str, ranks: int, split: str, folder: Path, failures: list[str]
) -> list[Row]:
    """One split: all its participants, in turn. One that fails is told of and left out."""
    alive: list[Participant] = []
    try:
        for task in group_tasks(arguments, precision, ranks, split, folder):
            alive.append(Participant(task))
            if not arguments.start_together:
                _keep(alive, alive[-1:], Participant.warm_up, failures)
        if arguments.start_together:
            _keep(alive, list(alive), Participant.warm_up, failures)
        for turn in range(arguments.rounds):
            order = alive[:: 1 if turn % 2 == 0 else -1]
            _keep(alive, order, lambda each: each.burst(arguments.steps), failures)
        rows: list[Row] = []
        _keep(alive, list(alive), lambda each: rows.append(_row(arguments, split, each)), failures)
        return rows
    finally:
        for participant in alive:
            participant.close()


def _keep(
    alive: list[Participant],
    chosen: list[Participant],
    action: Callable[[Participant], None],
    failures: list[str],
) -> None:
    for participant in chosen:
        try:
            action(participant)
        except ParticipantError as error:
            failures.append(str(error))
            alive.remove(participant)


def group_tasks(
    arguments: argparse.Namespace, precision: str, ranks: int, split: str, folder: Path
) -> list[Task]:
    """The participants of a split. At several ranks plain `ours` is DeepSpeed's stage 0, against DDP."""
    tasks = []
    for peer in PLAIN if split == "plain" else DEEPSPEED:
        if arguments.only and peer not in arguments.only:
            continue
        stage = 0 if split == "plain" and peer == "ours" and ranks > 1 else split
        json_file = None if stage == "plain" else REPOSITORY / "ds_configs" / JSON_FILES[int(stage)]
        recipe = folder / f"{peer}.yaml"
        write_recipe(recipe, arguments.model, arguments.data, precision, plain=json_file is None)
        home = folder / peer
        tasks.append(Task(peer, split, precision, ranks, arguments.warmup, home, recipe, json_file))
    return tasks


def _row(arguments: argparse.Namespace, split: str, participant: Participant) -> Row:
    task = participant.task
    size = MODELS[arguments.model]
    tokens = size["sequence_length"] * size["micro_batch_size"] * task.world_size * arguments.steps
    return Row(
        name=task.name,
        peer=task.peer,
        split=split,
        precision=task.precision,
        ranks=task.world_size,
        round_tokens_per_second=[tokens / seconds for seconds in participant.round_seconds],
        first_step_seconds=participant.first_step_seconds,
        **participant.finish(),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="default")
    add("--data", choices=["stdlib", "random"], help="default: stdlib for the default model")
    add("--ranks", type=int, nargs="+", default=[1, 2])
    add("--stages", choices=SPLITS, nargs="+", default=["plain", "2"])
    add("--precision", choices=["fp32", "bf16"], nargs="+", default=["bf16"])
    add("--only", choices=sorted({*PLAIN, *DEEPSPEED}), nargs="+")
    add("--steps", type=int, default=5, help="timed optimizer steps a burst")
    add("--rounds", type=int, default=5, help="bursts of each participant")
    add("--warmup", type=int, default=5, help="untimed steps before the first burst, at least 2")
    add("--start-together", action="store_true", help="faster on many cores; blurs `first step`")
    add("--minutes", type=float, default=float("inf"), help="start no further group after this")
    add("--output", type=Path, help="JSON file of all numbers")
    arguments = parser.parse_args()
    if arguments.warmup < 2:
        parser.error("--warmup: at least 2")
    if arguments.data is None:
        arguments.data = "stdlib" if arguments.model == "default" else "random"
    return arguments


if __name__ == "__main__":
    sys.exit(main())
