"""Keeps pools of real gloo ranks alive across tests.

with RankPool(2) as pool:
    losses = pool.run(function, argument)   # function(job, argument) on every rank; one result per rank
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
    """Return a free port of this machine, for a server that starts soon.

    It lies below the ports of outgoing connections, one of which could take it before the server does.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankFailedError(AssertionError):
    """Ranks raised, died or did not answer; the message has the traceback of each that raised."""


class RankPool:
    """Runs functions on processes that form one process group, with DeepSpeed initialized.

    Args:
        world_size: Number of processes.
        on_gpu: Whether ranks may use the GPU; otherwise they do not see it.
    """

    def __init__(self, world_size: int, on_gpu: bool = False):
        self.world_size = world_size
        device = {} if on_gpu else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        processes = process_context(on_gpu)
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            own_end, rank_end = processes.Pipe()
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
                args=(rank_end, {k: str(v) for k, v in environment.items()}),
                daemon=True,
            )
            process.start()
            rank_end.close()
            self._pipes.append(own_end)
            self._processes.append(process)

    @property
    def is_alive(self) -> bool:
        """Whether all ranks run."""
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 240.0) -> list[Any]:
        """Call `function(job, *arguments)` on every rank, and return the results in rank order.

        Args:
            timeout: Seconds to wait for each rank.

        Raises:
            RankFailedError: A rank failed. The pool is closed then.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = []
        failures = []
        for rank, pipe in enumerate(self._pipes):
            try:
                # After a failure the other ranks may wait for the failed one, so they get a minute at most.
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
            self.close()  # some ranks may still be in a collective, so the pool cannot be used again
            raise RankFailedError("\n".join(failures))
        return results

    def close(self) -> None:
        """Kill all ranks."""
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
    """Join the process group, and call the functions that arrive through the pipe, until it closes."""
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
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)  # takes a second at each start of DeepSpeed's CPU Adam
    gc.freeze()  # DeepSpeed collects garbage at each start of ZeRO 3, and need not look at imported objects
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        groups = EngineProcessGroups()
        try:
            pipe.send((True, function(job, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        else:
            _close_open_engines(groups, endings)


def _collect_engine_endings() -> list[ExitStack]:
    """Return a list that receives the `cleanup` stack of each engine that is built from now on.

    An engine that is not closed leaves callbacks registered. They keep DeepSpeed's engine alive, and with it
    process groups of three threads each.
    """
    from pipeline.engine.deepspeed_base import DeepSpeedBase

    build = DeepSpeedBase.__init__
    endings: list[ExitStack] = []

    def build_and_record(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        endings.append(self.cleanup)

    DeepSpeedBase.__init__ = build_and_record  # type: ignore[method-assign]
    return endings


def _close_open_engines(groups: EngineProcessGroups, endings: list[ExitStack]) -> None:
    """Close the engines that a function left open.

    Each thread of their process groups would wake up a hundred times a second.
    """
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
    gc.freeze()  # the next collections look only at objects of the next function
