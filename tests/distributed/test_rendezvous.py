"""Ranks that come late, or never, are named; so is a master that cannot be reached. Real stores."""

from __future__ import annotations

import platform
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.rank_pool import free_port
from torch.distributed import TCPStore

from pipeline.distributed.process_group import rendezvous
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.watchdog import Failure, claim_failure
from pipeline.errors import LaunchError

HERE = platform.node()


def arrive(rank, world_size, seconds, after=0.0):
    time.sleep(after)
    ranks = Ranks(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    store, everyone = rendezvous(ranks, timedelta(seconds=seconds))
    return store, [(each.rank, each.host) for each in everyone]


@pytest.fixture
def port(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


@pytest.mark.slow
def test_all_meet_and_the_late_one_was_named(port, capfd):
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(arrive, rank, 3, 8, after) for rank, after in enumerate((0, 0, 3))]
        results = [future.result() for future in futures]
    assert [everyone for _, everyone in results] == [[(rank, HERE) for rank in range(3)]] * 3
    line = rf"waiting: rank 2 of 3 has not joined \(joined: ranks 0, 1 on {HERE}\) after 2 s\n"
    assert re.fullmatch(line, capfd.readouterr().err)


@pytest.mark.slow
def test_one_that_never_comes_ends_the_wait_of_all(port, capfd):
    named = rf"^ranks 2, 3 of 4 have not joined \(joined: ranks 0, 1 on {HERE}\) after 1 s .* doctor"
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(arrive, rank, 4, seconds) for rank, seconds in enumerate((1.2, 2))]
        with pytest.raises(LaunchError, match=named):
            futures[0].result()
        # In processes of their own it ends as soon as the master does.
        named = rf"^rank 1 on {HERE} did not complete the rendezvous at the master, 127.0.0.1:{port}: wait"
        with pytest.raises(LaunchError, match=named):
            futures[1].result()


@pytest.mark.slow
def test_a_master_that_is_not_there_is_named(port, capfd):
    line = rf"rank 1 on {HERE} does not reach the master, 127.0.0.1:{port} \(Connection refused\) after "
    with pytest.raises(LaunchError, match=line + r"2 s \(distributed.timeout_seconds\); .* doctor"):
        rendezvous(Ranks(rank=1, local_rank=0, world_size=2, local_world_size=1), timedelta(seconds=2))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(re.fullmatch(f"waiting: {line}[012] s", each) for each in said)


def test_a_port_that_is_taken_is_named(port):
    with socket.socket() as other:
        other.bind(("0.0.0.0", port))
        other.listen()
        with pytest.raises(LaunchError, match=f"cannot serve as the master, 127.0.0.1:{port}: .*in use"):
            arrive(0, 2, 3)


@pytest.mark.slow
def test_attempts_that_share_a_store_share_nothing_in_it(port, monkeypatch):
    """torchrun's store is there before the ranks and after them; here the second attempt has fewer ranks."""
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt, world_size in enumerate((3, 2, 3)):
        # Whoever comes last, rank 0 or another: what the attempt before wrote is there, and not meant.
        with ThreadPoolExecutor(world_size) as threads:
            late = [(0.5 if rank == attempt else 0.0) for rank in range(world_size)]
            futures = [threads.submit(arrive, rank, world_size, 20, late[rank]) for rank in range(world_size)]
            stores = [future.result()[0] for future in futures]
        own = Failure(attempt, "raised", attempt)
        assert claim_failure(stores[-1], own) == own
        assert claim_failure(stores[0], Failure(0, "lost", 124)) == own
        stores[0].set("default_pg/0/address", str(attempt))
        assert {store.get("default_pg/0/address") for store in stores} == {str(attempt).encode()}
    assert not server.check(["default_pg/0/address"])
