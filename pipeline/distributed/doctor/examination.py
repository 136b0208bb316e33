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
from typing import Any, NoReturn

from pipeline.distributed.doctor.all_reduce import RankMeasurements, check_all_reduce, plan_ring_transfers
from pipeline.distributed.doctor.machine_checks import (
    CHECKS,
    CheckResult,
    MachineQuestion,
    format_sync_command,
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
from pipeline.distributed.doctor.node import NoAnswerError, ask, ask_all, measure_clock_offset
from pipeline.distributed.doctor.probe import answer_questions
from pipeline.distributed.doctor.rows import (
    HOST,
    CheckRow,
    Fault,
    Status,
    group_faults,
    merge_texts,
    skip_check,
)
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

PROBE_MODULE = "pipeline.distributed.doctor.probe"
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_EXTENSIONS_DIR")
"""Prefixes of the variables of this shell that the probes receive, because they change the results."""
CLOCK_LIMITS = (2.0, 0.5)
"""Seconds by which a clock may differ before the check fails, and before it warns."""
START_CHECKS = {"ssh", "python", "folder"}
"""Checks that find out whether a probe can be started on a host. If none can be, one of them fails."""
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
    """Whether to check clocks and names too, and to begin a fix with ssh. False for this machine alone."""


def examine(settings: ExaminationSettings) -> list[CheckRow]:
    """Examine all hosts of the job at the same time.

    Returns:
        Rows of all checks: one row for a check that passed, otherwise one for each distinct fault.

    Raises:
        LaunchError: ssh is not installed on this machine.
    """
    return asyncio.run(_examine(settings))


async def _examine(settings: ExaminationSettings) -> list[CheckRow]:
    """Start a probe on every host, and examine the hosts."""
    nodes = []
    for host in settings.devices:
        command = (
            ssh_command(host, PROBE_MODULE, Path.cwd()) if settings.is_remote else local_command(PROBE_MODULE)
        )
        nodes.append(await start_process(host, command))
    rows = await _examine_nodes(settings, nodes)
    if settings.is_remote and not any(row.check in START_CHECKS for row in rows):
        rows.insert(0, CheckRow("ssh", "ok", "connects to every host without a prompt"))
    return rows


async def _examine_nodes(settings: ExaminationSettings, nodes: Sequence[NodeProcess]) -> list[CheckRow]:
    """Examine the hosts by their probes, and end the probes."""
    try:
        return await _Examination(settings, {node.name: node for node in nodes}).run()
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


def restrict_to_this_machine(settings: ExaminationSettings) -> ExaminationSettings:
    """Return a copy of the settings, for this machine alone and all its devices."""
    return replace(settings, devices={platform.node(): None}, is_remote=False)


@dataclass
class _Examination:
    """Runs the phases of one examination, and collects the answers.

    `answers` and `networks` are in the job's order, and lack the hosts that did not answer.
    """

    settings: ExaminationSettings
    nodes: Mapping[str, NodeProcess]
    """Host -> its probe."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host -> result of Probe.examine."""
    networks: dict[str, Network] = field(default_factory=dict)
    """Host -> its view of the network. Hosts that could not read it are left out."""

    async def run(self) -> list[CheckRow]:
        """Run all phases one after another, and return their rows."""
        settings = self.settings
        questions = {host: asdict(question) for host, question in self._build_questions().items()}
        self.answers, errors = await self._ask("examine", questions)
        rows = [describe_missing_answer(host, error) for host, error in errors.items()]
        for host, answer in self.answers.items():
            if answer["network"] is not None:
                self.networks[host] = Network(**answer["network"])
        rows += self._check_machines()
        if settings.is_remote:
            offsets, _ = await ask_all([self.nodes[host] for host in self.answers], measure_clock_offset)
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
        """Ask several hosts the same question at the same time.

        Args:
            method: Name of the question.
            values: Host -> argument of its question.

        Returns:
            Host -> its answer, and host -> its error for the hosts that did not answer.
        """
        nodes = [self.nodes[host] for host in values]
        return await ask_all(nodes, lambda node: ask(node, method, values[node.name]))

    def _build_questions(self) -> dict[str, MachineQuestion]:
        """Return the question to each host."""
        settings = self.settings
        common = MachineQuestion(
            token=secrets.token_hex(8),
            host="",  # set for each host below
            hosts=list(settings.devices),
            folders=list(settings.folders),
            ops=None if settings.ops is None else [op.label for op in settings.ops],
            environment={
                name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)
            },
            launching_machine=read_source_and_versions(),
            is_remote=settings.is_remote,
        )
        return {
            host: replace(common, host=host, devices=devices) for host, devices in settings.devices.items()
        }

    def _check_machines(self) -> list[CheckRow]:
        """Return the rows of the checks that each machine ran for itself."""
        rows = []
        has_gpus = any(answer["num_gpus"] for answer in self.answers.values())
        for check in (*CHECKS, "network"):
            faults = []
            ok_texts = {}
            for host, answer in self.answers.items():
                if check not in answer["findings"]:
                    continue  # the host has read its network; check_names and others compare the networks
                result = CheckResult(**answer["findings"][check])
                faults += [(host, Fault(**fault)) for fault in result.faults]  # type: ignore[arg-type]
                ok_texts[host] = result.ok_text
                if check == "devices" and has_gpus and not answer["num_gpus"]:
                    fix = f"ssh {HOST} nvidia-smi shows the reason; or exclude the host (--exclude {HOST})"
                    faults.append((host, Fault("fail", "no GPU, although other hosts have GPUs", fix)))
            if ok_texts:
                rows += group_faults(check, faults, merge_texts(ok_texts))
        return rows

    def _check_one_remote_host(self) -> list[CheckRow]:
        """Return a failed row if the only host is another machine than this one.

        deepspeed would ignore the host's name, and start the ranks on this machine.
        """
        if len(self.settings.devices) != 1 or self.settings.force_multi:
            return []
        own_identity = read_network([]).identity
        for host, network in self.networks.items():
            if network.identity != own_identity:
                text = f"{host} is the only host, but deepspeed would start its ranks on this machine"
                fix = f"add --force_multi, or start on {host}"
                return [CheckRow("hosts", "fail", text, fix, (host,))]
        return []

    async def _connect(self) -> list[CheckRow]:
        """Let all hosts connect to each other, and return the rows of ports, interfaces and run folders."""
        peers = {host: list_peers(host, self.networks) for host in self.networks}
        answers, errors = await self._ask("connect", peers)
        rows = [
            CheckRow("ports", "fail", error.reason, f"check that {host} is still up: ping {host}", (host,))
            for host, error in errors.items()
        ]
        if len(answers) < 2:
            return rows
        links = {host: [Link(**link) for link in answer["links"]] for host, answer in answers.items()}
        visible_hosts = {
            host: answer["visible_hosts"]
            for host, answer in answers.items()
            if not self.answers[host]["findings"]["folders"]["faults"]
        }
        rows += check_ports(self.networks, links) + check_interfaces(self.networks, links)
        return rows + check_sharing(visible_hosts, self.settings.folders[0])

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
        gpus = {host: self._list_gpus(host) for host in self.answers}
        rank_hosts = [host for host, host_gpus in gpus.items() for _ in host_gpus]
        # The first rank of each host measures the links of its host.
        first_ranks = [rank_hosts.index(host) for host in gpus]
        rounds = [
            [[first_ranks[source], first_ranks[target]] for source, target in transfers]
            for transfers in plan_ring_transfers(len(gpus))
        ]
        master = rank_hosts[0]
        address = choose_address(master, self.networks) if len(gpus) > 1 else None
        has_gpus = gpus[master] != [None]
        try:
            port = await ask(self.nodes[master], "free port")
        except NoAnswerError as error:
            return check_all_reduce(rank_hosts, [], f"{master}: {error.reason}", has_gpus)
        common = {
            "world_size": len(rank_hosts),
            "address": address or "127.0.0.1",
            "port": port,
            "rounds": rounds,
        }
        rank = count()
        arguments = {
            host: [common | {"rank": next(rank), "gpu": gpu} for gpu in host_gpus]
            for host, host_gpus in gpus.items()
        }
        answers, errors = await self._ask("reduce", arguments)
        results = [RankMeasurements(**fields) for answer in answers.values() for fields in answer]
        problem = "; ".join(f"{host}: {error.reason}" for host, error in errors.items())
        return check_all_reduce(rank_hosts, results, problem, has_gpus)

    def _list_gpus(self, host: str) -> list[int] | list[None]:
        """Return the GPU of each rank of a host; a host without GPUs has one rank, whose GPU is `None`."""
        num_gpus = self.answers[host]["num_gpus"]
        if not num_gpus:
            return [None]
        return list(self.settings.devices[host] or range(num_gpus))


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
"""Words in the output of ssh -> description of the fault, and its fix."""


def describe_missing_answer(host: str, error: NoAnswerError) -> CheckRow:
    """Return the row of a host that did not answer, by the exit code and the output of ssh."""
    output = error.reason
    folder = Path.cwd()
    python = sys.executable
    check = "ssh" if error.code in (None, 255) else "python"  # 255 is ssh's own exit code
    last_line = (output.splitlines() or ["no output"])[-1]
    text = last_line if error.code is None else f"exit code {error.code}: {last_line}"
    fix = f"run this command by hand: ssh {host} {python} -c pass"
    for words, (ssh_fault, ssh_fix) in SSH_FAULTS.items():
        if words in output:
            text = ssh_fault
            fix = ssh_fix.format(host=host)
    if error.code == NO_FOLDER:
        check = "folder"
        text = f"no folder {folder}"
        fix = f"copy it: rsync -a {folder}/ {host}:{folder}/"
    elif error.code == NO_PYTHON:
        text = f"no program {python}"
        fix = f"create the same environment on {host}, at the same path"
    elif "No module named " in output:
        package = output.rpartition("named ")[2].splitlines()[0]
        text = f"{python} lacks a package of the project: {package}"
        fix = f"ssh {host} 'cd {folder} && {python} -m pip install -e .'"
    elif "unexpected keyword argument" in output:  # a question with a field that only this version has
        check = "project"
        text = f"the project is not the version of the launching machine ({last_line})"
        fix = format_sync_command().replace(HOST, host)
    return CheckRow(check, "fail", text, fix, (host,))


def check_clocks(offsets: Mapping[str, float]) -> list[CheckRow]:
    """Compare the clocks of all hosts with the launching machine's clock.

    Args:
        offsets: Host -> seconds by which its clock is ahead; negative if it is behind.
    """
    if not offsets:
        return skip_check("clock")
    faults = []
    for host, offset in offsets.items():
        if abs(offset) > CLOCK_LIMITS[1]:
            direction = "ahead of" if offset > 0 else "behind"
            description = f"{abs(offset):.1f} s {direction} the launching machine's clock"
            fix = f"ssh {HOST} timedatectl set-ntp true (or chronyc makestep)"
            status: Status = "fail" if abs(offset) > CLOCK_LIMITS[0] else "warning"
            faults.append((host, Fault(status, description, fix)))
    largest = max(map(abs, offsets.values()), default=0.0)
    return group_faults("clock", faults, f"within {max(largest, 0.001):.3f} s")


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a task of srun. A batch script runs in a job, but is not a task."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment


def examine_step(environment: Mapping[str, str], settings: ExaminationSettings) -> list[CheckRow] | None:
    """Examine the machines of a Slurm step. Every task of srun calls this.

    Task 0 examines the machines of all tasks. The first task of every other machine answers the questions of
    task 0. This function does not return there: the process ends when task 0 is done.

    Args:
        environment: Variables that srun has set.
        settings: Facts about the run; the hosts are replaced by those of the step.

    Returns:
        Rows of all checks on task 0; `None` on the second and further tasks of a machine, which do nothing.

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
    # Number of each machine in the step -> its probe, and the devices of its ranks.
    connected = {0: (await start_process(name, local_command(PROBE_MODULE)), slots)}
    are_all_connected = asyncio.Event()

    async def accept_task(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the greeting of a task, and add its machine to `connected`; else close the connection."""
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
        server = await asyncio.start_server(accept_task, port=port, limit=MAX_MESSAGE_BYTES)
        waiting = asyncio.create_task(asyncio.wait_for(are_all_connected.wait(), TASKS_TIMEOUT))
        await wait_and_report({"": waiting}, lambda _: f"{num_nodes - len(connected)} of {num_nodes} hosts")
        waiting.exception()  # mark a timeout as handled: a row below reports the missing hosts
        server.close()
    tasks = [task for _, task in sorted(connected.items())]
    devices = {node.name: node_slots for node, node_slots in tasks}
    rows = await _examine_nodes(replace(settings, devices=devices), [node for node, _ in tasks])
    num_missing = num_nodes - len(tasks)
    if num_missing:
        text = f"{num_missing} of the {num_nodes} hosts of the step did not connect to {name}:{port}"
        fix = f"allow TCP between the hosts; these connected: {', '.join(devices)}"
        rows.insert(0, CheckRow("hosts", "fail", text, fix))
    return rows


def _answer_task_0(first: str, port: int, greeting: Mapping[str, Any]) -> NoReturn:
    """Connect to task 0, send the greeting, and answer the doctor's questions; does not return.

    Args:
        first: Host of task 0.
        port: Port of task 0.
        greeting: Number, name and slots of this machine, and the key of the step.

    Raises:
        LaunchError: Task 0 cannot be reached within TASKS_TIMEOUT seconds.
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

    The result is `None` if the machine has a single task, because that task starts all ranks itself. It is
    also `None` if Slurm gives each task its own devices, because this task does not see those of the others.

    Args:
        environment: Variables that srun has set.
    """
    if "CUDA_VISIBLE_DEVICES" in environment:
        return None
    tasks = parse_tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = int(environment.get("SLURM_NODEID", "0"))
    num_tasks = tasks[node] if node < len(tasks) else 1
    return list(range(num_tasks)) if num_tasks > 1 else None
