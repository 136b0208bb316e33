"""Who a process is, from the launcher's environment alone."""

from __future__ import annotations

import os
import socket

import pytest

from pipeline.distributed.ranks import Ranks, complete_environment, cpu_threads, read_ranks
from pipeline.errors import LaunchError

PLACE = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture
def environment(monkeypatch):
    """os.environ without a trace of a launcher; restored after the test."""
    for name in (*PLACE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # remembered, so that what the test sets is taken away again
        monkeypatch.delenv(name)
    return os.environ


def test_no_launcher_means_one_process():
    assert read_ranks({}) == Ranks(0, 0, 1, 1)
    assert read_ranks({"PATH": "/bin", "LOCAL_WORLD_SIZE": "8"}) == Ranks(0, 0, 1, 1)


def test_a_launchers_word_is_taken():
    assert read_ranks(PLACE) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)
    assert not read_ranks(PLACE).is_main_process
    assert read_ranks(PLACE | {"RANK": "0"}).is_main_process


def test_without_a_local_world_size_all_ranks_are_on_this_machine():
    place = {name: value for name, value in PLACE.items() if name != "LOCAL_WORLD_SIZE"}
    assert read_ranks(place).local_world_size == 4


@pytest.mark.parametrize("missing", [("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE")])
def test_half_an_environment_is_refused_by_name(missing):
    place = {name: value for name, value in PLACE.items() if name not in missing}
    given = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in place]
    with pytest.raises(LaunchError) as caught:
        read_ranks(place)
    start = f"the environment sets {', '.join(given)} but not {', '.join(missing)}; "
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "three"}, "are not all whole numbers"),
        ({"WORLD_SIZE": ""}, "are not all whole numbers"),
        ({"LOCAL_WORLD_SIZE": "two"}, "are not all whole numbers"),
        ({"RANK": "4"}, "RANK=4 is outside a job of WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 is outside a job of WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "RANK=3 is outside a job of WORLD_SIZE=0"),
    ],
)
def test_values_that_describe_no_job_are_refused(change, message):
    with pytest.raises(LaunchError, match=message):
        read_ranks(PLACE | change)


def test_an_environment_without_a_launcher_is_completed(environment):
    complete_environment(Ranks(0, 0, 1, 1))
    place = {name: environment[name] for name in PLACE}
    assert place == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(environment["MASTER_PORT"])))  # nobody has it


def test_what_a_launcher_set_stays(environment):
    given = PLACE | {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    environment.update(given)
    complete_environment(read_ranks(environment))
    assert {name: environment[name] for name in given} == given


def test_two_processes_without_a_launcher_get_ports_of_their_own(environment):
    ports = set()
    for _ in range(2):
        complete_environment(Ranks(0, 0, 1, 1))
        ports.add(environment.pop("MASTER_PORT"))
    assert all(1024 <= int(port) < 65536 for port in ports)


@pytest.mark.parametrize(
    ("stated", "local_world_size", "expected"),
    [
        ({}, 1, CORES),
        ({}, 2, max(1, CORES // 2)),
        ({}, 4096, 1),
        ({"OMP_NUM_THREADS": "3"}, 2, 3),
        ({"OMP_NUM_THREADS": "0"}, 1, CORES),
        ({"OMP_NUM_THREADS": "4,2"}, 1, CORES),
        ({"OMP_NUM_THREADS": "1"}, 1, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 1, CORES),  # torchrun's own word
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, 1, 2),
    ],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(stated, local_world_size, expected):
    assert cpu_threads(Ranks(0, 0, local_world_size, local_world_size), stated) == expected
