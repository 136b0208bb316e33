"""The cores that a rank is bound to."""

from __future__ import annotations

import os
import threading
from itertools import combinations

import pytest
import torch
from torch.distributed import PrefixStore

from pipeline.distributed.process_group import (
    Job,
    assign_cores,
    bind_cores,
    choose_cores,
    count_cores,
    map_cpus_to_cores,
    parse_cpu_list,
)

NODES = {0: set(range(8)), 1: set(range(8, 16))}
ALL = set(range(16))


def shares(count, near=(), nodes=NODES, allowed=ALL, leaders=None):
    return [choose_cores(allowed, nodes, near, rank, count, leaders or {}) for rank in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_without_gpus_every_core_goes_to_one_rank(count):
    cores = shares(count)
    assert set().union(*cores) == ALL
    assert all(not a & b for a, b in combinations(cores, 2))


def test_a_rank_gets_the_cores_next_to_its_gpu():
    assert shares(4, near=[1, 0, 1, 0]) == [
        {8, 9, 10, 11},
        {0, 1, 2, 3},
        {12, 13, 14, 15},
        {4, 5, 6, 7},
    ]


TWINS = {cpu: cpu % 8 for cpu in range(16)}  # as Linux numbers two hyper-threads a core


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_no_two_ranks_get_threads_of_one_core(count):
    cores = [{TWINS[cpu] for cpu in mine} for mine in shares(count, nodes={0: ALL}, leaders=TWINS)]
    assert set().union(*cores) == set(range(8))
    assert sum(map(len, cores)) == 8
    assert set() in shares(9, nodes={0: ALL}, leaders=TWINS)
    near = shares(2, near=[0, 0], nodes={0: ALL - {3, 11}, 1: {3, 11}}, leaders=TWINS)
    assert near[0] | near[1] == ALL - {3, 11}
    assert all({TWINS[cpu] for cpu in mine} <= mine for mine in near)


def test_hyper_threads_are_one_core():
    leaders = map_cpus_to_cores()
    assert 1 <= count_cores() <= len(os.sched_getaffinity(0))
    assert all(leaders[leader] == leader for leader in leaders.values())


def test_where_a_node_is_not_known_the_order_decides():
    assert shares(2, near=[0, None]) == [NODES[0], NODES[1]]
    assert shares(2, nodes={}, allowed={4, 5, 6, 7}) == [{4, 5}, {6, 7}]


def test_fewer_cores_than_ranks_are_not_shared_out():
    assert set() in shares(3, nodes={}, allowed={0, 1})


def test_a_list_of_cores():
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpu_list("") == set()


def test_every_thread_is_bound():
    before = os.sched_getaffinity(0)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        bind_cores(0, len(before))
        assert {len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")} == {1}
    finally:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), before)
        release.set()
        thread.join()


def settled(
    job: Job, cpus: list[list[int]], bound: bool | None, environment: dict[str, str]
) -> tuple[int, set[int]]:
    """Threads and cores of a rank that its launcher has let run on these."""
    before = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    os.environ.update(environment)
    os.sched_setaffinity(0, cpus[job.ranks.rank])
    name = f"{cpus} {bound} {environment}"
    try:
        assign_cores(PrefixStore(name, job.store), job.rank_processes, job.ranks.rank, bound)
        return torch.get_num_threads(), os.sched_getaffinity(0)
    finally:
        for name in environment:
            del os.environ[name]
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), before)
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_that_share_cores_divide_them_and_those_with_their_own_do_not(ranks):
    a, b = sorted(os.sched_getaffinity(0))[:2]
    pool = ranks(2)
    nobody = {"OMP_NUM_THREADS": ""}
    assert pool.run(settled, [[a, b], [a, b]], None, nobody) == [(1, {a}), (1, {b})]
    assert pool.run(settled, [[a, b], [a, b]], False, nobody) == [(1, {a, b}), (1, {a, b})]
    assert pool.run(settled, [[a, b], [a, b]], None, nobody | {"OMP_PROC_BIND": "close"})[0] == (1, {a, b})
    # Slurm and mpirun: what is a rank's own already is not divided again.
    assert pool.run(settled, [[a], [b]], None, nobody) == [(1, {a}), (1, {b})]
    assert pool.run(settled, [[a, b], [b]], None, nobody) == [(2, {a, b}), (1, {b})]
