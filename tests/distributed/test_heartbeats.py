"""Which ranks count as lost, by their heartbeats and their processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.distributed.diagnosis import RankProcess
from pipeline.distributed.heartbeats import Heartbeats
from pipeline.distributed.machine import machine_id, process_state
from pipeline.distributed.memory import Memory, kills, memory_now
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


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_looked_at(stopped):
    process = subprocess.Popen(["sleep", "20"])
    if stopped:
        process.send_signal(19)
        import os

        os.waitpid(process.pid, os.WUNTRACED)
    assert process_state(process.pid) == ("stopped" if stopped else "there")
    process.kill()
    process.wait()
    assert process_state(process.pid) == "gone"


def test_a_machine_is_known_by_more_than_its_name():
    other = subprocess.run(
        [sys.executable, "-c", "from pipeline.distributed.machine import *; print(machine_id())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == machine_id()


def test_memory_has_a_limit():
    now = memory_now()
    assert 0 < now.resident < now.limit
    assert 0 < now.used <= now.limit
