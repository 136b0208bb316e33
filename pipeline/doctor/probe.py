"""The far side of an examination: `python -m pipeline.doctor.probe`, started on every host through ssh.

Reads questions on standard input and answers on standard output (launching/node_agent.py); ends, and removes
what it made, when its input closes. It only looks: no question makes it run a command that came with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypedDict

from pipeline.distributed.machine import available_memory
from pipeline.doctor import facts, network
from pipeline.launching.node_agent import pack, unpack

PATIENCE = 8.0
"""Seconds for each fact: a folder of a file server that is gone never answers."""


class Answered(TypedDict, total=False):
    """The facts; what could not be found out is absent, and stands in `unknown` with the reason."""

    project: facts.Project
    versions: dict[str, str | None]
    devices: facts.Devices
    memory: int
    disks: list[facts.Disk]
    folders: list[facts.Folder]
    ops: facts.Ops
    network: network.Network
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
        self._ranks: list[Rank] = []

    def examine(self, asked: Examine) -> Answered:
        """Every fact, found out at the same time."""
        self._asked = asked
        os.environ.update(asked["environment"])
        listener = network.Listener(f"{asked['token']} {asked['name']}")
        folders = asked["folders"]
        if asked["load_torch"]:  # meanwhile: seconds
            # On processors a rank a host is enough.
            has_gpu = Path("/proc/driver/nvidia/version").exists()
            count = len(asked["devices"] or facts.read_devices()["gpus"]) if has_gpu else 1
            self._ranks = [Rank() for _ in range(max(1, count))]
        questions: dict[str, Callable[[], object]] = {
            "project": facts.read_project,
            "versions": facts.read_versions,
            "devices": facts.read_devices,
            "memory": available_memory,
            "disks": lambda: facts.read_disks(folders),
            "folders": lambda: facts.read_folders(folders, marker(asked["token"], asked["name"])),
            "ops": facts.read_ops,
            "network": lambda: network.read_network(asked["names"]),
        }
        found, unknown = find_out(questions, PATIENCE)
        way = os.environ.get("SSH_CONNECTION", "").split()
        chosen = {k: v for k, v in os.environ.items() if k.endswith("_SOCKET_IFNAME")}
        rest = {"environment": chosen, "address": way[2] if len(way) == 4 else None, "port": listener.port}
        return Answered(**found, **rest, unknown=unknown)  # type: ignore[typeddict-item]

    def connect(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Tries the peers, and looks which hosts' markers it sees."""
        assert self._asked is not None
        token, names = self._asked["token"], self._asked["names"]
        links = network.connect_to(asked["peers"], lambda name: f"{token} {name}", asked["seconds"])
        folder = self._run_folder()
        return {"links": links, "sees": [name for name in names if (folder / marker(token, name)).exists()]}

    def serve(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Opens the store of the all-reduce."""
        self._ranks[0].send({"serve": asked["address"]})
        return self._ranks[0].wait_for("port", asked["seconds"])

    def reduce(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Takes part with this machine's ranks: what each measured, or where it stood at the limit."""
        deadline = time.monotonic() + asked["seconds"]
        for rank, part in zip(self._ranks, asked["parts"], strict=False):
            rank.send(part)
        results = []
        for rank, part in zip(self._ranks, asked["parts"], strict=False):
            answer = rank.wait_for("done", max(0.1, deadline - time.monotonic()))
            stopped = {"rank": part["rank"], "step": rank.step, "problem": answer.get("problem", "")}
            results.append(answer.get("done", stopped))
        return {"results": results}

    def close(self) -> None:
        """Leaves the machine as it was."""
        for rank in self._ranks:
            rank.kill()
        if self._asked is not None:
            with contextlib.suppress(OSError):
                (self._run_folder() / marker(self._asked["token"], self._asked["name"])).unlink()

    def _run_folder(self) -> Path:
        assert self._asked is not None
        return facts.existing(Path(self._asked["folders"][0]).expanduser().absolute())


class Rank:
    """A process of collective.py."""

    def __init__(self) -> None:
        self.step = "loading torch"
        command = [sys.executable, "-m", "pipeline.doctor.collective"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read_answers, self._read_errors)
        ]
        for thread in self._threads:
            thread.start()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-20:], line.decode(errors="replace").strip()]

    def send(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it ended: the answer says so
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def wait_for(self, key: str, seconds: float) -> dict[str, Any]:
        """The answer that holds `key`, or {"problem": why there is none}."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return {"problem": f"still at {self.step} after {seconds:.0f} s"}
            if answer is None:
                self._threads[1].join(1.0)
                last = self._errors[-1] if self._errors else "no message"
                return {"problem": f"ended with code {self._process.wait()} at {self.step}: {last}"}
            self.step = answer.get("step", self.step)
            if key in answer:
                return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


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
    """Until there are no more questions; then the process ends, whatever it waits for.

    A question is {"ask": METHOD, "with": VALUE, "number": N}.
    """
    probe = Probe()
    waiting: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in questions:
                waiting.put(line)
        probe.close()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    methods: dict[str, Callable[[Any], Any]] = {
        "time": lambda _: time.time(),
        "examine": probe.examine,
        "connect": probe.connect,
        "serve": probe.serve,
        "reduce": probe.reduce,
    }
    while True:
        question = unpack(waiting.get())
        if question is None:
            continue
        answer = methods[question["ask"]](question["with"])
        with contextlib.suppress(OSError):  # the doctor is gone: the questions end as well
            answers.write(pack({"number": question["number"], "answer": answer}))
            answers.flush()


if __name__ == "__main__":
    # Whatever a library prints must not get among the answers.
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, own)
