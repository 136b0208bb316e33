"""The command killed, interrupted, out of room, and not alone: it ends with the bytes of a quiet run."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from conftest_prepared import stdlib_texts

FILES, CHARACTERS = 8, 2_800_000
KILLS = 20
PATIENCE = 120.0  # seconds; a quiet run takes about ten
MODEL = {"kind": "causal_lm", "architecture": "gpt2", "num_layers": 1, "num_heads": 2, "hidden_size": 32}


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    said: list[str]

    @property
    def tokenised(self) -> int:
        """Documents."""
        found = [re.match(r"tokenised ([\d,]+) documents", line) for line in self.said]
        return sum(int(match[1].replace(",", "")) for match in found if match)


class Command:
    """`python -m pipeline prepare` with a recipe, in a process group of its own."""

    def __init__(self, recipe: Path, *arguments: str, before: tuple[str, ...] = ()) -> None:
        self.cache = Path(yaml.safe_load(recipe.read_text())["data"]["cache_dir"])
        # As where gigatoken is not installed: the standard tokeniser takes long enough to be disturbed.
        without = recipe.parent / "without"
        without.mkdir(exist_ok=True)
        (without / "gigatoken.py").write_text("raise ImportError\n")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "pipeline", "prepare", "--config", str(recipe), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(without)},
        )

    def end(self) -> Ended:
        """Waits for it."""
        _, said = self.process.communicate(timeout=PATIENCE)
        return Ended(self.process.returncode, said.splitlines())

    def send(self, number: int) -> None:
        """To the whole group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def workers(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [
                child
                for child in psutil.Process(self.process.pid).children()
                if any("spawn_main" in argument for argument in child.cmdline())
            ]
        return []

    def wait_for_work(self) -> None:
        """Until a part is being written."""
        while not any(self.cache.glob("parts/*.tmp")):
            assert self.process.poll() is None
            assert time.monotonic() < self.started + PATIENCE
            time.sleep(0.01)

    def kill(self, whom: str) -> str:
        """SIGKILL; the group where there is no worker to kill. Returns who was killed."""
        workers = self.workers() if whom == "worker" else []
        if workers:
            with suppress(psutil.NoSuchProcess):
                workers[-1].kill()
            assert self.end().code in (0, 2)  # 0: that worker had no more to do
            return "worker"
        with suppress(ProcessLookupError):
            if whom == "parent":
                self.process.kill()
            else:
                self.send(signal.SIGKILL)
        self.process.wait()  # not for the pipe: orphans hold it
        return whom


def bytes_of(cache: Path) -> dict[str, bytes]:
    """Every byte that was prepared, by path; not the notes on when it was last looked at."""
    return {
        str(path.relative_to(cache)): path.read_bytes()
        for folder in ("parts", "tokenizers")
        for path in sorted((cache / folder).rglob("*"))
        if path.is_file() and path.name != "checked.json"
    }


def inodes_of(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in cache.glob("parts/*") if path.suffix != ".tmp"}


@pytest.fixture(scope="module")
def write_recipe(tmp_path_factory, make_config):
    """A recipe over some of eight files, each a part that takes a worker a third of a second."""
    corpus = tmp_path_factory.mktemp("corpus")
    texts = stdlib_texts("*.py", CHARACTERS)
    for number in range(FILES):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[number::FILES])
        (corpus / f"{number}.jsonl").write_text("".join(lines))

    def write(folder: Path, name: str = "one", files: range = range(FILES), **changes) -> Path:
        settings = {"prepare_workers": 2, "tokenizer": {"vocab_size": 600}} | changes
        config = make_config([corpus / f"{number}.jsonl" for number in files], folder / "cache", **settings)
        recipe = folder / f"{name}.yaml"
        data = config.model_dump(exclude_unset=True)
        recipe.write_text(
            yaml.safe_dump({"max_steps": 1, "model": MODEL, "batch": {"micro_batch_size": 1}, "data": data})
        )
        return recipe

    return write


@dataclass(frozen=True)
class Quiet:
    """An undisturbed run: its bytes, and the seconds between which it worked."""

    content: dict[str, bytes]
    documents: int
    begin: float
    end: float


@pytest.fixture(scope="module")
def quiet(write_recipe, tmp_path_factory):
    command = Command(write_recipe(tmp_path_factory.mktemp("quiet")))
    while not command.cache.exists() and command.process.poll() is None:
        time.sleep(0.01)
    begin = time.monotonic() - command.started
    ended = command.end()
    assert ended.code == 0, ended
    return Quiet(bytes_of(command.cache), ended.tokenised, begin, time.monotonic() - command.started)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(write_recipe, quiet, tmp_path):
    """Whatever was killed, the command is given again at once; now and then it comes to its end."""
    rng = random.Random(4)
    history: list[tuple[str, float]] = []
    while len(history) < KILLS:
        folder = tmp_path / f"after-{len(history)}"
        folder.mkdir()
        recipe = write_recipe(folder)
        while True:
            command = Command(recipe)
            whom, moment = rng.choice(["group", "parent", "worker"]), rng.uniform(quiet.begin, quiet.end)
            with suppress(subprocess.TimeoutExpired):
                if len(history) >= KILLS:
                    moment = PATIENCE
                assert command.process.wait(moment) == 0, (history, command.end())
                break
            history.append((command.kill(whom), round(moment, 2)))
        assert bytes_of(folder / "cache") == quiet.content, history
        shutil.rmtree(folder)
    assert {"group", "parent", "worker"} == {whom for whom, _ in history}


def test_a_worker_that_is_killed_is_one_line_with_its_part(write_recipe, tmp_path):
    command = Command(write_recipe(tmp_path, files=range(3)))
    command.wait_for_work()
    assert command.kill("worker") == "worker"


@pytest.mark.slow
def test_interrupted_it_says_so_in_one_line_and_goes_on(write_recipe, quiet, tmp_path):
    recipe = write_recipe(tmp_path)
    for share in (0.1, 0.4, 0.7):
        command = Command(recipe)
        time.sleep(quiet.begin + share * (quiet.end - quiet.begin))
        if command.process.poll() is None:
            command.send(signal.SIGINT)
            ended = command.end()
            assert ended.code == 130, ended
            assert ended.said[-1] == "stopped; what is finished is kept, and the same command goes on"
            assert "Traceback" not in "\n".join(ended.said)
    kept = inodes_of(command.cache)
    assert Command(recipe).end().code == 0
    assert kept.items() <= inodes_of(command.cache).items()
    assert bytes_of(command.cache) == quiet.content
