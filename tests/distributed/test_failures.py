"""Ranks that count as lost, ranks that a diagnosis names, and errors that another rank may have caused.

Here are no processes of a job: see test_watchdog.py.
"""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch.distributed as dist
from support.tiny import recipe, resolve
from torch.distributed import HashStore

from pipeline.distributed.diagnosis import RankProcess, RankReport
from pipeline.distributed.machine import MemoryUsage, count_kills
from pipeline.distributed.progress import Progress
from pipeline.distributed.watchdog import (
    HANG_EXIT_CODE,
    Failure,
    Heartbeat,
    Heartbeats,
    Shutdown,
    WatchdogStore,
    may_be_from_peer,
)
from pipeline.training.run_directory import open_run_directory


@pytest.mark.parametrize(
    ("error", "may_be"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (dist.DistNetworkError("Broken pipe"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (RuntimeError("CUDA out of memory"), False),
        (ZeroDivisionError("Connection closed by peer"), False),
    ],
    ids=str,
)
def test_errors_that_other_ranks_may_have_caused(error, may_be):
    assert may_be_from_peer(error) is may_be


def test_the_watchdogs_settings_make_no_other_run(tmp_path):
    split = {"data": "x", "global_batch_size": 4, "deepspeed": None, "world_size": 1}
    opened = []
    for section in ({}, {"timeout_seconds": 60, "hang_seconds": 9, "straggler_share": 1, "bind_cores": True}):
        config, _ = resolve(recipe(runs_dir=str(tmp_path), distributed=section), None, 1)
        directory, lock = open_run_directory(config, split)
        lock.release()
        opened.append(directory)
    assert opened[0] == opened[1]


MEMORY = MemoryUsage(1, 2, 3, False, 0)


def heartbeat(count):
    return Heartbeat(count, 7, MEMORY)


def heartbeats(pid=1, machine="other"):
    return Heartbeats([RankProcess(0, "a", 1, "here"), RankProcess(1, "b", pid, machine)], 0)


def ranks(lost):
    return [each.process.rank for each in lost]


def test_silence_counts_from_the_last_change():
    watched = heartbeats()
    for count in (1, 2, 2, 2):
        watched.update([0, 1], {1: heartbeat(count)}, 4.0)
    assert watched.find_lost(8.0, [0, 1]) == []
    assert ranks(watched.find_lost(7.9, [0, 1])) == [1]
    (lost,) = watched.find_lost(7.9, [1])
    assert (lost.silent_seconds, lost.step, lost.memory, lost.state) == (8.0, 7, MEMORY, None)
    watched.update([0, 1], {1: heartbeat(3)}, 4.0)
    assert watched.find_lost(0.0, [1]) == []


def test_a_rank_that_is_not_watched_does_not_grow_silent():
    watched = heartbeats()
    watched.update([1], {1: heartbeat(1)}, 1.0)
    watched.update([0], {}, 100.0)
    assert watched.find_lost(0.0, [1]) == []


def test_a_process_that_is_gone_is_seen_before_its_silence():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = heartbeats(process.pid, "here")
    watched.update([1], {1: heartbeat(1)}, 1.0)
    watched.check_processes()
    assert watched.find_lost(15.0, [1]) == []
    process.kill()
    process.wait()
    watched.check_processes()
    assert watched.find_lost(15.0, [1]) == []  # once may be the moment in which it ends as it should
    watched.check_processes()
    (lost,) = watched.find_lost(15.0, [1])
    assert (lost.state, lost.num_kills) == ("gone", count_kills() - MEMORY.num_kills)


RANKS = [RankProcess(0, "a", 1, "here"), RankProcess(1, "b", 2, "elsewhere")]
REPORT = RankReport(RANKS[1], "step", 5, "train.py:3 in main")


class Time:
    """Replaces the module `time`; rank 1 sends its report after `seconds`."""

    def __init__(self, rank_1: WatchdogStore, seconds: float):
        self._rank_1 = rank_1
        self._seconds = seconds
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        if self._now >= self._seconds:
            self._rank_1.send_report(REPORT)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.5, "rank 1: step 5, at train.py:3 in main"),
        (4.5, "rank 1: step 5, at train.py:3 in main"),
        (60.0, "rank 1 on b (pid 2) sends no heartbeat: last heartbeat 6.0 s ago at step 5"),
    ],
)
def test_a_rank_that_answers_late_is_not_lost(seconds, told):
    """A rank sends no heartbeat while it writes its stacks, which takes seconds on a busy machine."""
    shared = HashStore()
    stores = [WatchdogStore(shared, rank, 15.0) for rank in range(2)]
    stores[1].send_heartbeat(Heartbeat(1, 5, MemoryUsage(1, 2, 3, False, 0)))
    shutdown = Shutdown(stores[0], Heartbeats(RANKS, 0), RANKS, 0, Progress())
    try:
        with patch("pipeline.distributed.watchdog.time", Time(stores[1], seconds)):
            shutdown.coordinate_exit(Failure(0, "hang", HANG_EXIT_CODE, 60.0))
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert told in (stores[1].diagnosis() or "")
