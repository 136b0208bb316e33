"""Launches launch/train.py as users do, in forks with the imports done where these behave the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.fork_server import ForkedProgram, is_same_in_fork
from support.metrics_rows import read_reproducible_rows as read_reproducible_rows
from support.rank_pool import free_port

from pipeline.files import is_run_locked

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "launch" / "train.py")
BIN = Path(sys.executable).parent
TORCHRUN = ["-m", "torch.distributed.run"]

PATIENCE = 900.0  # seconds until a command is killed; a busy machine needs minutes
# Sections of the recipe that starts fastest: it reads no text and does not import transformers.
DIGITS = {"model": {"kind": "cnn"}, "data": {"kind": "digits"}, "objective": {"kind": "classification"}}


def make_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment for a launch on the CPU, without W&B's and launchers' variables."""
    # Commands that ran in this process have set these.
    of_launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", *of_launchers))}
    path = os.pathsep.join([str(BIN), inherited["PATH"]])
    return inherited | {"PATH": path, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", **extra}


def make_command(*arguments: str, ranks: int = 0) -> list[str]:
    """Return the words of `python launch/train.py`, or of the deepspeed launcher on `ranks` ranks."""
    if not ranks:
        return [sys.executable, TRAIN, *arguments]
    launcher = [str(BIN / "deepspeed"), "--num_gpus", str(ranks), "--master_port", str(free_port())]
    return [*launcher, TRAIN, *arguments]


@dataclass
class CompletedCommand:
    """Exit code and output of a command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    session_id: int
    """Id of the session in which the command and its processes ran."""

    def remaining_processes(self) -> list[int]:
        """Return the ids of processes of its session that still run after half a second."""
        time.sleep(0.5)
        return [pid for pid in psutil.pids() if _find_session_id(pid) == self.session_id]


def _find_session_id(pid: int) -> int | None:
    """Return a process's session id; `None` if the process has ended."""
    with suppress(OSError):
        return os.getsid(pid)
    return None


def start(
    *arguments: str, ranks: int = 0, cwd: Path = ROOT, output: Path, errors: Path | None = None, **extra: str
) -> ForkedProgram | subprocess.Popen[bytes]:
    """Start `make_command(...)` in a new session, and return the running process."""
    return _start(make_command(*arguments, ranks=ranks), cwd, output, errors, extra)


def launch(*arguments: str, ranks: int = 0, cwd: Path = ROOT, **extra: str) -> CompletedCommand:
    """Run `make_command(...)` to its end."""
    return run_python(*make_command(*arguments, ranks=ranks), cwd=cwd, **extra)


def run_python(*words: str, cwd: Path = ROOT, **extra: str) -> CompletedCommand:
    """Run a Python script with its arguments to its end; the first word may be the interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        errors = Path(folder) / "errors"
        process = _start(list(words), cwd, output, errors, extra)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return CompletedCommand(code, output.read_text(), errors.read_text(), process.pid)


def _start(
    words: list[str], cwd: Path, output: Path, errors: Path | None, extra: dict[str, str]
) -> ForkedProgram | subprocess.Popen[bytes]:
    arguments = words[1:] if words[0] == sys.executable else words
    if is_same_in_fork(extra):
        return ForkedProgram(arguments, make_environment(**extra), output, errors, cwd)
    with output.open("w") as stdout, (errors or output).open("a") as stderr:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=make_environment(**extra),
            start_new_session=True,
        )


def write_recipe(folder: Path, **changes: Any) -> Path:
    """Write the recipe of a run of seconds, and return its path: a tiny Llama on a few kB of source code.

    Args:
        changes: Sections of the recipe with other values.
    """
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for source in sorted((ROOT / "pipeline" / "config").glob("*.py")):
        (texts / source.name).write_text(source.read_text())
    tree: dict[str, Any] = {
        "name": "tiny",
        "runs_dir": str(folder / "runs"),
        "max_steps": 10,
        "model": {
            "kind": "causal_lm",
            "architecture": "llama",
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
        },
        "data": {
            "kind": "text",
            "paths": [str(texts)],
            "sequence_length": 32,
            "eval_fraction": 0.3,
            "tokenizer": {"vocab_size": 300},
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-2},
        "eval": {"every": 4, "max_samples": 20},
        "checkpoint": {"every": 3},
        "wandb": {"mode": "disabled"},
        "sample": {"max_new_tokens": 0},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree | changes))  # JSON is YAML
    return path


def run_directories(folder: Path) -> list[Path]:
    """Return the run directories of the recipe that `write_recipe(folder)` wrote, oldest first."""
    return sorted((folder / "runs").glob("tiny-*"))


def kill_after_rows(arguments: list[str], ranks: int, folder: Path, rows: int, **extra: str) -> None:
    """Start a run, and send SIGKILL to its process group once metrics.jsonl has `rows` lines."""
    process = start(*arguments, ranks=ranks, output=Path(os.devnull), **extra)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        records = [p for run in run_directories(folder) for p in run.glob("metrics.jsonl")]
        if records and len(records[0].read_text().splitlines()) >= rows:
            break
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A rank that is killed inside of a write to the disk ends, and releases the run's lock, after that write.
    while time.monotonic() < deadline and any(is_run_locked(run) for run in run_directories(folder)):
        time.sleep(0.005)
