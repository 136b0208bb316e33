"""Which rank a hang's diagnosis names, with a clock that the tests advance."""

from __future__ import annotations

import faulthandler
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

from pipeline.distributed.diagnosis import RankProcess, RankReport
from pipeline.distributed.heartbeats import Heartbeats
from pipeline.distributed.machine import Memory
from pipeline.distributed.progress import Progress
from pipeline.distributed.shutdown import Shutdown
from pipeline.distributed.watchdog_store import HANG_EXIT_CODE, Failure, Heartbeat, WatchdogStore

RANKS = [RankProcess(0, "a", 1, "here"), RankProcess(1, "b", 2, "elsewhere")]
REPORT = RankReport(RANKS[1], "step", 5, "train.py:3 in main")


class Time:
    """Replaces the module `time`; rank 1 sends its report after `seconds`."""

    def __init__(self, rank_1: WatchdogStore, seconds: float):
        self._rank_1, self._seconds = rank_1, seconds
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
    stores[1].send_heartbeat(Heartbeat(1, 5, Memory(1, 2, 3, False, 0)))
    shutdown = Shutdown(stores[0], Heartbeats(RANKS, 0), RANKS, 0, Progress())
    try:
        with patch("pipeline.distributed.shutdown.time", Time(stores[1], seconds)):
            shutdown.together(Failure(0, "hang", HANG_EXIT_CODE, 60.0))
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert told in (stores[1].diagnosis() or "")
