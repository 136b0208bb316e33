"""Which ranks count as lost, by their heartbeats and their processes."""

from __future__ import annotations

import subprocess
import sys

from pipeline.distributed.diagnosis import RankProcess
from pipeline.distributed.heartbeats import Heartbeats
from pipeline.distributed.machine import Memory, kills
from pipeline.distributed.watchdog_store import Heartbeat

MEMORY = Memory(1, 2, 3, False, 0)


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
    assert watched.lost(8.0, [0, 1]) == []
    assert ranks(watched.lost(7.9, [0, 1])) == [1]
    (lost,) = watched.lost(7.9, [1])
    assert (lost.silent, lost.step, lost.memory, lost.state) == (8.0, 7, MEMORY, None)
    watched.update([0, 1], {1: heartbeat(3)}, 4.0)
    assert watched.lost(0.0, [1]) == []


def test_a_rank_that_is_not_watched_does_not_grow_silent():
    watched = heartbeats()
    watched.update([1], {1: heartbeat(1)}, 1.0)
    watched.update([0], {}, 100.0)
    assert watched.lost(0.0, [1]) == []


def test_a_process_that_is_gone_is_seen_before_its_silence():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = heartbeats(process.pid, "here")
    watched.update([1], {1: heartbeat(1)}, 1.0)
    watched.check_processes()
    assert watched.lost(15.0, [1]) == []
    process.kill()
    process.wait()
    watched.check_processes()
    assert watched.lost(15.0, [1]) == []  # once may be the moment in which it ends as it should
    watched.check_processes()
    (lost,) = watched.lost(15.0, [1])
    assert (lost.state, lost.num_kills) == ("gone", kills() - MEMORY.num_kills)
