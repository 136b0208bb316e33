"""Where ranks meet: the job's store, once all of them are there. It says who is waited for."""

from __future__ import annotations

import os
import platform
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from pipeline.distributed.diagnosis import RankProcess, ranks_in_words
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.waiting import DOCTOR, Wait, wait_for_port
from pipeline.distributed.watchdog_store import (
    all_ranks,
    announce,
    answer_arrivals,
    attempt_store,
    register,
    registered,
)
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
        token = announce(store, ranks.rank)
        if ranks.is_main_process:
            answer_arrivals(store, 1, attempt=token)
        own_store = attempt_store(store, token)
        register(own_store, ranks.rank, os.getpid())
        if ranks.is_main_process:
            _wait_for_all(store, own_store, ranks.world_size, token, Wait(timeout.total_seconds()))
        return own_store, all_ranks(own_store, ranks.world_size)
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
    while len(there := registered(own_store, world_size)) < world_size:
        answer_arrivals(store, world_size, attempt)
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
