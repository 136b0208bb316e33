"""A participant: one process a rank, alive through all rounds, that steps only when it is told to.

So all participants meet the same drift of the machine: a burst of one, a burst of the next, and around again.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

PATIENCE = 300.0  # seconds a process may stay silent: 8 billion random weights take a core over a minute
# Lines of a log that are shown beside the numbers.
NOTED = re.compile(r"^(compile|attention): |warning", re.IGNORECASE)
GPU_SETTLE = 2  # untimed steps at the head of a burst: the GPU's memory was given back before it


@dataclass(frozen=True)
class Task:
    """What a participant is."""

    peer: str
    """Key of LOOPS in the module `loops`."""
    split: str
    """`plain`, or the ZeRO stage as text."""
    precision: str
    world_size: int
    warmup: int
    folder: Path
    recipe: Path
    json: Path | None
    loops: str = "participants"
    """Module with the training loops; its `take_part` is called in every rank."""
    label: str = ""
    """What the name says besides, such as the JSON file where it is not the stage's own."""

    @property
    def name(self) -> str:
        stage = "" if self.split == "plain" else f" stage {self.split}"
        return self.peer + stage + (f" ({self.label})" if self.label else "")


class FinishedError(Exception):
    """The gate's way to end a training loop that is not ours to return from."""


class ParticipantError(Exception):
    """A process of a participant failed."""


class Gate:
    """Called by a training loop before every step: blocks between bursts and times them.

    A burst goes from the gate that opens it to the gate after its last step, the device idle at both.
    """

    def __init__(self, pipe: Connection, task: Task, spawned_at: float):
        self._pipe = pipe
        self._spawned_at = spawned_at
        self._first_step_seconds: float | None = None
        self._steps = 0
        self._timed = self._remaining = task.warmup
        self._start = 0.0
        self._settle = GPU_SETTLE if _has_gpu() else 0

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
            _release_cached_memory()
            self._timed = self._pipe.recv()
            if self._timed == 0:
                raise FinishedError
            self._remaining = self._timed + self._settle
        if self._remaining == self._timed:
            wait_for_device()
            self._start = time.monotonic()
        self._remaining -= 1


def on_cuda() -> bool:
    """Whether participants, which inherit it, compute on a GPU."""
    from pipeline.distributed.accelerator import choose_accelerator

    return choose_accelerator() == "cuda"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def wait_for_device() -> None:
    import torch

    if _has_gpu():
        torch.cuda.synchronize()


def _release_cached_memory() -> None:
    """Lets the next participant have the GPU's memory."""
    import torch

    if _has_gpu():
        torch.cuda.empty_cache()


class GpuClocks:
    """Samples the SM clock and the power of the first GPU, where its driver can be asked."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._nvml: Any = None
        with suppress(Exception):  # no driver, no package: there are no clocks then
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml

    def sample(self) -> None:
        """Read the clock and the power once."""
        if self._nvml is not None:
            clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
            self._samples.append((clock, self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3))

    def medians(self) -> dict[str, float]:
        """Return `sm_mhz` and `watts`; empty where nothing was sampled."""
        if not self._samples:
            return {}
        clocks, watts = zip(*self._samples, strict=True)
        return {"sm_mhz": median(clocks), "watts": median(watts)}


class Participant:
    """The parent's side: starts the ranks, opens their gates, collects what they tell."""

    def __init__(self, task: Task, logs: Path | None = None):
        """Start the ranks.

        Args:
            logs: File that the ranks' logs are appended to at the end; None: they go with the folder.
        """
        self.task = task
        self.round_seconds: list[float] = []
        self.burst_clocks: list[dict[str, float]] = []
        self._logs = logs
        task.folder.mkdir(parents=True)
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(task.world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, task, rank, port, time.monotonic())
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def warm_up(self) -> None:
        """Waits for the end of the warm-up."""
        self.first_step_seconds = max(first for _, first in self._receive())

    def burst(self, steps: int) -> None:
        """Runs and times `steps` steps."""
        for pipe in self._pipes:
            pipe.send(steps)
        clocks = GpuClocks()
        self.round_seconds.append(max(seconds for seconds, _ in self._receive(clocks.sample)))
        self.burst_clocks.append(clocks.medians())

    def notes(self) -> list[str]:
        """Return what rank 0 logged of compilation, attention and problems, each line once."""
        log = self.task.folder / "rank0.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return list(dict.fromkeys(line[:300] for line in lines if NOTED.search(line)))

    def finish(self) -> dict[str, Any]:
        """Ends the loop; what rank 0 tells of it, with the largest memory of any rank."""
        reports = self.finish_all()
        return {**reports[0], "peak_memory_gib": max(report["peak_memory_gib"] for report in reports)}

    def finish_all(self) -> list[dict[str, Any]]:
        """Ends the loop; what each rank tells of it."""
        for pipe in self._pipes:
            pipe.send(0)
        reports = self._receive()
        self.close()
        return reports

    def close(self) -> None:
        """Ends the processes; politely if they are done."""
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

    def _receive(self, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            deadline = time.monotonic() + PATIENCE
            try:
                while not (is_there := pipe.poll(0.2)) and time.monotonic() < deadline:
                    meanwhile()
                answer = pipe.recv() if is_there else f"silent for {PATIENCE} s"
            except (EOFError, OSError):
                answer = "died"
            if isinstance(answer, str):
                self.close()
                log = self.task.folder / f"rank{rank}.log"
                tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
                raise ParticipantError(f"{self.task.name}, rank {rank}: {answer}\n{tail}")
            answers.append(answer)
        return answers


def _serve(pipe: Connection, task: Task, rank: int, port: int, spawned_at: float) -> None:
    # cores / ranks for everybody: a peer left alone would start one thread a core in every rank.
    environment: dict[str, Any] = {"OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // task.world_size)}
    if task.world_size > 1 or task.json is not None:  # accelerate takes LOCAL_RANK for a wish for DDP
        environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": task.world_size}
        environment |= {"LOCAL_WORLD_SIZE": task.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment["LOCAL_SIZE"] = task.world_size  # the deepspeed launcher's
    os.environ.update({key: str(value) for key, value in environment.items()})
    output = os.open(task.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        pipe.send(importlib.import_module(task.loops).take_part(task, Gate(pipe, task, spawned_at)))
        pipe.recv()  # until the parent has heard every rank
    except EOFError:
        pass
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)  # past the destructors of process groups and engines
