"""Ends a job that hangs or has lost a rank, on every rank within seconds, and says which rank and where.

Two threads a rank: one talks to the job's store, the other waits for nothing and ends the process where even
the store does not answer. Neither waits for the training thread, a collective or a device.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipeline.config.schema import DistributedConfig
from pipeline.distributed.diagnosis import LostRank, RankProcess, describe_lost
from pipeline.distributed.heartbeats import Heartbeats
from pipeline.distributed.machine import memory_now
from pipeline.distributed.progress import Progress
from pipeline.distributed.shutdown import DEADLINE, PERIOD, SILENCE, SOON, Shutdown
from pipeline.distributed.watchdog_store import HANG_EXIT_CODE, Failure, Heartbeat, WatchdogStore

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
    """

    def __init__(
        self,
        store: Store,
        everyone: Sequence[RankProcess],
        rank: int,
        progress: Progress,
        limits: DistributedConfig,
    ):
        self._everyone, self._rank = everyone, rank
        self._progress, self._limits = progress, limits
        self._store = WatchdogStore(store, rank, SILENCE)
        self._heartbeats = Heartbeats(everyone, rank)
        self._shutdown = Shutdown(self._store, self._heartbeats, everyone, rank, progress)
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._is_shutting_down = threading.Lock()
        self._quiet = 0.0  # seconds since the store answered
        self._has_store_failed = False
        self._suspected: Failure | None = None
        self._is_suspicious = False
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._talk, self._guard)
        ]

    def start(self) -> None:
        """From now on."""
        for thread in self._threads:
            thread.start()

    def write_to(self, run_dir: Path, tell: Callable[[int, str], None] | None = None) -> None:
        """Where the run's files are: stacks go to `hang/` in it.

        Args:
            tell: Is given the step and why the job ends, on the rank that says so on the console.
        """
        self._shutdown.folder = run_dir / "hang"
        self._shutdown.tell = tell or self._shutdown.tell

    def tell(self, sentence: str) -> None:
        """To whom `write_to` named: what ends the job, of a rank that raised it."""
        self._shutdown.tell(self._progress.activity.step, sentence)

    def advised_by(self, advise: Callable[[], str]) -> None:
        """What is told to help where a rank was killed for memory; raises nothing."""
        self._shutdown.advise = advise

    def _described(self, lost: Sequence[LostRank]) -> str:
        return describe_lost(lost, self._shutdown.advise)

    def before_leaving(self, work: Callable[[], object]) -> None:
        """What is done before the process is ended: it raises nothing and takes seconds."""
        self._shutdown.before_leaving = work

    def stop(self) -> None:
        """The run ends as it should: nobody watches any more. Before the store goes."""
        self._stopped.set()
        self._wake.set()
        self._threads[0].join(timeout=2 * PERIOD)

    def look_for_lost(self, error: BaseException) -> None:
        """Ends the process if it is another rank that made a collective fail; returns if none did."""
        self._shutdown.frames = traceback.extract_tb(error.__traceback__)
        if is_from_peers(error) and _TIMED_OUT.search(str(error)):
            idle = time.monotonic() - self._progress.activity.since
            self._suspected = Failure(self._rank, "hang", HANG_EXIT_CODE, idle)
        self._is_suspicious = True
        self._wake.set()
        time.sleep(2 * SOON)
        if self._is_shutting_down.locked():
            time.sleep(DEADLINE)

    def _guard(self) -> None:
        """Ticks. Time in which this thread did not run (a stopped process) is not counted."""
        tick = PERIOD / 2
        seen, idle, ending, last = self._progress.activity, 0.0, 0.0, time.monotonic()
        while not self._stopped.wait(tick):
            now = time.monotonic()
            passed, last = min(now - last, 4 * tick), now
            self._quiet += passed
            activity = self._progress.activity
            idle = idle + passed if activity is seen else 0.0
            seen = activity
            if self._is_shutting_down.locked():
                ending += passed
                if ending > DEADLINE:
                    self._shutdown.leave(HANG_EXIT_CODE)
                continue
            if self._suspected is None and idle > self._progress.limit(self._limits):
                self._suspected = Failure(self._rank, "hang", HANG_EXIT_CODE, idle)
                self._wake.set()
            patience = SOON if self._has_store_failed else SILENCE
            if self._quiet > patience and self._is_shutting_down.acquire(blocking=False):
                self._shutdown.alone(self._quiet)

    def _talk(self) -> None:
        count, last, memory = 0, time.monotonic(), memory_now()
        while not self._stopped.is_set():
            try:
                count += 1
                with suppress(OSError):  # no more files may be opened: what was known last will do
                    memory = memory_now()
                self._store.send_heartbeat(Heartbeat(count, self._progress.activity.step, memory))
                failure = self._store.failure()
                now = time.monotonic()
                passed, last = min(now - last, 2 * PERIOD), now
                # The store's host looks at all; a rank more that did would be a rank's worth of reads more.
                watched = range(len(self._everyone)) if self._rank == 0 or self._is_suspicious else [0]
                self._heartbeats.update(watched, self._store.heartbeats(watched), passed)
                self._heartbeats.check_processes()
                suspected = self._suspected
                if suspected is None and (lost := self._lost(watched)):
                    suspected = Failure(self._rank, "lost", HANG_EXIT_CODE, what=self._described(lost))
                if failure is None and suspected is not None:
                    failure = self._store.claim(suspected)
            except dist.DistNetworkError:  # its process has ended: the guard does the rest
                self._has_store_failed = True
                return
            except RuntimeError:  # no answer in time
                continue
            self._quiet = 0.0
            # What this rank raised itself, its training thread shows.
            is_own = failure is not None and (failure.rank, failure.why) == (self._rank, "raised")
            if failure is not None and not is_own and self._is_shutting_down.acquire(blocking=False):
                with suppress(RuntimeError):  # the store went with rank 0 meanwhile
                    self._shutdown.together(failure)
                self._shutdown.leave(failure.code)
            self._wake.wait(PERIOD / (4 if self._is_suspicious else 1))
            self._wake.clear()

    def _lost(self, watched: Sequence[int]) -> list[LostRank]:
        among = {*watched, *self._heartbeats.neighbours}
        if self._is_suspicious:
            return self._heartbeats.lost(SOON, among, checks=1)
        # Imports and the loading of CUDA keep Python from running anything else for seconds.
        is_starting = self._progress.activity.doing == "starting"
        return self._heartbeats.lost(SILENCE * (4 if is_starting else 1), among)
