"""Where ranks meet: the job's store, once all of them are there. It says who is waited for."""

from __future__ import annotations

import json
import os
import platform
import secrets
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from pipeline.distributed.diagnosis import RankProcess, ranks_in_words
from pipeline.distributed.machine import machine_id
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.waiting import DOCTOR, Wait, wait_for_port
from pipeline.distributed.watchdog_store import FAILURE, NOBODY, present
from pipeline.errors import LaunchError


def rendezvous(ranks: Ranks, timeout: timedelta) -> tuple[Store, list[RankProcess]]:
    """The job's store, and all ranks in order. MASTER_ADDR and MASTER_PORT say where.

    What an earlier attempt of the job left in the store is not in what is returned.

    Raises:
        LaunchError: not every rank was there in time, or this one did not reach the master.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = f"rank {ranks.rank} on {platform.node()}"
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = ranks.is_main_process and not by_launcher
    try:
        store = _connect("localhost", port, ranks.world_size, timeout) if serves else None
        # Before torch does: its own wait prints a stack for each attempt, or nothing.
        wait = Wait(timeout.total_seconds())
        wait_for_port(host, port, f"{own} does not reach the master", wait, said=ranks.local_rank == 0)
        store = store or _connect(host, port, ranks.world_size, timeout, serves=False)
        token = _announce(store, ranks.rank)
        if ranks.is_main_process:
            _answer_arrivals(store, 1, attempt=token)
        own_store = _attempt_store(store, token)
        _register(own_store, ranks.rank, os.getpid())
        if ranks.is_main_process:
            _wait_for_all(store, own_store, ranks.world_size, token, Wait(timeout.total_seconds()))
        return own_store, _all_ranks(own_store, ranks.world_size)
    except DistError as error:
        what = "cannot serve as the master" if serves else "did not meet all ranks at the master"
        hint = "; if another job has the port: --master_port, or launch/multi_gpu.sh, which takes a free one"
        reason = str(error).partition(chr(10))[0] + hint * serves
        raise LaunchError(f"{own} {what}, {host}:{port}: {reason}") from None


def _connect(host: str, port: int, world_size: int, timeout: timedelta, serves: bool = True) -> TCPStore:
    return TCPStore(
        host,
        port,
        world_size,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _wait_for_all(store: Store, own_store: Store, world_size: int, attempt: str, wait: Wait) -> None:
    while len(there := _registered(own_store, world_size)) < world_size:
        _answer_arrivals(store, world_size, attempt)
        hosts: dict[str, list[int]] = {}
        for each in there:
            hosts.setdefault(each.host, []).append(each.rank)
        here = ", ".join(f"{ranks_in_words(ranks)} on {host}" for host, ranks in hosts.items())
        missing = sorted(set(range(world_size)) - {each.rank for each in there})
        verb = "are" if len(missing) > 1 else "is"
        wait(
            f"{ranks_in_words(missing)} of {world_size} {verb} not there ({here}: there)",
            f"did each start, and does it reach this machine? {DOCTOR}",
        )


def _announce(store: Store, rank: int) -> str:
    """Says that a process is there as this rank, under a token of its own. It is answered to the token."""
    token = secrets.token_hex(8)
    store.set(f"pipeline/arrived/{rank}", token)
    return token


def _answer_arrivals(store: Store, world_size: int, attempt: str) -> None:
    """Tells those who have arrived so far which attempt of the job they belong to. For rank 0, repeatedly.

    In a store that outlives attempts (torchrun's) they may be of an earlier one: that answer is never read.
    """
    for token in present(store, "arrived", range(world_size)).values():
        store.compare_set(_answer_to(token.decode()), "", attempt)


def _attempt_store(store: Store, token: str) -> Store:
    """What only the processes of this attempt write to and read. Waits for rank 0's answer.

    No number in the environment tells one attempt from the next: torchrun counts failures, each machine its
    own, and not the changes of membership.
    """
    return PrefixStore(f"pipeline/{store.get(_answer_to(token)).decode()}", store)


def _answer_to(token: str) -> str:
    return f"pipeline/answer/{token}"


def _register(store: Store, rank: int, pid: int) -> None:
    """Says who this rank is. Before the process group exists."""
    store.set(f"pipeline/process/{rank}", json.dumps([platform.node(), pid, machine_id()]))
    store.compare_set(FAILURE, "", NOBODY)


def _all_ranks(store: Store, world_size: int) -> list[RankProcess]:
    """All ranks, in order; waits until each has registered."""
    values = store.multi_get([f"pipeline/process/{rank}" for rank in range(world_size)])
    return [RankProcess(rank, *json.loads(value)) for rank, value in enumerate(values)]


def _registered(store: Store, world_size: int) -> list[RankProcess]:
    """Those that have registered so far, in order."""
    found = present(store, "process", range(world_size))
    return [RankProcess(rank, *json.loads(value)) for rank, value in found.items()]
