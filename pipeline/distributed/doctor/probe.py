"""Answers the doctor's questions on a host. The doctor starts this process, the probe, on every host.

It runs as `python -m pipeline.distributed.doctor.probe`. The probe changes nothing on the machine except for
a small file in each of the run's folders, which it removes. It runs no command that comes with a question.
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
from pipeline.distributed.doctor.node import (
    Method,
    NoAnswerError,
    StepReporter,
    ask,
    reserve_standard_streams,
    serve,
)
from pipeline.distributed.doctor.rows import HOST, Fault
from pipeline.distributed.launch.ssh import local_command, start_process
from pipeline.distributed.waiting import find_free_port

CHECK_TIMEOUT = 90.0
"""Seconds that all checks together may take. A check of a folder waits forever if its file server is down."""


class Probe:
    """Answers the questions of one examination. The first question is `examine`."""

    def __init__(self) -> None:
        self._question: MachineQuestion | None = None  # `None` before `examine`
        self._can_read_folder = False

    def examine(self, values: dict[str, Any], report_step: StepReporter) -> dict[str, Any]:
        """Run all checks, and return their findings, the network and the number of GPUs.

        Sets the environment variables of the question, opens the greeting port, and writes the marker file.

        Args:
            values: Fields of the MachineQuestion.
            report_step: Called with the names of the checks that still run.

        Returns:
            `findings`: name of each check -> fields of its CheckResult. `network`: fields of the Network;
            `None` if the network cannot be read, and then `findings` has a fault under the same name.
            `num_gpus`: number of visible GPUs.
        """
        question = MachineQuestion(**values)
        self._question = question
        os.environ.update(question.environment)
        port = network.open_greeting_port(question.token, question.host)
        checks: dict[str, Callable[[], Any]] = {
            name: partial(check, question) for name, check in CHECKS.items()
        }
        checks["network"] = partial(network.read_network, question.hosts, port)
        checks["gpus"] = read_gpus
        results = run_checks(checks, CHECK_TIMEOUT, report_step)
        gpus = results.pop("gpus")
        own_network = None
        if isinstance(results["network"], network.Network):
            own_network = asdict(results.pop("network"))
        self._can_read_folder = not results["folders"].faults
        return {
            "findings": {name: asdict(result) for name, result in results.items()},
            "network": own_network,
            "num_gpus": len(gpus) if isinstance(gpus, list) else 0,
        }

    def connect(self, peers: list[tuple[str, str, int]], report_step: StepReporter) -> dict[str, Any]:
        """Connect to the peers, and find the hosts whose markers this host sees.

        Args:
            peers: Name, address and port of each other host.
            report_step: Called once, with the name of this step.

        Returns:
            `links`: fields of a Link for each peer. `visible_hosts`: hosts whose markers are visible here;
            empty if the folder of runs has a fault.
        """
        assert self._question is not None
        report_step("connecting to the other hosts")
        links = network.connect_to(peers, self._question.token)
        # If the folders have a fault, looking into the folder of runs may wait forever.
        hosts = self._question.hosts if self._can_read_folder else []
        return {
            "links": [asdict(link) for link in links],
            "visible_hosts": [host for host in hosts if self._find_marker(host).exists()],
        }

    def reduce(self, rank_arguments: list[dict[str, Any]], report_step: StepReporter) -> list[dict[str, Any]]:
        """Run this machine's ranks of the all-reduce, each in its own process.

        Args:
            rank_arguments: Arguments of `all_reduce.measure_rank` for each rank of this machine.
            report_step: Called with each step of each rank.

        Returns:
            Fields of the RankMeasurements of each rank.
        """

        async def measure(arguments: dict[str, Any]) -> dict[str, Any]:
            rank = await start_process("rank", local_command(RANK_MODULE))
            rank.on_step = report_step
            try:
                measurements: dict[str, Any] = await ask(rank, "reduce", arguments, seconds=RANK_TIMEOUT)
            except NoAnswerError as error:
                problem = f"still at {rank.step} after {RANK_TIMEOUT:.0f} s"
                if error.code is not None:
                    problem = f"exit code {error.code} at {rank.step}: {error.reason.splitlines()[-1]}"
                measurements = asdict(RankMeasurements(arguments["rank"], rank.step, problem))
            await rank.close(timeout_seconds=0.5)  # a rank that hangs is killed soon
            return measurements

        async def measure_all() -> list[dict[str, Any]]:
            return await asyncio.gather(*map(measure, rank_arguments))

        return asyncio.run(measure_all())

    def close(self) -> None:
        """Remove the marker file, so that the machine is as it was before."""
        if self._question is not None:
            with contextlib.suppress(OSError):
                self._find_marker(self._question.host).unlink()

    def _find_marker(self, host: str) -> Path:
        """Return the path of a host's marker in this machine's folder of runs."""
        assert self._question is not None
        return find_existing_folder(self._question.folders[0]) / format_marker(self._question, host)


def run_checks(
    checks: dict[str, Callable[[], Any]], seconds: float, report_step: StepReporter
) -> dict[str, Any]:
    """Run all checks at the same time, and return their results.

    If a check raises an exception or exceeds the time limit, its result is a CheckResult with this fault. A
    check that exceeds the limit continues in its thread, because Python cannot stop a thread.

    Args:
        checks: Name of each check -> the function that runs it.
        seconds: Time limit for all checks together.
        report_step: Called about once a second with the names of the checks that still run.
    """
    pool = ThreadPoolExecutor(max_workers=len(checks))
    futures: dict[str, Future[Any]] = {name: pool.submit(check) for name, check in checks.items()}
    deadline = time.monotonic() + seconds
    running = list(checks)
    while running and time.monotonic() < deadline:
        report_step(", ".join(running))
        wait([futures[name] for name in running], timeout=1.0)
        running = [name for name, future in futures.items() if not future.done()]
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
    """Answer the doctor's questions until their stream ends; then end the process.

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
    answer_questions(*reserve_standard_streams())
