"""Where ranks meet: the job's store, once all of them are there. Who is waited for is said."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from pipeline.distributed.lines import answer, arrive, everyone, introduce, part_of_attempt, whoever
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.verdict import Who, ranks_in_words
from pipeline.errors import LaunchError

PATIENCE = 30.0
"""Seconds until it is said who is waited for; less where the timeout is short."""
DOCTOR = "python -m pipeline doctor --hostfile HOSTFILE"


class _Wait:
    """A wait that says what it waits for: after a while, then after twice as long, and so on."""

    def __init__(self, seconds: float):
        self._began = time.monotonic()
        self._seconds = seconds
        self._say_after = min(PATIENCE, seconds / 4)

    def __call__(self, line: str, advice: str, said: bool = True) -> None:
        """Waits a moment more.

        Raises:
            LaunchError: that was too long.
        """
        waited = time.monotonic() - self._began
        if waited > self._seconds:
            raise LaunchError(f"{line} after {waited:.0f} s (distributed.timeout_seconds); {advice}")
        if waited > self._say_after and said:
            print(f"waiting: {line} after {waited:.0f} s", file=sys.stderr, flush=True)
        if waited > self._say_after:
            self._say_after *= 2
        time.sleep(0.05)


def meet(ranks: Ranks, timeout: timedelta) -> tuple[Store, list[Who]]:
    """The job's store, and all ranks in order. MASTER_ADDR and MASTER_PORT say where.

    What an earlier attempt of the job left in the store is not in what is returned.

    Raises:
        LaunchError: not every rank was there in time, or this one did not reach the master.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = f"rank {ranks.rank} on {platform.node()}"
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = ranks.is_main_process and not by_launcher
    if not serves:  # torch's own wait prints a stack for each attempt
        _reach(host, port, own, _Wait(timeout.total_seconds()), said=ranks.local_rank == 0)
    try:
        store = TCPStore(
            host,
            port,
            ranks.world_size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        token = arrive(store, ranks.rank)
        if ranks.is_main_process:
            answer(store, 1, attempt=token)
        own_part = part_of_attempt(store, token)
        introduce(own_part, ranks.rank, os.getpid())
        if ranks.is_main_process:
            _wait_for_all(store, own_part, ranks.world_size, token, _Wait(timeout.total_seconds()))
        return own_part, everyone(own_part, ranks.world_size)
    except DistError as error:
        what = "cannot serve as the master" if serves else "did not meet all ranks at the master"
        raise LaunchError(f"{own} {what}, {host}:{port}: {str(error).partition(chr(10))[0]}") from None


def _reach(host: str, port: int, own: str, wait: _Wait, said: bool) -> None:
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            line = f"{own} does not reach the master, {host}:{port} ({error.strerror or error})"
            wait(line, f"what is in the way: {DOCTOR}", said)


def _wait_for_all(store: Store, own_part: Store, world_size: int, attempt: str, wait: _Wait) -> None:
    while len(there := whoever(own_part, world_size)) < world_size:
        answer(store, world_size, attempt)
        hosts: dict[str, list[int]] = {}
        for who in there:
            hosts.setdefault(who.host, []).append(who.rank)
        here = ", ".join(f"{ranks_in_words(ranks)} on {host}" for host, ranks in hosts.items())
        missing = sorted(set(range(world_size)) - {who.rank for who in there})
        verb = "are" if len(missing) > 1 else "is"
        wait(
            f"{ranks_in_words(missing)} of {world_size} {verb} not there ({here}: there)",
            f"did each start, and does it reach this machine? {DOCTOR}",
        )
