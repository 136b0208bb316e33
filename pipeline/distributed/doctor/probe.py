"""The far side of an examination: the process that the doctor starts on every host and asks.

It runs as `python -m pipeline.distributed.doctor.probe`. It only looks, runs no command that comes with a
question, and removes what it made when its questions end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pipeline.distributed.doctor import network
from pipeline.distributed.doctor.all_reduce import LIMIT, MODULE, RankMeasurements
from pipeline.distributed.doctor.machine_checks import (
    CHECKS,
    CheckResult,
    MachineQuestion,
    find_existing_folder,
    format_marker,
    read_gpus,
)
from pipeline.distributed.doctor.node import Method, SilentError, Tell, ask, own_streams, serve
from pipeline.distributed.doctor.rows import HOST, Fault
from pipeline.distributed.launch.ssh import local_command, start_process
from pipeline.distributed.waiting import find_free_port

CHECK_LIMIT = 90.0
"""Seconds for the checks: a folder on a file server that is gone never answers."""


class Probe:
    """Answers the questions of one examination."""

    def __init__(self) -> None:
        self._question: MachineQuestion | None = None
        self._sees_markers = False

    def examine(self, values: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Return the findings of every check, the network, and the number of GPUs."""
        question = MachineQuestion(**values)
        self._question = question
        os.environ.update(question.environment)
        port = network.open_greeting_port(question.token, question.name)
        checks: dict[str, Callable[[], Any]] = {
            name: partial(check, question) for name, check in CHECKS.items()
        }
        checks["network"] = partial(network.read_network, question.names, port)
        checks["gpus"] = read_gpus
        found = run_checks(checks, CHECK_LIMIT, tell)
        gpus, own_network = found.pop("gpus"), None
        if isinstance(found["network"], network.Network):
            own_network = asdict(found.pop("network"))
        self._sees_markers = not found["folders"].faults
        return {
            "findings": {name: asdict(finding) for name, finding in found.items()},
            "network": own_network,
            "num_gpus": len(gpus) if isinstance(gpus, list) else 0,
        }

    def connect(self, peers: list[tuple[str, str, int]], tell: Tell) -> dict[str, Any]:
        """Try the peers, and look whose markers this host sees."""
        assert self._question is not None
        tell("connecting to the other hosts")
        links = network.connect_to(peers, self._question.token)
        names = self._question.names if self._sees_markers else []  # else the folder may never answer
        return {
            "links": [asdict(link) for link in links],
            "sees": [name for name in names if self._marker(name).exists()],
        }

    def reduce(self, parts: list[dict[str, Any]], tell: Tell) -> list[dict[str, Any]]:
        """Take part in the all-reduce with this machine's ranks, and return what each measured."""

        async def take_part(part: dict[str, Any]) -> dict[str, Any]:
            rank = await start_process("rank", local_command(MODULE))
            rank.heard = tell
            try:
                measured: dict[str, Any] = await ask(rank, "reduce", part, seconds=LIMIT)
            except SilentError as error:
                problem = f"still at {rank.step} after {LIMIT:.0f} s"
                if error.code is not None:
                    problem = f"ended with code {error.code} at {rank.step}: {error.said.splitlines()[-1]}"
                measured = asdict(RankMeasurements(part["rank"], rank.step, problem))
            await rank.close(patience=0.5)  # one that hangs is not waited for
            return measured

        async def take_all() -> list[dict[str, Any]]:
            return await asyncio.gather(*map(take_part, parts))

        return asyncio.run(take_all())

    def close(self) -> None:
        """Leave the machine as it was."""
        if self._question is not None:
            with contextlib.suppress(OSError):
                self._marker(self._question.name).unlink()

    def _marker(self, name: str) -> Path:
        assert self._question is not None
        return find_existing_folder(self._question.folders[0]) / format_marker(self._question, name)


def run_checks(checks: dict[str, Callable[[], Any]], seconds: float, tell: Tell) -> dict[str, Any]:
    """Run all checks at the same time. One that fails, or takes too long, is a fault; it is left running."""
    pool = ThreadPoolExecutor(max_workers=len(checks))
    futures: dict[str, Future[Any]] = {name: pool.submit(check) for name, check in checks.items()}
    deadline = time.monotonic() + seconds
    missing = list(checks)
    while missing and time.monotonic() < deadline:
        tell(", ".join(missing))
        wait([futures[name] for name in missing], timeout=1.0)
        missing = [name for name, future in futures.items() if not future.done()]
    pool.shutdown(wait=False)
    found = {}
    for name, future in futures.items():
        if future.done() and future.exception() is None:
            found[name] = future.result()
            continue
        found_out, look = f"no answer within {seconds:g} s", "a file server or name server that is gone"
        if future.done():
            error = future.exception()
            found_out, look = f"{type(error).__name__}: {error}", "the machine"
        fault = Fault("fail", f"could not be found out: {found_out}", f"look for {look} on {HOST}")
        found[name] = CheckResult("", [fault])
    return found


def answer(questions: BinaryIO, answers: BinaryIO) -> NoReturn:
    """Answer the doctor until it has no more questions. Then the process ends."""
    probe = Probe()
    methods: dict[str, Method] = {
        "time": lambda _, __: time.time(),
        "examine": probe.examine,
        "connect": probe.connect,
        "free port": lambda _, __: find_free_port(),
        "reduce": probe.reduce,
    }
    serve(questions, answers, methods, probe.close)


if __name__ == "__main__":
    answer(*own_streams())
