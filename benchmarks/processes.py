"""Runs a participant as one process per rank, which lives through all rounds and steps only on request.

The participants take turns in short bursts, so that drift of the machine affects all of them equally.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

SILENCE_SECONDS = 300.0  # most seconds to wait for a rank; a core draws 8 billion weights in over a minute
GPU_SETTLE = 2  # untimed steps at the start of a burst, which allocate the GPU's memory again


@dataclass(frozen=True)
class Task:
    """Describes what a participant trains, and how."""

    peer: str
    """Key of LOOPS in loops.py."""
    split: str
    """`plain`, a ZeRO stage as text, or a file of ds_configs/."""
    precision: str
    world_size: int
    warmup: int
    """Untimed steps before the first burst."""
    folder: Path
    recipe: Path
    json: Path | None
    module: str = "loops"
    """Module whose `take_part` is called in every rank."""
    label: str = ""
    """Text added to the name, such as the JSON file if it is not the stage's own."""

    @property
    def name(self) -> str:
        """Name of the participant in results."""
        stage = "" if self.split == "plain" else f" stage {self.split}"
        return self.peer + stage + (f" ({self.label})" if self.label else "")


class FinishedError(Exception):
    """A gate ends the training loop."""


class ParticipantError(Exception):
    """A process of a participant failed."""


class Gate:
    """Times bursts of steps, and blocks between them. A training loop calls it before every step.

    A burst lasts from the call that opens it to the call after its last step. The device is idle at both.
    """

    def __init__(self, pipe: Connection, task: Task, spawned_at: float):
        self._pipe = pipe
        self._spawned_at = spawned_at
        self._first_step_seconds: float | None = None
        self._steps = 0
        self._timed = task.warmup
        self._remaining = task.warmup
        self._start = 0.0

    @property
    def ends_burst(self) -> bool:
        """Whether the next call comes after the last step of a burst."""
        return self._remaining == 0

    def __call__(self) -> None:
        if self._steps == 1:
            wait_for_device()
            self._first_step_seconds = time.monotonic() - self._spawned_at
        self._steps += 1
        if self._remaining == 0:
            wait_for_device()
            self._pipe.send((time.monotonic() - self._start, self._first_step_seconds))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # frees the GPU's memory for the next participant
            self._timed = self._pipe.recv()
            if self._timed == 0:
                raise FinishedError
            self._remaining = self._timed + (GPU_SETTLE if torch.cuda.is_available() else 0)
        if self._remaining == self._timed:
            wait_for_device()
            self._start = time.monotonic()
        self._remaining -= 1

    def offer_save(self, save: Callable[[Path, int], object], store: Any = None) -> None:
        """Receive the loop's function that saves. checkpoint.py calls it between steps; others ignore it.

        Args:
            save: Called with `<task.folder>/checkpoint-<step>` and the step.
            store: Store of the pipeline, which writes in the background; `None` if the call ends the save.
        """


def wait_for_device() -> None:
    """Wait until the GPU is idle, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Participant:
    """Starts a participant's ranks, opens their gates and collects their reports.

    Args:
        logs: File to which the ranks' logs are appended at the end; `None`: they stay in the task's folder.
    """

    def __init__(self, task: Task, logs: Path | None = None):
        self.task = task
        self.round_seconds: list[float] = []
        self.first_step_seconds = 0.0
        self._logs = logs
        task.folder.mkdir(parents=True)
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes = []
        self._processes = []
        # All participants get cores / ranks threads; peers would start one thread per core in each rank.
        threads = max(1, len(os.sched_getaffinity(0)) // task.world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # the ranks inherit it before they import torch
        for rank in range(task.world_size):
            own_end, rank_end = context.Pipe()
            arguments = (rank_end, task, rank, port, time.monotonic())
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            rank_end.close()
            self._pipes.append(own_end)
            self._processes.append(process)

    def __enter__(self) -> Participant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Wait for the end of the warm-up."""
        self.first_step_seconds = max(first for _, first in self._receive())

    def burst(self, steps: int) -> None:
        """Run and time `steps` steps."""
        for pipe in self._pipes:
            pipe.send(steps)
        self.round_seconds.append(max(seconds for seconds, _ in self._receive()))

    def finish(self) -> list[dict[str, Any]]:
        """End the loop and return each rank's report."""
        for pipe in self._pipes:
            pipe.send(0)
        reports = self._receive()
        self.close()
        return reports

    def close(self) -> None:
        """End the processes, with SIGKILL those that do not end within 5 s, and collect their logs."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join()
        if self._logs is not None:
            with self._logs.open("a") as file:
                for log in sorted(self.task.folder.glob("rank*.log")):
                    file.write(f"=== {self.task.name}, {log.stem}\n{log.read_text(errors='replace')}\n")
            self._logs = None

    def _receive(self) -> list[Any]:
        """Return each rank's answer.

        Raises:
            ParticipantError: A rank raised, died or did not answer.
        """
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                has_answered = pipe.poll(SILENCE_SECONDS)
                answer = pipe.recv() if has_answered else f"no answer within {SILENCE_SECONDS:g} s"
            except (EOFError, OSError):
                answer = "the process died"
            if isinstance(answer, str):
                self.close()
                log = self.task.folder / f"rank{rank}.log"
                tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
                raise ParticipantError(f"{self.task.name}, rank {rank}: {answer}\n{tail}")
            answers.append(answer)
        return answers


def _run_rank(pipe: Connection, task: Task, rank: int, port: int, spawned_at: float) -> None:
    """Run the task's module in this process, and send its report or a traceback. Never returns."""
    environment: dict[str, Any] = {}
    if task.world_size > 1 or task.json is not None:  # accelerate uses DDP wherever LOCAL_RANK is set
        environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": task.world_size}
        environment |= {"LOCAL_WORLD_SIZE": task.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment["LOCAL_SIZE"] = task.world_size  # the deepspeed launcher sets it
    os.environ.update({key: str(value) for key, value in environment.items()})
    output = os.open(task.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        pipe.send(importlib.import_module(task.module).take_part(task, Gate(pipe, task, spawned_at)))
        pipe.recv()  # waits until the parent has received every rank's report
    except EOFError:
        pass
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)  # skips the destructors of process groups and engines
