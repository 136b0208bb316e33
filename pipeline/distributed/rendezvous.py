"""Where ranks meet: the job's store, once all of them are there. It says who is waited for."""

from __future__ import annotations

import json
import os
import platform
import secrets
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from pipeline.config.shipped import LAUNCH
from pipeline.distributed.diagnosis import RankProcess, ranks_in_words
from pipeline.distributed.machine import machine_id
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.waiting import DOCTOR, Wait, wait_for_port
from pipeline.distributed.watchdog import FAILURE, NOBODY, present
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
    connect = partial(
        TCPStore,
        port=port,
        world_size=ranks.world_size,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    try:
        store = connect("localhost", is_master=True) if serves else None
        # Before torch does: its own wait prints a stack for each attempt, or nothing.
        wait = Wait(timeout.total_seconds())
        wait_for_port(host, port, f"{own} does not reach the master", wait, said=ranks.local_rank == 0)
        store = store or connect(host, is_master=False)
        # No number in the environment tells one attempt from the next: torchrun counts failures, each machine
        # its own, and not the changes of membership. So each process announces itself with a random token,
        # and rank 0 answers it with its own, the attempt's.
        token = secrets.token_hex(8)
        store.set(f"pipeline/arrived/{ranks.rank}", token)
        if ranks.is_main_process:
            _answer_arrivals(store, 1, attempt=token)
        own_store = PrefixStore(f"pipeline/{store.get(_answer_to(token)).decode()}", store)
        process = [platform.node(), os.getpid(), machine_id()]
        own_store.set(f"pipeline/process/{ranks.rank}", json.dumps(process))
        own_store.compare_set(FAILURE, "", NOBODY)
        if ranks.is_main_process:
            _wait_for_all(store, own_store, ranks.world_size, token, Wait(timeout.total_seconds()))
        # Waits until each has registered.
        values = own_store.multi_get([f"pipeline/process/{rank}" for rank in range(ranks.world_size)])
        return own_store, [RankProcess(rank, *json.loads(value)) for rank, value in enumerate(values)]
    except DistError as error:
        what = "cannot serve as the master" if serves else "did not meet all ranks at the master"
        script = LAUNCH / "multi_gpu.sh"
        hint = f"; if another job has the port: --master_port, or {script}, which takes a free one"
        reason = str(error).partition(chr(10))[0] + hint * serves
        raise LaunchError(f"{own} {what}, {host}:{port}: {reason}") from None


def _wait_for_all(store: Store, own_store: Store, world_size: int, attempt: str, wait: Wait) -> None:
    while len(there := present(own_store, "process", range(world_size))) < world_size:
        _answer_arrivals(store, world_size, attempt)
        hosts: dict[str, list[int]] = {}
        for rank, process in there.items():
            hosts.setdefault(json.loads(process)[0], []).append(rank)
        here = ", ".join(f"{ranks_in_words(ranks)} on {host}" for host, ranks in hosts.items())
        missing = [rank for rank in range(world_size) if rank not in there]
        verb = "are" if len(missing) > 1 else "is"
        wait(
            f"{ranks_in_words(missing)} of {world_size} {verb} not there ({here}: there)",
            f"did each start, and does it reach this machine? {DOCTOR}",
        )


def _answer_arrivals(store: Store, world_size: int, attempt: str) -> None:
    """Tells those who have arrived so far which attempt of the job they belong to. For rank 0, repeatedly.

    In a store that outlives attempts (torchrun's) they may be of an earlier one: that answer is never read.
    """
    for token in present(store, "arrived", range(world_size)).values():
        store.compare_set(_answer_to(token.decode()), "", attempt)


def _answer_to(token: str) -> str:
    return f"pipeline/answer/{token}"
