"""What a checkpoint costs, side by side: python benchmarks/checkpoint.py [--quick]

The pipeline's store against torch.save, DeepSpeed's save_checkpoint and the Hugging Face Trainer: same model,
same steps between saves, in turn, so that drift hits all. Then our durable save against the disk's own speed.
The exit code says whether every claim held.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from processes import Participant, ParticipantError, Task, on_cuda
from report import Claim, machine, print_claims
from rich.console import Console
from rich.table import Table
from workload import JSON_FILES, MODELS, REPOSITORY, Workload, write_recipe

PEERS = {"plain": ["ours", "torch.save", "trainer"]}
DEEPSPEED = ["ours", "deepspeed", "trainer"]
SHORTER_STALL = 5.0
OF_THE_DISK = 0.9
OF_CHECKSUMS = 0.02


@dataclass(frozen=True)
class Saver:
    """One participant: the rounds of a number, the slowest rank's. Seconds."""

    name: str
    peer: str
    split: str
    ranks: int
    first_stall: float
    """Of the first save of the process: buffers are made, libraries loaded."""
    stall: list[float]
    """How long the loop stands still for the call."""
    total: list[float]
    """Until the checkpoint counts: published, or the call returned."""
    durable: list[float]
    """Until it is on the disk: peers are given an fsync of each file after their call."""
    lost: list[float]
    """The stall, and by how much the steps after it are slower than those before."""
    num_bytes: int
    quiet: list[float]
    """Ours: a save with no training beside, from the first byte to the rename."""
    checksums: list[float]
    """Ours: how long writing stood still for hashing in it."""
    disk: list[float]
    """Ours: plain write and fsync of as many bytes, in as many files and processes, before or after."""


def main() -> int:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 130)
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    savers: list[Saver] = []
    claims: list[Claim] = []
    failures: list[str] = []
    for group in arguments.groups:
        split, _, ranks = group.rpartition("-")
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as folder:
            part = measure_group(arguments, split, int(ranks), Path(folder), failures)
        savers += part
        claims += claims_of(group, part)
        print_savers(console, part, arguments)
    print_claims(console, claims)
    failures += [
        f"not reached: {claim.what}, {claim.group}: {claim.measured:.4g}, wanted {claim.wanted}"
        for claim in claims
        if not claim.holds and not arguments.quick
    ]
    if arguments.output is not None:
        results: dict[str, Any] = {"machine": about, "command": sys.argv[1:], "failures": failures}
        results |= {"savers": [asdict(each) for each in savers], "claims": [asdict(each) for each in claims]}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def measure_group(
    arguments: argparse.Namespace, split: str, ranks: int, folder: Path, failures: list[str]
) -> list[Saver]:
    """All participants of a split, in turn. One that fails ends the group and is told of."""
    alive: list[Participant] = []
    try:
        for peer in ["ours"] if arguments.alone else PEERS.get(split, DEEPSPEED):
            alive.append(Participant(_task(arguments, peer, split, ranks, folder)))
            if not arguments.quick:
                alive[-1].warm_up()
        for each in alive if arguments.quick else []:
            each.warm_up()
        for turn in range(arguments.rounds):
            for each in alive[:: 1 if turn % 2 == 0 else -1]:
                each.burst(arguments.steps)
        return [saver_of(each.task, arguments.steps, each.finish_all()) for each in alive]
    except ParticipantError as error:
        failures.append(str(error))
        return []
    finally:
        for each in alive:
            each.close()


def _task(arguments: argparse.Namespace, peer: str, split: str, ranks: int, folder: Path) -> Task:
    json_file = None if split == "plain" else REPOSITORY / "ds_configs" / JSON_FILES[split]
    recipe = folder / f"{peer}.yaml"
    steps, precision = arguments.steps, arguments.precision
    work = Workload.of(arguments.model)
    write_recipe(recipe, work, precision, plain=json_file is None, save_every=steps)
    # So many: a first save, which is not counted, and half a burst, so that the next are half-way in theirs.
    warmup = steps + steps // 2
    return Task(peer, split, precision, ranks, warmup, folder / peer, recipe, json_file, "savers")


def saver_of(task: Task, steps: int, diaries: list[dict[str, Any]]) -> Saver:
    """The numbers of a participant from what its ranks noted: of each save the slowest rank's."""

    def slowest(key: str, each: str) -> list[float]:
        by_save = zip(*(diary[key] for diary in diaries), strict=True)
        return [max(entry[each] for entry in entries) for entries in by_save]

    stall, total, sync = (slowest("saves", each) for each in ("stall", "total", "sync"))
    half, lost = steps // 2, []
    for number, save in enumerate(diaries[0]["saves"]):
        at, took = save["step"] + 1, diaries[0]["steps"]  # the save follows this step
        before, after = took[at - half : at], took[at : at + half]
        lost.append(stall[number] + sum(after) - len(after) * median(before))
    return Saver(
        name=task.name,
        peer=task.peer,
        split=task.split,
        ranks=task.world_size,
        first_stall=stall[0],
        stall=stall[1:],
        total=total[1:],
        durable=[a + b for a, b in zip(total, sync, strict=True)][1:],
        lost=lost[1:],
        num_bytes=diaries[0]["saves"][-1]["num_bytes"],
        quiet=slowest("durable", "save")[1:],
        checksums=slowest("durable", "checksums")[1:],
        disk=slowest("durable", "disk")[1:],
    )


def claims_of(group: str, savers: list[Saver]) -> list[Claim]:
    """What ours must be beside its peers, round by round; medians."""
    if not savers:
        return []
    ours, peers = savers[0], savers[1:]
    claims = []
    for peer in peers:
        # The end of the measurement may find a peer one save further.
        ratio = median(b / a for a, b in zip(ours.stall, peer.stall, strict=False))
        what = f"stall of {peer.name} over ours"
        claims.append(Claim(what, group, ratio, f">= {SHORTER_STALL:g}", ratio >= SHORTER_STALL))
    for peer in peers:
        ratio = ours.num_bytes / peer.num_bytes
        claims.append(Claim(f"bytes, ours over {peer.name}", group, ratio, "<= 1", ratio <= 1))
    rate = median(disk / quiet for disk, quiet in zip(ours.disk, ours.quiet, strict=True))
    what = "durable save: share of the disk's own rate"
    claims.append(Claim(what, group, rate, f">= {OF_THE_DISK}", rate >= OF_THE_DISK))
    share = median(a / b for a, b in zip(ours.checksums, ours.quiet, strict=True))
    what = "checksums: share of the save"
    claims.append(Claim(what, group, share, f"< {OF_CHECKSUMS}", share < OF_CHECKSUMS))
    return claims


def print_savers(console: Console, savers: list[Saver], arguments: argparse.Namespace) -> None:
    table = Table(title=f"one save of {arguments.model}, {arguments.precision}: medians, seconds")
    table.add_column("participant", no_wrap=True)
    columns = ["ranks", "stall  (min-max)", "first stall", "until it counts", "on the disk", "training lost"]
    for column in [*columns, "GB"]:
        table.add_column(column, justify="right", no_wrap=True)
    for saver in savers:
        table.add_row(
            saver.name,
            str(saver.ranks),
            f"{median(saver.stall):.3f}  ({min(saver.stall):.3f}-{max(saver.stall):.3f})",
            f"{saver.first_stall:.2f}",
            f"{median(saver.total):.2f}",
            f"{median(saver.durable):.2f}",
            f"{median(saver.lost):.2f}",
            f"{saver.num_bytes / 1e9:.4f}",
        )
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-70m")
    add("--groups", nargs="+", default=["plain-1", "2-1", "2-2"], help="split-ranks: `plain` or a ZeRO stage")
    on_gpu = on_cuda()  # many CPUs have no instructions for bf16
    add("--precision", choices=["fp32", "bf16"], default="bf16" if on_gpu else "fp32")
    add("--steps", type=int, default=16, help="a burst, with one save half-way; even")
    add("--rounds", type=int, default=5, help="bursts of each participant")
    add("--alone", action="store_true", help="no peers: the durable save beside the disk, and its checksums")
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
