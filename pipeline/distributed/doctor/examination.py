"""Examines the hosts of a job: starts a probe on each, asks all of them, and compares their answers.

The probes run on the hosts of a hostfile (through ssh), on this machine alone, or under srun. Under srun the
first task of each machine is its probe, and task 0 asks all of them. The other tasks connect to task 0 at a
port that is computed from the job's number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.distributed.doctor.all_reduce import RankMeasurements, check_all_reduce, plan_ring_transfers
from pipeline.distributed.doctor.machine_checks import (
    CHECKS,
    CheckResult,
    MachineQuestion,
    read_source_and_versions,
)
from pipeline.distributed.doctor.network import (
    Link,
    Network,
    check_interfaces,
    check_names,
    check_ports,
    check_sharing,
    choose_address,
    list_peers,
    read_network,
)
from pipeline.distributed.doctor.node import NoAnswerError, ask, ask_all, clock_offset
from pipeline.distributed.doctor.probe import answer_questions
from pipeline.distributed.doctor.rows import HOST, CheckRow, Fault, group_faults, merge_texts
from pipeline.distributed.launch.ssh import (
    MAX_MESSAGE_BYTES,
    NO_FOLDER,
    NO_PYTHON,
    NodeProcess,
    local_command,
    ssh_command,
    start_process,
    wait_and_report,
)
from pipeline.distributed.op_builds import NativeOp
from pipeline.distributed.ranks import parse_first_host, parse_tasks_per_node
from pipeline.errors import LaunchError

PROBE = "pipeline.distributed.doctor.probe"
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_EXTENSIONS_DIR")
"""Prefixes of the variables of this shell that the probes receive, since they change the results."""
CLOCK_LIMITS = (2.0, 0.5)
"""Seconds by which a clock may differ before the check fails, or warns."""
START_CHECKS = {"ssh", "python", "folder"}
"""Checks that fail if no probe can be started on a host."""
BLOCKING_CHECKS = START_CHECKS | {
    *("project", "versions", "devices", "driver", "network", "hosts", "names", "ports", "interface")
}
"""Checks whose faults would also stop an all-reduce, later and with a less clear message."""
TASKS_TIMEOUT = 120.0
"""Seconds until the probes of all machines under srun must have connected to task 0."""


@dataclass(frozen=True)
class ExaminationSettings:
    """Hosts to examine, and the facts about the run that the checks depend on."""

    devices: Mapping[str, list[int] | None]
    """Host -> its devices (`None`: all of them), in the job's order. The first host is the master."""
    quick: bool = False
    """Whether to skip the all-reduce, so that torch is not loaded."""
    folders: Sequence[str] = ("runs", "~/.cache/deepspeed-pipeline")
    """Folders that the run writes to. The first is the folder of runs."""
    ops: Collection[NativeOp] | None = None
    """Native ops that the run needs; `None` if no run is known."""
    force_multi: bool = False
    """Whether the launcher uses ssh even for a single host."""
    is_remote: bool = True
    """Whether clocks and names are checked, and a fix needs ssh. False for this machine alone."""


def examine(settings: ExaminationSettings) -> list[CheckRow]:
    """Examine all hosts of the job at the same time.

    Returns:
        Rows of all checks: one row for a check that passed, otherwise one for each fault.
    """
    return asyncio.run(_examine(settings))


async def _examine(settings: ExaminationSettings) -> list[CheckRow]:
    nodes = []
    for host in settings.devices:
        command = ssh_command(host, PROBE, Path.cwd()) if settings.is_remote else local_command(PROBE)
        nodes.append(await start_process(host, command))
    rows = await _examine_nodes(settings, nodes)
    if settings.is_remote and not any(row.check in START_CHECKS for row in rows):
        rows.insert(0, CheckRow("ssh", "ok", "connects to every host without a prompt"))
    return rows


async def _examine_nodes(settings: ExaminationSettings, nodes: Sequence[NodeProcess]) -> list[CheckRow]:
    try:
        return await _Examination(settings, {node.name: node for node in nodes}).run()
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


def restrict_to_this_machine(settings: ExaminationSettings) -> ExaminationSettings:
    """Return a copy of the settings, for this machine alone and all its devices."""
    return replace(settings, devices={platform.node(): None}, is_remote=False)


@dataclass
class _Examination:
    """Runs the phases of an examination, and collects the answers.

    `answers` and `networks` have the hosts in the job's order, without those that did not answer.
    """

    settings: ExaminationSettings
    nodes: Mapping[str, NodeProcess]
    """Host -> its probe."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host -> result of Probe.examine."""
    networks: dict[str, Network] = field(default_factory=dict)
    """Host -> its view of the network. It lacks hosts that could not read theirs."""

    async def run(self) -> list[CheckRow]:
        """Run all phases one after another, and return their rows."""
        settings = self.settings
        questions = {host: asdict(question) for host, question in self._build_questions().items()}
        self.answers, silent = await self._ask("examine", questions)
        rows = [describe_missing_answer(host, error) for host, error in silent.items()]
        for host, answer in self.answers.items():
            if answer["network"] is not None:
                self.networks[host] = Network(**answer["network"])
        rows += self._check_machines()
        if settings.is_remote:
            offsets, _ = await ask_all([self.nodes[host] for host in self.answers], clock_offset)
            rows += check_clocks(offsets)
            rows += self._check_one_remote_host()
            rows += check_names(self.networks)
        if len(settings.devices) > 1:
            rows += await self._connect()
        if not settings.quick and self.answers:
            rows += await self._all_reduce(rows)
        return rows

    async def _ask(
        self, method: str, values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, NoAnswerError]]:
        """Ask the hosts of `values` the same question, each with its value. See `ask_all`."""
        nodes = [self.nodes[host] for host in values]
        return await ask_all(nodes, lambda node: ask(node, method, values[node.name]))

    def _build_questions(self) -> dict[str, MachineQuestion]:
        """Return the question to each host."""
        settings = self.settings
        common = MachineQuestion(
            token=secrets.token_hex(8),
            name="",
            names=list(settings.devices),
            folders=list(settings.folders),
            ops=None if settings.ops is None else [op.label for op in settings.ops],
            environment={
                name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)
            },
            here=read_source_and_versions(),
            is_remote=settings.is_remote,
        )
        return {
            host: replace(common, name=host, devices=devices) for host, devices in settings.devices.items()
        }

    def _check_machines(self) -> list[CheckRow]:
        """Return the rows of the checks that each machine ran for itself."""
        rows = []
        has_gpus = any(answer["num_gpus"] for answer in self.answers.values())
        for check in (*CHECKS, "network"):
            faults = []
            fine = {}
            for host, answer in self.answers.items():
                if check not in answer["findings"]:
                    continue  # the network could be read, and its own checks judge it
                result = CheckResult(**answer["findings"][check])
                faults += [(host, Fault(**fault)) for fault in result.faults]  # type: ignore[arg-type]
                fine[host] = result.fine
                if check == "devices" and has_gpus and not answer["num_gpus"]:
                    fix = f"ssh {HOST} nvidia-smi shows the reason; or exclude the host (--exclude {HOST})"
                    faults.append((host, Fault("fail", "no GPU, although other hosts have GPUs", fix)))
            if fine:
                rows += group_faults(check, faults, merge_texts(fine))
        return rows

    def _check_one_remote_host(self) -> list[CheckRow]:
        """Report a single host that is not this machine: deepspeed would ignore its name and start here."""
        if len(self.settings.devices) != 1 or self.settings.force_multi:
            return []
        here = read_network([])
        for host, network in self.networks.items():
            if network.identity != here.identity:
                found = f"{host} is the only host, but deepspeed would start its ranks on this machine"
                fix = f"add --force_multi, or start on {host}"
                return [CheckRow("hosts", "fail", found, fix, (host,))]
        return []

    async def _connect(self) -> list[CheckRow]:
        """Let all hosts connect to each other, and return the rows of ports, interfaces and run folders."""
        peers = {host: list_peers(host, self.networks) for host in self.networks}
        answers, silent = await self._ask("connect", peers)
        rows = [
            CheckRow("ports", "fail", error.reason, f"check that {host} is still up: ping {host}", (host,))
            for host, error in silent.items()
        ]
        if len(answers) < 2:
            return rows
        links = {host: [Link(**link) for link in answer["links"]] for host, answer in answers.items()}
        sees = {
            host: answer["sees"]
            for host, answer in answers.items()
            if not self.answers[host]["findings"]["folders"]["faults"]
        }
        rows += check_ports(self.networks, links) + check_interfaces(self.networks, links)
        return rows + check_sharing(sees, self.settings.folders[0])

    async def _all_reduce(self, rows: Sequence[CheckRow]) -> list[CheckRow]:
        """Run the all-reduce over all ranks of the job, and return its rows.

        Args:
            rows: Rows of the earlier checks. If a blocking check failed, the all-reduce is skipped.
        """
        blocking = sorted(
            {row.check for row in rows if row.status == "fail" and row.check in BLOCKING_CHECKS}
        )
        if blocking:
            fix = f"repair these first: {', '.join(blocking)}"
            return [CheckRow("all-reduce", "warning", "skipped", fix)]
        devices = {host: self._list_devices(host) for host in self.answers}
        places = [host for host, of_host in devices.items() for _ in of_host]
        first_ranks = [places.index(host) for host in devices]
        rounds = [
            [[first_ranks[source], first_ranks[target]] for source, target in pairs]
            for pairs in plan_ring_transfers(len(devices))
        ]
        master = places[0]
        address = (choose_address(master, self.networks) if len(devices) > 1 else None) or "127.0.0.1"
        has_gpus = devices[master] != [None]
        try:
            port = await ask(self.nodes[master], "free port")
        except NoAnswerError as error:
            return check_all_reduce(places, [], f"{master}: {error.reason}", has_gpus)
        common = {"world_size": len(places), "address": address, "port": port, "rounds": rounds}
        rank = count()
        parts = {
            host: [common | {"rank": next(rank), "gpu": gpu} for gpu in of_host]
            for host, of_host in devices.items()
        }
        answers, silent = await self._ask("reduce", parts)
        results = [RankMeasurements(**measured) for answer in answers.values() for measured in answer]
        problem = "; ".join(f"{host}: {error.reason}" for host, error in silent.items())
        return check_all_reduce(places, results, problem, has_gpus)

    def _list_devices(self, host: str) -> list[int] | list[None]:
        """Return the GPU of each rank of a host; a host without GPUs has one rank, whose GPU is `None`."""
        num_gpus = self.answers[host]["num_gpus"]
        return list(self.settings.devices[host] or range(num_gpus)) if num_gpus else [None]


SSH_FAULTS = {
    "Permission denied": ("asks for a password, or refuses the key", "ssh-copy-id {host}"),
    "Host key verification failed": (
        "its host key is not known here",
        "compare the fingerprint, then: ssh-keyscan -H {host} >> ~/.ssh/known_hosts",
    ),
    "Could not resolve hostname": (
        "unknown host",
        "correct the name in the hostfile, or give {host} an address in /etc/hosts or ~/.ssh/config",
    ),
    "Connection refused": ("no ssh server answers", "start the server on {host}: systemctl start ssh"),
    "timed out": ("does not answer", "check that {host} is up (ping {host}) and lets port 22 through"),
    "No route to host": ("no route to this host", "check that {host} is up and on this network: ping {host}"),
}
"""Words in the output of ssh -> the fault, and its fix."""


def describe_missing_answer(host: str, error: NoAnswerError) -> CheckRow:
    """Return the row of a host that did not answer, by the exit code and the output of ssh."""
    output = error.reason
    folder = Path.cwd()
    python = sys.executable
    check = "ssh" if error.code in (None, 255) else "python"  # 255 is ssh's own exit code
    last_line = (output.splitlines() or ["no output"])[-1]
    found = last_line if error.code is None else f"exit code {error.code}: {last_line}"
    fix = f"run this command by hand: ssh {host} {python} -c pass"
    for words, (known_fault, known_fix) in SSH_FAULTS.items():
        if words in output:
            found = known_fault
            fix = known_fix.format(host=host)
    if error.code == NO_FOLDER:
        check = "folder"
        found = f"no folder {folder}"
        fix = f"copy it: rsync -a {folder}/ {host}:{folder}/"
    elif error.code == NO_PYTHON:
        found = f"no program {python}"
        fix = f"create the same environment on {host}, at the same path"
    elif "No module named " in output:
        package = output.rpartition("named ")[2].splitlines()[0]
        found = f"{python} lacks a package of the project: {package}"
        fix = f"ssh {host} 'cd {folder} && {python} -m pip install -e .'"
    return CheckRow(check, "fail", found, fix, (host,))


def check_clocks(offsets: Mapping[str, float]) -> list[CheckRow]:
    """Compare the clocks of all hosts with the launching machine's clock.

    Args:
        offsets: Host -> seconds by which its clock is ahead; negative if it is behind.
    """
    faults = []
    for host, offset in offsets.items():
        if abs(offset) > CLOCK_LIMITS[1]:
            direction = "ahead of" if offset > 0 else "behind"
            found = f"{abs(offset):.1f} s {direction} the launching machine's clock"
            fix = f"ssh {HOST} timedatectl set-ntp true (or chronyc makestep)"
            faults.append((host, Fault("fail" if abs(offset) > CLOCK_LIMITS[0] else "warning", found, fix)))
    largest = max(map(abs, offsets.values()), default=0.0)
    return group_faults("clock", faults, f"within {max(largest, 0.001):.3f} s")


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a task of srun. A batch script runs in a job, but is not a task."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment


def examine_step(environment: Mapping[str, str], settings: ExaminationSettings) -> list[CheckRow] | None:
    """Examine the machines of a Slurm step. Every task of srun calls this.

    Task 0 examines the machines of all tasks. The first task of every other machine answers its questions,
    and its process ends when there are no more.

    Args:
        environment: Variables that srun has set.
        settings: Facts about the run; the hosts are replaced by those of the step.

    Returns:
        Rows on task 0; `None` on a further task of a machine, which has nothing to do.

    Raises:
        LaunchError: Task 0 cannot be reached.
    """
    if environment["SLURM_LOCALID"] != "0":
        return None  # one task of each machine is enough
    name = environment.get("SLURMD_NODENAME") or socket.gethostname()
    num_nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    port = 20_000 + int(environment["SLURM_JOB_ID"]) % 10_000
    key = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    slots = read_slots(environment)
    if environment["SLURM_PROCID"] != "0":
        greeting = {"key": key, "number": int(environment["SLURM_NODEID"]), "name": name, "slots": slots}
        _answer_task_0(parse_first_host(environment["SLURM_STEP_NODELIST"]), port, greeting)
        return None
    settings = replace(settings, is_remote=num_nodes > 1)
    return asyncio.run(
        _examine_tasks(settings, name=name, slots=slots, num_nodes=num_nodes, port=port, key=key)
    )


async def _examine_tasks(
    settings: ExaminationSettings, *, name: str, slots: list[int] | None, num_nodes: int, port: int, key: str
) -> list[CheckRow]:
    """Wait for the tasks of the other machines to connect, and examine all machines. Task 0 calls this.

    Args:
        settings: Facts about the run; the hosts are replaced by those that connect.
        name: Name of this machine.
        slots: Devices of this machine's ranks (see `read_slots`).
        num_nodes: Number of machines.
        port: Port to which the other tasks connect.
        key: Text that every task of this step sends in its greeting.
    """
    connected = {0: (await start_process(name, local_command(PROBE)), slots)}
    are_all_connected = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not a task of this step
            greeting = json.loads(await reader.readline())
            if greeting["key"] == key:
                node = NodeProcess(greeting["name"], reader, writer)
                connected[greeting["number"]] = (node, greeting["slots"])
                if len(connected) == num_nodes:
                    are_all_connected.set()
                return
        writer.close()

    if num_nodes > 1:
        server = await asyncio.start_server(greet, port=port, limit=MAX_MESSAGE_BYTES)
        waiting = asyncio.create_task(asyncio.wait_for(are_all_connected.wait(), TASKS_TIMEOUT))
        await wait_and_report({"": waiting}, lambda _: f"{num_nodes - len(connected)} of {num_nodes} hosts")
        waiting.exception()  # mark a timeout as handled: a row below reports the missing hosts
        server.close()
    tasks = [task for _, task in sorted(connected.items())]
    devices = {node.name: slots for node, slots in tasks}
    rows = await _examine_nodes(replace(settings, devices=devices), [node for node, _ in tasks])
    num_missing = num_nodes - len(tasks)
    if num_missing:
        found = f"{num_missing} of the {num_nodes} hosts of the step did not connect to {name}:{port}"
        fix = f"allow TCP between the hosts; these connected: {', '.join(devices)}"
        rows.insert(0, CheckRow("hosts", "fail", found, fix))
    return rows


def _answer_task_0(first: str, port: int, greeting: Mapping[str, Any]) -> None:
    """Connect to task 0, send the greeting, and answer the doctor's questions until the process ends.

    Args:
        first: Host of task 0.
        port: Port of task 0.
        greeting: Number, name and slots of this machine, and the key of the step.

    Raises:
        LaunchError: Task 0 cannot be reached within TASKS_LIMIT.
    """
    deadline = time.monotonic() + TASKS_TIMEOUT
    while True:
        try:
            connection = socket.create_connection((first, port), 10)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{socket.gethostname()} does not reach task 0 at {first}:{port}: {error}; "
                    "allow TCP between the hosts"
                ) from None
            time.sleep(0.2)
    connection.settimeout(None)
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    answer_questions(connection.makefile("rb"), connection.makefile("wb"))


def read_slots(environment: Mapping[str, str]) -> list[int] | None:
    """Return the devices of this machine's ranks, one per task; `None` for all devices that are visible.

    It is `None` if the machine has a single task, which starts all ranks itself. It is also `None` if Slurm
    gives each task its own devices, since this task cannot see those of the others.
    """
    if "CUDA_VISIBLE_DEVICES" in environment:
        return None
    tasks = parse_tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = int(environment.get("SLURM_NODEID", "0"))
    num_tasks = tasks[node] if node < len(tasks) else 1
    return list(range(num_tasks)) if num_tasks > 1 else None
