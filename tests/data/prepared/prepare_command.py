"""`python -m pipeline prepare` as a process that can be disturbed, and what it left in its cache."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from support.fork_server import ForkedProgram
from support.launch import ROOT, make_environment

from pipeline.data.prepared.part_files import MTIMES_FILE

PATIENCE = 120.0  # seconds; an undisturbed run of the tests takes about ten
MODEL = {"kind": "causal_lm", "architecture": "gpt2", "num_layers": 1, "num_heads": 2, "hidden_size": 32}


@dataclass(frozen=True)
class Ended:
    """A finished command: exit code and printed lines."""

    code: int
    said: list[str]

    @property
    def tokenised(self) -> int:
        """Documents, as far as it was said."""
        found = [re.match(r"tokenised ([\d,]+) documents", line) for line in self.said]
        return sum(int(match[1].replace(",", "")) for match in found if match)

    @property
    def error(self) -> str:
        """The one line with which it ended."""
        assert self.code == 2, self
        lines = [line for line in self.said if line.startswith("error: ")]
        assert lines == self.said[-1:], self
        assert "Traceback" not in "\n".join(self.said)
        return lines[0]


def write_recipe(path: Path, data: dict[str, Any]) -> Path:
    recipe = {"max_steps": 1, "model": MODEL, "batch": {"micro_batch_size": 1}, "data": data}
    path.write_text(yaml.safe_dump(recipe))
    return path


class Command:
    """A preparation under way, in a process group of its own.

    Args:
        recipe: Its path.
        arguments: Further ones.
    """

    def __init__(self, recipe: Path, *arguments: str) -> None:
        self.cache = Path(yaml.safe_load(recipe.read_text())["data"]["cache_dir"])
        self.started = time.monotonic()
        self._said = Path(tempfile.mkdtemp(dir=recipe.parent)) / "said"
        # A shell starts background jobs with SIGINT ignored, and the command would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = ForkedProgram(
            ["-m", "pipeline", "prepare", "--config", str(recipe), *arguments],
            make_environment(),
            Path(os.devnull),
            self._said,
            cwd=ROOT,
        )
        signal.signal(signal.SIGINT, before)

    def end(self) -> Ended:
        """Wait for the end of the command."""
        code = self.process.wait(PATIENCE)
        return Ended(code, self._said.read_text().splitlines())

    def send(self, number: int) -> None:
        """Send a signal to the whole process group, as a terminal does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait_for_work(self) -> None:
        """Wait until the command has imported all and said its first line, or has ended."""
        while self.process.poll() is None and not (self._said.exists() and self._said.stat().st_size):
            time.sleep(0.005)

    def wait_for(self, pattern: str) -> None:
        """Wait until the cache has such a file."""
        while not any(self.cache.glob(pattern)):
            self.pause()

    def wait_for_part(self, number: int) -> None:
        """Wait until this command prepares parts and `number` of them are finished or being written."""
        while len(list(self.cache.glob("parts/*"))) < number or not self._is_at_parts():
            self.pause()

    def _is_at_parts(self) -> bool:
        return self._said.exists() and "tokenising" in self._said.read_text()

    def pause(self) -> None:
        """Wait a moment; the command must not end meanwhile."""
        assert self.process.poll() is None, self.end()
        assert time.monotonic() < self.started + PATIENCE
        time.sleep(0.005)

    def kill_worker(self) -> bool:
        """SIGKILL to one of the workers; False: there is none."""
        with suppress(psutil.Error):
            for worker in workers_of(self.process.pid)[:1]:
                worker.kill()
                return True
        return False

    def kill(self, *, orphans: bool) -> None:
        """SIGKILL to the command; `orphans`: its workers are left alive."""
        if orphans:
            self.process.kill()
        else:
            self.send(signal.SIGKILL)
        self.process.wait()


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the workers of a process that prepares data, in the order of their start."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if any("spawn_main" in argument for argument in child.cmdline()):
                found.append(child)
    return sorted(found, key=lambda child: child.create_time())


def bytes_of(cache: Path) -> dict[str, bytes]:
    """Every byte that was prepared, by path; without the times at which it was last known to be right."""
    return {
        str(path.relative_to(cache)): path.read_bytes()
        for folder in ("parts", "tokenizers")
        for path in sorted((cache / folder).rglob("*"))
        if path.is_file() and path.name != MTIMES_FILE
    }


def parts_of(cache: Path) -> dict[str, int]:
    """Finished parts and their inodes, which change when they are made again."""
    return {path.name: path.stat().st_ino for path in cache.glob("parts/*") if path.suffix != ".tmp"}
