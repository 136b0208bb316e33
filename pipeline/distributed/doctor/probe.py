"""Process that the doctor starts on every host, and that answers its questions there.

It runs as `python -m pipeline.distributed.doctor.probe`. It changes nothing on the machine except for a
marker file, which it removes at its end, and it runs no command that comes with a question.
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
from pipeline.distributed.doctor.all_reduce import RANK_MODULE, RANK_TIMEOUT, RankMeasurements
from pipeline.distributed.doctor.machine_checks import (
    CHECKS,
    CheckResult,
    MachineQuestion,
    find_existing_folder,
    format_marker,
    read_gpus,
)
from pipeline.distributed.doctor.node import Method, NoAnswerError, StepReporter, ask, own_streams, serve
from pipeline.distributed.doctor.rows import HOST, Fault
from pipeline.distributed.launch.ssh import local_command, start_process
from pipeline.distributed.waiting import find_free_port

CHECK_TIMEOUT = 90.0
"""Seconds for all checks together. A folder on a file server that is down never answers."""


class Probe:
    """Answers the questions of one examination."""

    def __init__(self) -> None:
        self._question: MachineQuestion | None = None
        self._sees_markers = False

    def examine(self, values: dict[str, Any], report_step: StepReporter) -> dict[str, Any]:
        """Run all checks, and return their findings, the network and the number of GPUs.

        Args:
            values: Fields of the MachineQuestion.
            report_step: Called with the names of the checks that still run.

        Returns:
            `findings`: check -> fields of its CheckResult. `network`: fields of the Network, or `None` if it
            cannot be read; then `findings` has the fault. `num_gpus`: number of visible GPUs.
        """
        question = MachineQuestion(**values)
        self._question = question
        os.environ.update(question.environment)
        port = network.open_greeting_port(question.token, question.name)
        checks: dict[str, Callable[[], Any]] = {
            name: partial(check, question) for name, check in CHECKS.items()
        }
        checks["network"] = partial(network.read_network, question.names, port)
        checks["gpus"] = read_gpus
        results = run_checks(checks, CHECK_TIMEOUT, report_step)
        gpus = results.pop("gpus")
        own_network = None
        if isinstance(results["network"], network.Network):
            own_network = asdict(results.pop("network"))
        self._sees_markers = not results["folders"].faults
        return {
            "findings": {name: asdict(finding) for name, finding in results.items()},
            "network": own_network,
            "num_gpus": len(gpus) if isinstance(gpus, list) else 0,
        }

    def connect(self, peers: list[tuple[str, str, int]], report_step: StepReporter) -> dict[str, Any]:
        """Connect to the peers, and find the hosts whose markers this host sees.

        Args:
            peers: Name, address and port of each.
            report_step: Called once with this step.

        Returns:
            `links`: fields of a Link for each peer. `sees`: names of the hosts whose markers are visible.
        """
        assert self._question is not None
        report_step("connecting to the other hosts")
        links = network.connect_to(peers, self._question.token)
        # After a fault in the folders check, the folder may never answer.
        names = self._question.names if self._sees_markers else []
        return {
            "links": [asdict(link) for link in links],
            "sees": [name for name in names if self._marker(name).exists()],
        }

    def reduce(self, parts: list[dict[str, Any]], report_step: StepReporter) -> list[dict[str, Any]]:
        """Take part in the all-reduce with this machine's ranks, each in a process of its own.

        Args:
            parts: Arguments of `all_reduce.take_part` for each rank.
            report_step: Called with each step of each rank.

        Returns:
            Fields of the RankMeasurements of each rank.
        """

        async def take_part(part: dict[str, Any]) -> dict[str, Any]:
            rank = await start_process("rank", local_command(RANK_MODULE))
            rank.on_step = report_step
            try:
                measured: dict[str, Any] = await ask(rank, "reduce", part, seconds=RANK_TIMEOUT)
            except NoAnswerError as error:
                problem = f"still at {rank.step} after {RANK_TIMEOUT:.0f} s"
                if error.code is not None:
                    problem = f"exit code {error.code} at {rank.step}: {error.reason.splitlines()[-1]}"
                measured = asdict(RankMeasurements(part["rank"], rank.step, problem))
            await rank.close(timeout_seconds=0.5)  # a rank that hangs is killed soon
            return measured

        async def take_all() -> list[dict[str, Any]]:
            return await asyncio.gather(*map(take_part, parts))

        return asyncio.run(take_all())

    def close(self) -> None:
        """Remove the marker file, so that the machine is as it was before."""
        if self._question is not None:
            with contextlib.suppress(OSError):
                self._marker(self._question.name).unlink()

    def _marker(self, name: str) -> Path:
        assert self._question is not None
        return find_existing_folder(self._question.folders[0]) / format_marker(self._question, name)


def run_checks(
    checks: dict[str, Callable[[], Any]], seconds: float, report_step: StepReporter
) -> dict[str, Any]:
    """Run all checks at the same time, and return their results.

    The result of a check that raises, or that exceeds the time limit, is a CheckResult with that fault. A
    check that exceeds the limit is not stopped: a thread cannot be.

    Args:
        checks: Name of each check -> the function that runs it.
        seconds: Time limit for all checks together.
        report_step: Called about once a second with the names of the checks that still run.
    """
    pool = ThreadPoolExecutor(max_workers=len(checks))
    futures: dict[str, Future[Any]] = {name: pool.submit(check) for name, check in checks.items()}
    deadline = time.monotonic() + seconds
    missing = list(checks)
    while missing and time.monotonic() < deadline:
        report_step(", ".join(missing))
        wait([futures[name] for name in missing], timeout=1.0)
        missing = [name for name, future in futures.items() if not future.done()]
    pool.shutdown(wait=False)
    results = {}
    for name, future in futures.items():
        if future.done() and future.exception() is None:
            results[name] = future.result()
            continue
        reason = f"no answer within {seconds:g} s"
        fix = f"look for a file server or name server that does not respond on {HOST}"
        if future.done():
            error = future.exception()
            reason = f"{type(error).__name__}: {error}"
            fix = f"log in to {HOST} and look for the cause of this error"
        results[name] = CheckResult("", [Fault("fail", f"could not be checked: {reason}", fix)])
    return results


def answer_questions(questions: BinaryIO, answers: BinaryIO) -> NoReturn:
    """Answer the doctor's questions until their stream ends. Then the process ends.

    Args:
        questions: Stream of questions.
        answers: Stream for the answers.
    """
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
    answer_questions(*own_streams())
