"""The examination from start to end: opens a process on every host, asks them all, and judges.

Through ssh, on this machine alone, or under srun. There a task on each machine is its probe, and task 0 asks
them all: the tasks find each other at a port that follows from the job's number.
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
from pipeline.distributed.doctor.machine_checks import CHECKS, CheckResult, MachineQuestion, read_here
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
from pipeline.distributed.doctor.node import SilentError, ask, ask_all, clock_offset
from pipeline.distributed.doctor.probe import answer
from pipeline.distributed.doctor.rows import HOST, CheckRow, Fault, group_faults, merge_texts
from pipeline.distributed.launch.ssh import (
    LONGEST_LINE,
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
PASSED_ON = ("NCCL_", "GLOO_", "TORCH_EXTENSIONS_DIR")
"""Variables of this shell that change what the doctor sees."""
CLOCK = (2.0, 0.5)
"""Seconds that a clock may differ before a check fails, or warns."""
REACHING = {"ssh", "python", "folder"}
BLOCKING = REACHING | {
    *("project", "versions", "devices", "driver", "network", "hosts", "names", "ports", "interface")
}
"""Checks whose faults an all-reduce would only show again, later and less clearly."""
TASKS_LIMIT = 120.0
"""Seconds for all tasks of srun to find each other."""


@dataclass(frozen=True)
class ExaminationSettings:
    """Hosts and settings to examine."""

    devices: Mapping[str, list[int] | None]
    """Every host of the job and its devices (None: all it has), in order: the first is the master."""
    quick: bool = False
    """Leave the all-reduce out: torch is not loaded."""
    folders: Sequence[str] = ("runs", "~/.cache/deepspeed-pipeline")
    """Folders that the run writes to; the first is that of its runs."""
    ops: Collection[NativeOp] | None = None
    """Native ops that the run needs; None if no run is known."""
    force_multi: bool = False
    """Whether the launcher will use ssh also for one host."""
    is_remote: bool = True
    """Whether the hosts are reached as the launcher would; False for this machine alone."""


def examine(wanted: ExaminationSettings) -> list[CheckRow]:
    """Examine every host of the job, all at the same time.

    Returns:
        A row for each check, or for each fault that it found.
    """
    return asyncio.run(_examine(wanted))


async def _examine(wanted: ExaminationSettings) -> list[CheckRow]:
    nodes = []
    for host in wanted.devices:
        command = ssh_command(host, PROBE, Path.cwd()) if wanted.is_remote else local_command(PROBE)
        nodes.append(await start_process(host, command))
    rows = await _examine_nodes(wanted, nodes)
    if wanted.is_remote and not any(row.check in REACHING for row in rows):
        rows.insert(0, CheckRow("ssh", "ok", "every host, without a question"))
    return rows


async def _examine_nodes(wanted: ExaminationSettings, nodes: Sequence[NodeProcess]) -> list[CheckRow]:
    try:
        return await _Examination(wanted, {node.name: node for node in nodes}).run()
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


def restrict_to_this_machine(wanted: ExaminationSettings) -> ExaminationSettings:
    """Return the same for this machine alone and all its devices."""
    return replace(wanted, devices={platform.node(): None}, is_remote=False)


@dataclass
class _Examination:
    """Answers so far. Keys are hosts in the job's order, without those that did not answer."""

    wanted: ExaminationSettings
    nodes: Mapping[str, NodeProcess]
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    networks: dict[str, Network] = field(default_factory=dict)

    async def run(self) -> list[CheckRow]:
        """Ask, phase after phase, and return the rows."""
        wanted = self.wanted
        questions = self._questions()
        self.answers, silent = await self._ask("examine", {h: asdict(q) for h, q in questions.items()})
        rows = [explain_silence(host, error) for host, error in silent.items()]
        for host, told in self.answers.items():
            if told["network"] is not None:
                self.networks[host] = Network(**told["network"])
        rows += self._check_machines()
        if wanted.is_remote:
            offsets, _ = await ask_all([self.nodes[host] for host in self.answers], clock_offset)
            rows += check_clocks(offsets)
            rows += self._check_one_remote_host()
            rows += check_names(self.networks)
        if len(wanted.devices) > 1:
            rows += await self._connect()
        if not wanted.quick and self.answers:
            rows += await self._all_reduce(rows)
        return rows

    async def _ask(
        self, method: str, values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, SilentError]]:
        nodes = [self.nodes[host] for host in values]
        return await ask_all(nodes, lambda node: ask(node, method, values[node.name]))

    def _questions(self) -> dict[str, MachineQuestion]:
        wanted = self.wanted
        common = MachineQuestion(
            token=secrets.token_hex(8),
            name="",
            names=list(wanted.devices),
            folders=list(wanted.folders),
            ops=None if wanted.ops is None else [op.label for op in wanted.ops],
            environment={name: text for name, text in os.environ.items() if name.startswith(PASSED_ON)},
            here=read_here(),
            is_remote=wanted.is_remote,
        )
        return {host: replace(common, name=host, devices=devices) for host, devices in wanted.devices.items()}

    def _check_machines(self) -> list[CheckRow]:
        rows = []
        has_gpus = any(told["num_gpus"] for told in self.answers.values())
        for check in (*CHECKS, "network"):
            faults, fine = [], {}
            for host, told in self.answers.items():
                if check not in told["findings"]:
                    continue  # a network that is known has checks of its own
                finding = CheckResult(**told["findings"][check])
                faults += [(host, Fault(**fault)) for fault in finding.faults]  # type: ignore[arg-type]
                fine[host] = finding.fine
                if check == "devices" and has_gpus and not told["num_gpus"]:
                    fix = f"ssh {HOST} nvidia-smi says why; or leave the host out (--exclude)"
                    faults.append((host, Fault("fail", "no GPU, where other hosts have some", fix)))
            if fine:
                rows += group_faults(check, faults, merge_texts(fine))
        return rows

    def _check_one_remote_host(self) -> list[CheckRow]:
        """Warn of deepspeed's trap: of a single host it takes this machine for it."""
        if len(self.wanted.devices) != 1 or self.wanted.force_multi:
            return []
        here = read_network([])
        for host, network in self.networks.items():
            if network.identity != here.identity:
                found = f"{host} alone is chosen and is not this machine: deepspeed would run its ranks here"
                return [CheckRow("hosts", "fail", found, f"add --force_multi, or start on {host}", (host,))]
        return []

    async def _connect(self) -> list[CheckRow]:
        peers = {host: list_peers(host, self.networks) for host in self.networks}
        answers, silent = await self._ask("connect", peers)
        rows = [
            CheckRow("ports", "fail", error.said, f"is {host} still up?", (host,))
            for host, error in silent.items()
        ]
        if len(answers) < 2:
            return rows
        links = {host: [Link(**link) for link in told["links"]] for host, told in answers.items()}
        sees = {
            host: told["sees"]
            for host, told in answers.items()
            if not self.answers[host]["findings"]["folders"]["faults"]
        }
        rows += check_ports(self.networks, links) + check_interfaces(self.networks, links)
        return rows + check_sharing(sees, self.wanted.folders[0])

    async def _all_reduce(self, rows: Sequence[CheckRow]) -> list[CheckRow]:
        blocking = sorted({row.check for row in rows if row.status == "fail" and row.check in BLOCKING})
        if blocking:
            return [CheckRow("all-reduce", "warning", "not tried", f"first: {', '.join(blocking)}")]
        devices = {host: self._devices(host) for host in self.answers}
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
        except SilentError as error:
            return check_all_reduce(places, [], f"{master}: {error.said}", has_gpus)
        common = {"world_size": len(places), "address": address, "port": port, "rounds": rounds}
        number = count()
        parts = {
            host: [common | {"rank": next(number), "gpu": gpu} for gpu in of_host]
            for host, of_host in devices.items()
        }
        answers, silent = await self._ask("reduce", parts)
        results = [RankMeasurements(**each) for told in answers.values() for each in told]
        problem = "; ".join(f"{host}: {error.said}" for host, error in silent.items())
        return check_all_reduce(places, results, problem, has_gpus)

    def _devices(self, host: str) -> list[int] | list[None]:
        """Return the devices of a host's ranks: every GPU of the job, or one rank on its processors."""
        num_gpus = self.answers[host]["num_gpus"]
        return list(self.wanted.devices[host] or range(num_gpus)) if num_gpus else [None]


KNOWN = {
    "Permission denied": ("asks for a password, or refuses the key", "ssh-copy-id {host}"),
    "Host key verification failed": (
        "its host key is not known here",
        "compare the fingerprint, then: ssh-keyscan -H {host} >> ~/.ssh/known_hosts",
    ),
    "Could not resolve hostname": (
        "unknown host",
        "correct the name in the hostfile, or give {host} an address in /etc/hosts or ~/.ssh/config",
    ),
    "Connection refused": ("no ssh server answers", "start it there: systemctl start ssh; on {host}"),
    "timed out": ("does not answer", "is {host} up? ping {host}; open port 22 in its firewall"),
    "No route to host": ("there is no way to it", "is {host} up and on this network? ping {host}"),
}
"""Words of ssh -> what is wrong, and what to do."""


def explain_silence(host: str, error: SilentError) -> CheckRow:
    """Return why a host did not answer, by what ssh said."""
    said, folder, python = error.said, Path.cwd(), sys.executable
    check = "ssh" if error.code in (None, 255) else "python"
    last = (said.splitlines() or ["it said nothing"])[-1]
    found = last if error.code is None else f"ended with code {error.code}: {last}"
    fix = f"try it by hand: ssh {host} {python} -c pass"
    for words, (meaning, remedy) in KNOWN.items():
        if words in said:
            found, fix = meaning, remedy.format(host=host)
    if error.code == NO_FOLDER:
        check, found, fix = "folder", f"no folder {folder}", f"rsync -a {folder}/ {host}:{folder}/"
    elif error.code == NO_PYTHON:
        found, fix = f"no program {python}", f"make the same environment on {host}, at the same path"
    elif "No module named " in said:
        package = said.rpartition("named ")[2].splitlines()[0]
        found = f"{python} lacks a package of the project: {package}"
        fix = f"ssh {host} 'cd {folder} && {python} -m pip install -e .'"
    return CheckRow(check, "fail", found, fix, (host,))


def check_clocks(offsets: Mapping[str, float]) -> list[CheckRow]:
    """Compare the clocks with the one here.

    Args:
        offsets: Host -> seconds that its clock is ahead.
    """
    faults = []
    for host, offset in offsets.items():
        if abs(offset) > CLOCK[1]:
            found = f"{abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}"
            fix = f"ssh {HOST} timedatectl set-ntp true (or chronyc makestep)"
            faults.append((host, Fault("fail" if abs(offset) > CLOCK[0] else "warning", found, fix)))
    most = max(map(abs, offsets.values()), default=0.0)
    return group_faults("clock", faults, f"within {max(most, 0.001):.3f} s")


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a task of srun. A batch script is none, though it runs in a job."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment


def examine_step(environment: Mapping[str, str], wanted: ExaminationSettings) -> list[CheckRow] | None:
    """Return the rows on task 0; None on the others, when they are no longer needed.

    Raises:
        LaunchError: Task 0 was not found.
    """
    if environment["SLURM_LOCALID"] != "0":
        return None  # one task of a machine speaks for it
    name = environment.get("SLURMD_NODENAME") or socket.gethostname()
    num_nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    port = 20_000 + int(environment["SLURM_JOB_ID"]) % 10_000
    key = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    slots = read_slots(environment)
    if environment["SLURM_PROCID"] != "0":
        greeting = {"key": key, "number": int(environment["SLURM_NODEID"]), "name": name, "slots": slots}
        _answer_task_0(parse_first_host(environment["SLURM_STEP_NODELIST"]), port, greeting)
        return None
    wanted = replace(wanted, is_remote=num_nodes > 1)
    return asyncio.run(
        _examine_tasks(wanted, name=name, slots=slots, num_nodes=num_nodes, port=port, key=key)
    )


async def _examine_tasks(
    wanted: ExaminationSettings, *, name: str, slots: list[int] | None, num_nodes: int, port: int, key: str
) -> list[CheckRow]:
    found = {0: (await start_process(name, local_command(PROBE)), slots)}
    all_came = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not one of us
            said = json.loads(await reader.readline())
            if said["key"] == key:
                found[said["number"]] = NodeProcess(said["name"], reader, writer), said["slots"]
                if len(found) == num_nodes:
                    all_came.set()
                return
        writer.close()

    if num_nodes > 1:
        server = await asyncio.start_server(greet, port=port, limit=LONGEST_LINE)
        waiting = asyncio.create_task(asyncio.wait_for(all_came.wait(), TASKS_LIMIT))
        await wait_and_report({"": waiting}, lambda _: f"{num_nodes - len(found)} of {num_nodes} hosts")
        waiting.exception()  # a row names those that did not come
        server.close()
    tasks = [task for _, task in sorted(found.items())]
    devices = {node.name: slots for node, slots in tasks}
    rows = await _examine_nodes(replace(wanted, devices=devices), [node for node, _ in tasks])
    if missing := num_nodes - len(tasks):
        what = f"{missing} of the {num_nodes} hosts of the step did not come to {name}:{port}"
        fix = f"let TCP between the hosts through; these came: {', '.join(devices)}"
        rows.insert(0, CheckRow("hosts", "fail", what, fix))
    return rows


def _answer_task_0(first: str, port: int, greeting: Mapping[str, Any]) -> None:
    deadline = time.monotonic() + TASKS_LIMIT
    while True:
        try:
            connection = socket.create_connection((first, port), 10)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{socket.gethostname()} does not reach {first}:{port}, where task 0 waits: {error}; "
                    "let TCP between the hosts through"
                ) from None
            time.sleep(0.2)
    connection.settimeout(None)
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    answer(connection.makefile("rb"), connection.makefile("wb"))


def read_slots(environment: Mapping[str, str]) -> list[int] | None:
    """Return the devices of this machine's ranks, one a task; None if one task will start the others itself.

    None also where Slurm gives each task devices of its own: this one sees no other's.
    """
    if "CUDA_VISIBLE_DEVICES" in environment:
        return None
    tasks = parse_tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    here = int(environment.get("SLURM_NODEID", "0"))
    mine = tasks[here] if here < len(tasks) else 1
    return list(range(mine)) if mine > 1 else None
