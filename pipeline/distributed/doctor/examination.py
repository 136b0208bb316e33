"""The examination from start to end: every host at once, phase after phase."""

from __future__ import annotations

import os
import platform
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from typing import Any, TypeVar

from pipeline.distributed.doctor import facts, network_facts
from pipeline.distributed.doctor.checks import (
    address_of,
    addresses_of,
    check_all_reduce,
    check_clocks,
    check_interfaces,
    check_machines,
    check_names,
    check_ports,
    check_sharing,
    chosen_interfaces,
    is_loopback,
    silence,
)
from pipeline.distributed.doctor.probe import Answered, Examine
from pipeline.distributed.doctor.rows import Row, Seen, Wanted
from pipeline.distributed.doctor.session import PROBE, Measured, Part, Session, SilentError, over_command
from pipeline.distributed.launch.ssh import local_command, ssh_command

Result = TypeVar("Result")
LIMIT = 40.0
"""Seconds for the all-reduce."""
PASSED_ON = ("NCCL_", "GLOO_", "TORCH_EXTENSIONS_DIR")
"""What of this shell's environment changes what the doctor sees."""
REACHING = {"ssh", "python", "folder"}
BLOCKING = REACHING | {"project", "versions", "devices", "driver", "hosts", "names", "ports", "interface"}
"""A fault in one of these would only be seen again, later and less clearly, in an all-reduce."""


def examine(wanted: Wanted, sessions: Mapping[str, Session] | None = None) -> list[Row]:
    """Asks every host, all at once, and judges.

    Args:
        sessions: Hosts that are connected already, by name. Closed at the end. Default: they are opened.

    Returns:
        A row for each check, or for each fault that it found.
    """
    folder, python = Path.cwd(), sys.executable
    opened = sessions is None
    if sessions is None:
        sessions = {
            host: over_command(
                host, ssh_command(host, PROBE, folder, python) if wanted.is_remote else local_command(PROBE)
            )
            for host in wanted.devices
        }
    try:
        rows = _Examination(wanted, sessions).run(folder, python)
    finally:
        _all(sessions.values(), Session.close)
    if opened and wanted.is_remote and not any(row.check in REACHING for row in rows):
        rows.insert(0, Row("ssh", "ok", "every host, without a question"))
    return rows


def this_machine(wanted: Wanted) -> Wanted:
    """The same, of this machine alone and all its devices."""
    return replace(wanted, devices={platform.node(): None}, is_remote=False)


class _Examination:
    def __init__(self, wanted: Wanted, sessions: Mapping[str, Session]):
        self._wanted, self._sessions = wanted, sessions
        here = Answered(
            project=facts.read_project(),
            versions=facts.read_versions(),
            network=network_facts.read_network([]),
        )
        self._seen = Seen(wanted, here, {})

    def run(self, folder: Path, python: str) -> list[Row]:
        answers, silent = self._ask_all("examine", self._questions(), seconds=25)
        rows = [silence(host, error, folder, python) for host, error in silent.items()]
        offsets, _ = _all([self._sessions[host] for host in answers], Session.clock_offset)
        self._seen = replace(self._seen, facts=answers, offsets=offsets)
        rows += check_machines(self._seen)
        if self._wanted.is_remote:
            rows += check_clocks(self._seen) + check_names(self._seen)
        if len(self._wanted.devices) > 1:
            rows += self._connect()
        if not self._wanted.quick and answers:
            rows += self._all_reduce(rows)
        return rows

    def _ask_all(
        self, method: str, values: Mapping[str, Any], seconds: float
    ) -> tuple[dict[str, Any], dict[str, SilentError]]:
        asked = [session for host, session in self._sessions.items() if host in values]
        return _all(asked, lambda session: session.ask(method, values[session.name], seconds=seconds))

    def _questions(self) -> dict[str, Examine]:
        token, names = secrets.token_hex(8), list(self._wanted.devices)
        environment = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
        return {
            host: Examine(
                token=token,
                name=host,
                names=names,
                folders=list(self._wanted.folders),
                environment=environment,
                load_torch=not self._wanted.quick,
                devices=devices,
            )
            for host, devices in self._wanted.devices.items()
        }

    def _connect(self) -> list[Row]:
        known = {host: each for host, each in self._seen.facts.items() if "network" in each}
        listening = [
            network_facts.Peer(name=host, address=address, port=each["port"])
            for host, each in known.items()
            for address in _spoken(host, known)
        ]
        questions = {
            host: {"peers": [peer for peer in listening if peer["name"] != host], "seconds": 3.0}
            for host in known
        }
        answers, silent = self._ask_all("connect", questions, seconds=12)
        self._seen = replace(
            self._seen,
            links={host: answer["links"] for host, answer in answers.items()},
            sees={host: answer["sees"] for host, answer in answers.items()},
        )
        rows = [
            Row("ports", "fail", error.said, f"is {host} still up?", (host,))
            for host, error in silent.items()
        ]
        if len(answers) > 1:
            rows += check_ports(self._seen) + check_interfaces(self._seen) + check_sharing(self._seen)
        return rows

    def _all_reduce(self, rows: Sequence[Row]) -> list[Row]:
        blocking = sorted({row.check for row in rows if row.status == "fail" and row.check in BLOCKING})
        if blocking:
            return [Row("all-reduce", "warning", "not tried", f"first: {', '.join(blocking)}")]
        ranks = self._ranks()
        places = [host for host, devices in ranks.items() for _ in devices]
        master = places[0]
        address = (address_of(master, self._seen.facts) if len(ranks) > 1 else None) or "127.0.0.1"
        question = {master: {"address": address, "seconds": LIMIT}}
        served, silent = self._ask_all("serve", question, seconds=LIMIT + 2)
        problem = silent[master].said if silent else served[master].get("problem", "")
        if problem:
            return check_all_reduce(self._seen, places, [], f"{master}: {problem}")
        rounds = ring([len(devices) for devices in ranks.values()])
        number = count()
        questions: dict[str, Any] = {}
        for host, devices in ranks.items():
            parts = [
                Part(
                    rank=next(number),
                    world_size=len(places),
                    device=device,
                    address=address,
                    port=served[master]["port"],
                    rounds=rounds,
                    seconds=LIMIT,
                )
                for device in devices
            ]
            questions[host] = {"parts": parts, "seconds": LIMIT}
        answers, silent = self._ask_all("reduce", questions, seconds=LIMIT + 5)
        results: list[Measured] = [each for answer in answers.values() for each in answer["results"]]
        said = "; ".join(f"{host}: {error.said}" for host, error in silent.items())
        return check_all_reduce(self._seen, places, results, said)

    def _ranks(self) -> dict[str, list[int | None]]:
        """The devices of each host's ranks: every GPU of the job, or one rank on a host's processors."""
        found: dict[str, list[int | None]] = {}
        for host, each in self._seen.facts.items():
            number, wanted = len(each["devices"]["gpus"]), self._wanted.devices[host]
            found[host] = list(wanted or range(number)) if number else [None]
        return found


def _spoken(host: str, known: Mapping[str, Answered]) -> list[str]:
    """The addresses at which others will look for a host: its own, and what gloo and NCCL would offer."""
    offered = [address for _, address in chosen_interfaces(known[host]).values()]
    every = [address_of(host, known), *offered]
    usable = addresses_of(known[host]["network"])
    return list(dict.fromkeys(a for a in every if a is not None and a in usable and not is_loopback(a)))


def ring(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Transfers from each host to the next, in rounds in which no host takes part twice.

    Args:
        ranks: How many each host has; the n-th of a host sends to the n-th of the next.

    Returns:
        (from, to) of the ranks, by round.
    """
    if len(ranks) < 2:
        return []
    starts = list(accumulate(ranks, initial=0))
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    for number in range(len(ranks)):
        target = (number + 1) % len(ranks)
        last_of_odd = number == len(ranks) - 1 and len(ranks) % 2
        pairs = min(ranks[number], ranks[target])
        rounds[2 if last_of_odd else number % 2] += [
            (starts[number] + n, starts[target] + n) for n in range(pairs)
        ]
    return [each for each in rounds if each]


def _all(
    sessions: Collection[Session], ask: Callable[[Session], Result]
) -> tuple[dict[str, Result], dict[str, SilentError]]:
    """(answers, silence), by host in the job's order: every session at the same time."""

    def attempt(session: Session) -> Result | SilentError:
        try:
            return ask(session)
        except SilentError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(sessions))) as pool:
        results = dict(zip([session.name for session in sessions], pool.map(attempt, sessions), strict=True))
    answers = {host: each for host, each in results.items() if not isinstance(each, SilentError)}
    return answers, {host: each for host, each in results.items() if isinstance(each, SilentError)}
