"""One run under `deepspeed --num_gpus 2 launch/train.py`, launched as often as it is killed.

Part of checkpoint_kills.py: who is killed and when, how the rest ends, and what then lies on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipeline.checkpoint.catalog import newest_good, steps_in
from pipeline.checkpoint.reader import verify

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.launch import command, environment, run_directories, write_recipe  # noqa: E402

STARTED = " parameters; "  # in the line that rank 0 logs right before the first step
START_PATIENCE = 900.0  # seconds to that line, and to the end of a run
MODEL = {"num_layers": 3, "num_heads": 4, "hidden_size": 192, "intermediate_size": 768}


@dataclass
class Kill:
    """One kill, and what was found after it."""

    run: int
    whom: str
    moment: str
    """While starting, at any time of training, or once a save was seen to be under way."""
    seconds_in: float
    """Since the launch."""
    during_save: bool
    """A partial checkpoint of this launch lay there right before the kill."""
    seconds_to_end: float = 0.0
    """Until no process of the launch was left."""
    ended_by_itself: bool = True
    last_step: int = 0
    newest_step: int = 0
    """The step of the newest checkpoint, 0: none; with it, how many steps are lost."""
    problems: list[str] = field(default_factory=list)


class Launch:
    """All processes of one command, in a session of its own, by which they are known."""

    def __init__(self, arguments: list[str], log: Path):
        self._log = log
        self.began = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command(*arguments, ranks=2),
                env=environment(),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def has_started(self) -> bool:
        return STARTED in self._log.read_text(errors="replace")

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def members(self) -> list[psutil.Process]:
        """Every process of it that runs, also those that lost their parent."""
        self.process.poll()  # else the launcher stays a zombie
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and os.getsid(process.pid) == self.process.pid:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def kill(self, whom: str) -> bool:
        """SIGKILL to `rank 0`, `rank 1`, `launch.py`, `deepspeed` or `all`; whether it was there."""
        members = self.members()
        chosen = [process for process in members if whom in ("all", _role(process))]
        for process in chosen:
            process.kill()
        return bool(chosen)

    def wait(self, limit: float) -> tuple[float, bool]:
        """Seconds until no process is left, and whether that was by itself."""
        began = time.monotonic()
        while members := self.members():
            if time.monotonic() - began > limit:
                for process in members:
                    process.kill()
                return time.monotonic() - began, False
            time.sleep(0.2)
        return time.monotonic() - began, True


def _role(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    for word in words:
        if word.startswith("--local_rank="):
            return f"rank {word.partition('=')[2]}"
    if "deepspeed.launcher.launch" in words:
        return "launch.py"
    return "deepspeed" if any(Path(word).name == "deepspeed" for word in words[:2]) else ""


class Victim:
    """One run, over all its launches."""

    def __init__(self, number: int, folder: Path, arguments: argparse.Namespace):
        self.number, self.folder, self.arguments = number, folder, arguments
        self.chance = random.Random(1000 * arguments.seed + number)
        folder.mkdir()
        self.launches = 0
        self._left: set[tuple[str, int]] = set()
        self.start_seconds = 15.0  # of the last launch
        self.recipe = write_recipe(
            folder,
            max_steps=arguments.steps,
            model={"kind": "causal_lm", "architecture": "llama", **MODEL},
            optimizer={"learning_rate": 1e-3},
            checkpoint={"every": arguments.every},
            eval={"every": 20, "max_samples": 8},
            log={"every": 1},
        )

    def launch(self) -> Launch:
        self.launches += 1
        self._left = self.partial()
        split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
        texts = f"data.paths=[{self.folder.parent / 'run-0' / 'texts'}]"  # the same text for all
        log = self.folder / f"launch-{self.launches:03d}.log"
        return Launch(["--config", str(self.recipe), texts, *split], log)

    @property
    def directory(self) -> Path | None:
        found = run_directories(self.folder)
        return found[0] if found else None

    def partial(self) -> set[tuple[str, int]]:
        """The partial checkpoints that lie there, each with the time of its last change."""
        if self.directory is None:
            return set()
        found = set()
        for path in (self.directory / "checkpoints").glob("step-*.partial"):
            with suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_ctime_ns))
        return found

    @property
    def is_saving(self) -> bool:
        """Whether there is one that no earlier launch left."""
        return bool(self.partial() - self._left)

    @property
    def is_finished(self) -> bool:
        return self.directory is not None and (self.directory / "summary.json").exists()

    def kill(self, launch: Launch) -> Kill | None:
        """Waits for a random moment and kills someone; None: the launch ended before."""
        moment: str = self.chance.choices(["start", "any", "save"], [0.1, 0.45, 0.45])[0]
        whom = self.chance.choice(["rank", "all", "launcher"])
        whom = {
            "rank": f"rank {self.chance.randrange(2)}",
            "launcher": self.chance.choice(["launch.py", "deepspeed"]),
        }.get(whom, whom)
        if moment == "start":
            delay = self.chance.uniform(0.0, self.start_seconds)
            while launch.seconds < delay and launch.process.poll() is None:
                time.sleep(0.01)
        else:
            while not launch.has_started:
                if launch.process.poll() is not None or launch.seconds > START_PATIENCE:
                    return None
                time.sleep(0.1)
            self.start_seconds = launch.seconds
            _sleep(self.chance.uniform(0.0, self.arguments.window), launch)
            while moment == "save" and not self.is_saving and launch.process.poll() is None:
                time.sleep(0.005)
            if moment == "save":
                _sleep(self.chance.uniform(0.0, 0.1), launch)
        during_save = self.is_saving
        if launch.process.poll() is not None or self.is_finished or not launch.kill(whom):
            return None
        return Kill(self.number, whom, moment, launch.seconds, during_save)

    def patience(self, kill: Kill | None) -> float:
        """Seconds in which the rest of a launch has to end."""
        # A rank knows its launcher only if that still lives when the rank starts: else it finishes the run.
        unknown = kill is None or (kill.moment == "start" and kill.whom in ("launch.py", "deepspeed"))
        return START_PATIENCE if unknown else float(self.arguments.patience)

    def examine(self, kill: Kill, known: int) -> None:
        """Looks at what lies on the disk once nothing runs any more.

        Args:
            known: The step of the newest checkpoint that was there before.
        """
        if self.directory is None:
            return
        folder = self.directory / "checkpoints"
        newest, passed_over = newest_good(folder)
        kill.problems += passed_over
        for path in steps_in(folder).values():  # those that are older too
            kill.problems += [f"{path.name}: {damage}" for damage in verify(path)]
        kill.newest_step = newest.global_step if newest is not None else 0
        if kill.newest_step < known:
            kill.problems.append(f"the newest checkpoint was of step {known}, now it is {kill.newest_step}")
        metrics = self.directory / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text().splitlines()
            kill.last_step = max((_step(line) for line in lines), default=0)
        # One interval since the last save, and one for a save that was still under way.
        if kill.last_step - kill.newest_step > 2 * self.arguments.every:
            kill.problems.append(f"{kill.last_step - kill.newest_step} steps are lost")


def _sleep(seconds: float, launch: Launch) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and launch.process.poll() is None:
        time.sleep(0.01)


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return 0  # torn by the kill
