"""The doctor under srun: a task on each machine is its probe, and task 0 asks them all. No ssh.

The tasks find each other at a port that follows from the job's number.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import replace

from pipeline.distributed.doctor.examination import examine
from pipeline.distributed.doctor.probe import serve
from pipeline.distributed.doctor.rows import Row, Wanted
from pipeline.distributed.doctor.session import PROBE, Session, over_command, over_socket
from pipeline.distributed.launch.ssh import local_command
from pipeline.distributed.ranks import first_host, tasks_per_node
from pipeline.errors import LaunchError

PATIENCE = 20.0
"""Seconds for all tasks to find each other."""


def in_step(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task of srun. A batch script is none, though it runs in a job."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment


def examine_step(environment: Mapping[str, str], wanted: Wanted) -> list[Row] | None:
    """The rows, on task 0; None on the others, once they are no longer needed.

    Raises:
        LaunchError: task 0 is not found.
    """
    if environment["SLURM_LOCALID"] != "0":
        return None  # one task of a machine speaks for it
    name = environment.get("SLURMD_NODENAME") or socket.gethostname()
    count = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    key = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    port = 20_000 + int(environment["SLURM_JOB_ID"]) % 10_000
    slots = slots_of(environment)
    if environment["SLURM_PROCID"] != "0":
        first = first_host(environment["SLURM_STEP_NODELIST"])
        number = int(environment["SLURM_NODEID"])
        _answer(first, port, json.dumps({"key": key, "number": number, "name": name, "slots": slots}))
        return None
    tasks = {0: (over_command(name, local_command(PROBE)), slots)}
    with socket.create_server(("", port)) as server:
        _wait_for_tasks(server, key, count, tasks)
    sessions = {session.name: session for _, (session, _) in sorted(tasks.items())}
    devices = {session.name: wanted_there for _, (session, wanted_there) in sorted(tasks.items())}
    rows = examine(replace(wanted, devices=devices, is_remote=count > 1), sessions)
    missing = count - len(sessions)
    if missing:
        nodes = environment["SLURM_STEP_NODELIST"]
        found = f"{missing} of the {count} hosts {nodes} did not come to {name}:{port}"
        fix = f"let TCP between the hosts through; these came: {', '.join(sessions)}"
        rows.insert(0, Row("hosts", "fail", found, fix))
    return rows


def _wait_for_tasks(
    server: socket.socket, key: str, count: int, tasks: dict[int, tuple[Session, list[int] | None]]
) -> None:
    """Adds to the tasks, by their node's number."""
    deadline = time.monotonic() + PATIENCE
    while len(tasks) < count:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return
        connection.settimeout(5)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not one of us
            said = json.loads(connection.makefile("rb").readline(1000))
            if said["key"] == key:
                connection.settimeout(None)
                tasks[said["number"]] = over_socket(said["name"], connection), said["slots"]
                continue
        connection.close()


def _answer(first: str, port: int, greeting: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            connection = socket.create_connection((first, port), 5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{socket.gethostname()} does not reach {first}:{port}, where task 0 waits: {error}; "
                    "let TCP between the hosts through"
                ) from None
            time.sleep(0.2)
    connection.settimeout(None)
    connection.sendall(greeting.encode() + b"\n")
    serve(connection.makefile("rb"), connection.makefile("wb"))


def slots_of(environment: Mapping[str, str]) -> list[int] | None:
    """Devices of this machine's ranks: one a task; None, all, where one task will start the others itself.

    None also where Slurm gives each task devices of its own: this one sees no other's.
    """
    if "CUDA_VISIBLE_DEVICES" in environment:
        return None
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    here = int(environment.get("SLURM_NODEID", "0"))
    mine = tasks[here] if here < len(tasks) else 1
    return list(range(mine)) if mine > 1 else None
