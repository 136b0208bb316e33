"""Which cores a rank is bound to."""

from __future__ import annotations

import os
import threading
from itertools import combinations

import pytest

from pipeline.distributed.cores import bind_cores, parse_cores, share

NODES = {0: set(range(8)), 1: set(range(8, 16))}
ALL = set(range(16))


def shares(count, near=(), nodes=NODES, allowed=ALL):
    return [share(allowed, nodes, near, rank, count) for rank in range(count)]


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


def test_where_a_node_is_not_known_the_order_decides():
    assert shares(2, near=[0, None]) == [NODES[0], NODES[1]]
    assert shares(2, nodes={}, allowed={4, 5, 6, 7}) == [{4, 5}, {6, 7}]


def test_fewer_cores_than_ranks_are_not_shared_out():
    assert set() in shares(3, nodes={}, allowed={0, 1})


def test_a_list_of_cores():
    assert parse_cores("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cores("") == set()


def test_every_thread_is_bound():
    before, release = os.sched_getaffinity(0), threading.Event()
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
