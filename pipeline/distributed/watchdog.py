"""Ends a job that hangs or has lost a rank, on every rank within seconds, and says which rank and where.

Two threads a rank: one talks to the job's store, the other waits for nothing and ends the process where even
the store does not answer. Neither waits for the training thread, a collective or a device.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipeline.distributed.ending import Ending, Pace
from pipeline.distributed.lines import HANG_EXIT_CODE, Beat, Failure, Lines
from pipeline.distributed.memory import memory_now
from pipeline.distributed.progress import Limits, Progress
from pipeline.distributed.signs import Signs
from pipeline.distributed.stacks import frames_of
from pipeline.distributed.verdict import Lost, Who, sentence_of_lost

# What gloo, NCCL and torch's store say when it is another rank that failed, or when they gave up waiting.
_OF_PEERS = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out|[Tt]imed? ?out after|DistStore|recv"
)
_TIMED_OUT = re.compile(r"Timed out waiting|timeout")

LONGEST_END = 30.0
"""Seconds within which a watchdog has ended its process after a failure."""


def is_from_peers(error: BaseException) -> bool:
    """Whether an exception may be another rank's doing: a collective that failed."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or _OF_PEERS.search(str(error)) is not None
    )


class Watchdog:
    """Watches from `start` to `stop`.

    Args:
        store: The job's; a connection of its own is made to it.
        everyone: All ranks, in order.
        rank: This one.
        progress: What the training thread says of itself.
        limits: Seconds that are a hang.
        pace: Of the watchdog itself.
    """

    def __init__(
        self,
        store: Store,
        everyone: Sequence[Who],
        rank: int,
        progress: Progress,
        limits: Limits,
        pace: Pace | None = None,
    ):
        self._pace = pace or Pace()
        self._everyone, self._rank = everyone, rank
        self._progress, self._limits = progress, limits
        self._lines = Lines(store, rank, self._pace.silence)
        self._signs = Signs(everyone, rank)
        self._ending = Ending(self._lines, self._signs, everyone, rank, progress, self._pace)
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._is_ending = threading.Lock()
        self._quiet = 0.0  # seconds since the store answered
        self._has_store_failed = False
        self._wish: Failure | None = None
        self._is_suspicious = False
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._talk, self._guard)
        ]

    def start(self) -> None:
        """From now on."""
        for thread in self._threads:
            thread.start()

    def write_to(self, run_dir: Path) -> None:
        """Where the run's files are: stacks go to `hang/` in it."""
        self._ending.folder = run_dir / "hang"

    def stop(self) -> None:
        """The run ends as it should: nobody watches any more. Before the store goes."""
        self._stopped.set()
        self._wake.set()
        self._threads[0].join(timeout=2 * self._pace.period)

    def look_for_lost(self, error: BaseException) -> None:
        """Ends the process if it is another rank that made a collective fail; returns if none did."""
        self._ending.frames = frames_of(traceback.extract_tb(error.__traceback__))
        if is_from_peers(error) and _TIMED_OUT.search(str(error)):
            idle = time.monotonic() - self._progress.activity.since
            self._wish = Failure(self._rank, "hang", HANG_EXIT_CODE, idle)
        self._is_suspicious = True
        self._wake.set()
        time.sleep(2 * self._pace.soon)
        if self._is_ending.locked():
            time.sleep(self._pace.deadline)

    def _guard(self) -> None:
        """Ticks. Time in which this thread did not run (a stopped process) is not counted."""
        tick = self._pace.period / 2
        seen, idle, ending, last = self._progress.activity, 0.0, 0.0, time.monotonic()
        while not self._stopped.wait(tick):
            now = time.monotonic()
            passed, last = min(now - last, 4 * tick), now
            self._quiet += passed
            activity = self._progress.activity
            idle = idle + passed if activity is seen else 0.0
            seen = activity
            if self._is_ending.locked():
                ending += passed
                if ending > self._pace.deadline:
                    self._ending.leave(HANG_EXIT_CODE)
                continue
            if self._wish is None and idle > self._progress.limit(self._limits):
                self._wish = Failure(self._rank, "hang", HANG_EXIT_CODE, idle)
                self._wake.set()
            patience = self._pace.soon if self._has_store_failed else self._pace.silence
            if self._quiet > patience and self._is_ending.acquire(blocking=False):
                self._ending.alone(self._quiet)

    def _talk(self) -> None:
        count, last = 0, time.monotonic()
        while not self._stopped.is_set():
            try:
                count += 1
                self._lines.beat(Beat(count, self._progress.activity.step, memory_now()))
                failure = self._lines.failure()
                now = time.monotonic()
                passed, last = min(now - last, 2 * self._pace.period), now
                # The store's host looks at all; a rank more that did would be a rank's worth of reads more.
                watched = range(len(self._everyone)) if self._rank == 0 or self._is_suspicious else [0]
                self._signs.hear(watched, self._lines.beats(watched), passed)
                self._signs.look()
                wish = self._wish
                if wish is None and (lost := self._lost(watched)):
                    wish = Failure(self._rank, "lost", HANG_EXIT_CODE, what=sentence_of_lost(lost))
                if failure is None and wish is not None:
                    failure = self._lines.claim(wish)
            except dist.DistNetworkError:  # its process has ended: the guard does the rest
                self._has_store_failed = True
                return
            except RuntimeError:  # no answer in time
                continue
            self._quiet = 0.0
            # What this rank raised itself, its training thread shows.
            is_own = failure is not None and (failure.rank, failure.why) == (self._rank, "raised")
            if failure is not None and not is_own and self._is_ending.acquire(blocking=False):
                with suppress(RuntimeError):  # the store went with rank 0 meanwhile
                    self._ending.together(failure)
                self._ending.leave(failure.code)
            self._wake.wait(self._pace.period / (4 if self._is_suspicious else 1))
            self._wake.clear()

    def _lost(self, watched: Sequence[int]) -> list[Lost]:
        among = {*watched, *self._signs.neighbours}
        if self._is_suspicious:
            return self._signs.lost(self._pace.soon, among, looks=1)
        # Imports and the loading of CUDA keep Python from running anything else for seconds.
        is_starting = self._progress.activity.doing == "starting"
        return self._signs.lost(self._pace.silence * (4 if is_starting else 1), among)
