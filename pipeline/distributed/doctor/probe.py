"""The far side of an examination, started on every host through ssh.

It runs as `python -m pipeline.distributed.doctor.probe`.

Reads questions on standard input and answers on standard output (launch/ssh.py); ends, and removes
what it made, when its input closes. It only looks: no question makes it run a command that came with it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypedDict

from pipeline.distributed.doctor import facts, network_facts
from pipeline.distributed.doctor.session import (
    STEPS,
    Session,
    SilentError,
    answer_all,
    over_command,
    own_streams,
    read_questions,
)
from pipeline.distributed.launch.ssh import local_command
from pipeline.distributed.machine import available_memory

PATIENCE = 8.0
"""Seconds for each fact: a folder of a file server that is gone never answers."""


class Answered(TypedDict, total=False):
    """The facts; what could not be found out is absent, and stands in `unknown` with the reason."""

    project: facts.Project
    versions: dict[str, str | None]
    devices: facts.Devices
    driver: facts.Driver
    memory: int
    disks: list[facts.Disk]
    folders: list[facts.Folder]
    ops: facts.Ops
    network: network_facts.Network
    environment: dict[str, str]
    """Variables that choose the interface."""
    address: str | None
    """Where ssh found this machine."""
    port: int
    """Where it listens."""
    unknown: dict[str, str]


class Examine(TypedDict):
    """The first question: who everyone is, and what to look for."""

    token: str
    """Of this examination; other programs do not know it."""
    name: str
    names: list[str]
    folders: list[str]
    """What the run writes to; the first is its own."""
    environment: dict[str, str]
    """What a launch would set."""
    devices: list[int] | None
    """Of the job on this machine; None: all."""
    load_torch: bool
    """There will be an all-reduce."""


def marker(token: str, name: str) -> str:
    """A file that a host leaves in the run's folder for the others to see."""
    return f".doctor-{token}-{name}"


class Probe:
    """Answers the questions of one examination."""

    def __init__(self) -> None:
        self._asked: Examine | None = None
        self._ranks: list[Session] = []

    def examine(self, asked: Examine) -> Answered:
        """Every fact, found out at the same time."""
        self._asked = asked
        os.environ.update(asked["environment"])
        port = network_facts.listen(asked["token"], asked["name"])
        folders = asked["folders"]
        if asked["load_torch"]:  # meanwhile: seconds
            # On processors a rank a host is enough.
            has_gpu = Path("/proc/driver/nvidia/version").exists()
            count = len(asked["devices"] or facts.read_devices()["gpus"]) if has_gpu else 1
            self._ranks = [_start_rank() for _ in range(max(1, count))]
        questions: dict[str, Callable[[], object]] = {
            "project": facts.read_project,
            "versions": facts.read_versions,
            "devices": facts.read_devices,
            "driver": facts.read_driver,
            "memory": available_memory,
            "disks": lambda: facts.read_disks(folders),
            "folders": lambda: facts.read_folders(folders, marker(asked["token"], asked["name"])),
            "ops": facts.read_ops,
            "network": lambda: network_facts.read_network(asked["names"]),
        }
        found, unknown = find_out(questions, PATIENCE)
        way = os.environ.get("SSH_CONNECTION", "").split()
        chosen = {k: v for k, v in os.environ.items() if k.endswith("_SOCKET_IFNAME")}
        rest = {"environment": chosen, "address": way[2] if len(way) == 4 else None, "port": port}
        return Answered(**found, **rest, unknown=unknown)  # type: ignore[typeddict-item]

    def connect(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Tries the peers, and looks which hosts' markers it sees."""
        assert self._asked is not None
        token, names = self._asked["token"], self._asked["names"]
        links = network_facts.connect_to(asked["peers"], token, asked["seconds"])
        folder = self._run_folder()
        return {"links": links, "sees": [name for name in names if (folder / marker(token, name)).exists()]}

    def serve(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Opens the store of the all-reduce."""
        return _ask_rank(self._ranks[0], "serve", asked["address"], asked["seconds"])

    def reduce(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Takes part with this machine's ranks: what each measured, or where it stood at the limit."""

        def take_part(rank: Session, part: dict[str, Any]) -> dict[str, Any]:
            answer = _ask_rank(rank, "reduce", part, asked["seconds"])
            return {"rank": part["rank"], "step": rank.step} | answer

        with ThreadPoolExecutor(max_workers=len(self._ranks)) as pool:
            return {"results": list(pool.map(take_part, self._ranks, asked["parts"]))}

    def close(self) -> None:
        """Leaves the machine as it was."""
        for rank in self._ranks:
            rank.close(patience=0)  # one that hangs is not waited for
        if self._asked is not None:
            with contextlib.suppress(OSError):
                (self._run_folder() / marker(self._asked["token"], self._asked["name"])).unlink()

    def _run_folder(self) -> Path:
        assert self._asked is not None
        return facts.existing(Path(self._asked["folders"][0]).expanduser().absolute())


def _start_rank() -> Session:
    """A process of session.py."""
    rank = over_command("rank", local_command("pipeline.distributed.doctor.session"))
    rank.step = STEPS[0]
    return rank


def _ask_rank(rank: Session, method: str, value: Any, seconds: float) -> dict[str, Any]:
    """Its answer, or {"problem": why there is none}."""
    try:
        answer: dict[str, Any] = rank.ask(method, value, seconds=seconds)
    except SilentError as error:
        if error.code is None:
            return {"problem": f"still at {rank.step} after {seconds:.0f} s"}
        last = (error.said.splitlines() or ["no message"])[-1]
        return {"problem": f"ended with code {error.code} at {rank.step}: {last}"}
    return answer


def find_out(
    questions: dict[str, Callable[[], object]], seconds: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """(answers, reasons why there is none), by name. What takes longer is left behind, running."""
    pool = ThreadPoolExecutor(max_workers=len(questions))
    futures: dict[str, Future[object]] = {name: pool.submit(ask) for name, ask in questions.items()}
    wait_for(futures.values(), timeout=seconds)
    found: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for name, future in futures.items():
        if not future.done():
            unknown[name] = f"no answer within {seconds:g} s"
        elif (error := future.exception()) is not None:
            unknown[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = future.result()
    pool.shutdown(wait=False)
    return found, unknown


def serve(questions: BinaryIO, answers: BinaryIO) -> NoReturn:
    """Until there are no more questions; then the process ends, whatever it waits for."""
    probe = Probe()
    methods: dict[str, Callable[[Any], Any]] = {
        "time": lambda _: time.time(),
        "examine": probe.examine,
        "connect": probe.connect,
        "serve": probe.serve,
        "reduce": probe.reduce,
    }
    answer_all(read_questions(questions, probe.close), answers, methods)


if __name__ == "__main__":
    serve(*own_streams())
