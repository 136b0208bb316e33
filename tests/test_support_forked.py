"""Pools of ranks are forked from a server that has nothing but imports behind it."""

from __future__ import annotations

import psutil
from support.forked import HAS_GPU, PRELOAD
from support.ranks import RankPool


def threads(_job):
    server = psutil.Process().parent()
    return server.num_threads(), "forkserver" in " ".join(server.cmdline())


def test_the_server_has_no_thread_that_a_fork_would_lose():
    with RankPool(1) as pool:
        (found,) = pool.run(threads)
    assert HAS_GPU or found == (1, True), PRELOAD
