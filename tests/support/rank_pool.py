"""Pools of real gloo ranks that stay alive across tests.

with RankPool(2) as pool:
    losses = pool.run(function, argument)   # function(job, argument) on every rank; one result a rank
"""

from __future__ import annotations

import gc
import os
import random
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

from support.fork_server import process_context

if TYPE_CHECKING:
    from pipeline.engine.deepspeed_base import EngineProcessGroups


def free_port() -> int:
    """Below those of outgoing connections, one of which might take it before it is used."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankFailedError(AssertionError):
    """A rank raised; the message holds its traceback."""


class RankPool:
    """`world_size` processes in one process group, with DeepSpeed started, waiting for functions."""

    def __init__(self, world_size: int, on_gpu: bool = False):
        self.world_size = world_size
        device = {} if on_gpu else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        processes = process_context(on_gpu)
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = processes.Pipe()
            environment = device | {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "PYTHONWARNINGS": "ignore",
            }
            process = processes.Process(
                target=_serve_functions,
                args=(theirs, {k: str(v) for k, v in environment.items()}),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 240.0) -> list[Any]:
        """`function(job, *arguments)` on every rank; the results in rank order."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                # The others may wait for a rank that has failed.
                if not pipe.poll(min(timeout, 60.0) if failures else timeout):
                    failures.append(f"rank {rank} did not answer within {timeout} s")
                    continue
                ok, value = pipe.recv()
            except EOFError:
                failures.append(f"rank {rank} died")
                continue
            if ok:
                results.append(value)
            else:
                failures.append(f"rank {rank} raised:\n{value}")
        if failures:
            self.close()  # the ranks may be out of step with each other
            raise RankFailedError("\n".join(failures))
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve_functions(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import cpuinfo
    import torch

    from pipeline.distributed.process_group import start_job
    from pipeline.distributed.ranks import read_ranks
    from pipeline.engine.deepspeed_base import EngineProcessGroups, start_deepspeed

    endings = _collect_engine_endings()
    job = start_job(read_ranks(os.environ), distributed=True)
    torch.set_num_threads(1)
    start_deepspeed(job)
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)  # a second, at each start of DeepSpeed's CPU Adam
    gc.freeze()  # what is imported; DeepSpeed collects garbage at each start of ZeRO 3
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        made = EngineProcessGroups()
        try:
            pipe.send((True, function(job, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        else:
            _close_open_engines(made, endings)


def _collect_engine_endings() -> list[ExitStack]:
    """What each engine of ours from here on does at its end: what it has registered elsewhere would hold
    DeepSpeed's engine, and with it groups of three threads each.
    """
    from pipeline.engine.deepspeed_base import DeepSpeedBase

    made, endings = DeepSpeedBase.__init__, []

    def make(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        endings.append(self.closing)

    DeepSpeedBase.__init__ = make  # type: ignore[method-assign]
    return endings


def _close_open_engines(groups: EngineProcessGroups, endings: list[ExitStack]) -> None:
    """Those that a function left open: the threads of their groups wake a hundred times a second each."""
    from deepspeed import DeepSpeedEngine

    from pipeline.engine.deepspeed_base import EngineProcessGroups
    from pipeline.engine.deepspeed_patches import drop_model_references

    while endings:
        endings.pop().close()
    gc.collect()
    for each in gc.get_objects():
        if isinstance(each, DeepSpeedEngine):
            each.destroy()
            drop_model_references(each)
    EngineProcessGroups._open.clear()
    groups.record()
    groups.destroy()
    gc.collect()
    gc.freeze()  # what stays, as imports do: collections look at what a function makes alone
