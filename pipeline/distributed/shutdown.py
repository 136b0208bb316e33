"""The last seconds of a job that hangs, or that failed on another rank: which rank is where, told once."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary

from pipeline.distributed.diagnosis import RankProcess, RankReport, advise, describe_hang, describe_lost
from pipeline.distributed.heartbeats import Heartbeats
from pipeline.distributed.progress import Progress
from pipeline.distributed.ranks import write_exit_code
from pipeline.distributed.signals import STDERR, reports_own_exit
from pipeline.distributed.stacks import in_flight_now, main_frames, thread_position, write_stacks
from pipeline.distributed.watchdog_store import HANG_EXIT_CODE, Failure, WatchdogStore

# Seconds.
PERIOD = 1.0  # between two heartbeats
SILENCE = 15.0  # without a heartbeat, after which a rank, or the store, counts as lost
SOON = 3.0  # the same once a collective has failed
ANSWER = 6.0  # for every rank to report where it is, also on a busy machine
DEADLINE = 20.0  # after which a rank leaves, whatever is still to be said


def _tell_nobody(step: int, sentence: str) -> None:
    pass


class Shutdown:
    """Never waits for the training thread; for other ranks only so long."""

    def __init__(
        self,
        store: WatchdogStore,
        heartbeats: Heartbeats,
        everyone: Sequence[RankProcess],
        rank: int,
        progress: Progress,
    ):
        self.folder: Path | None = None
        """Where stacks are written; None: nowhere yet."""
        self.before_leaving: Callable[[], object] = lambda: None
        """What a process still does that is rank 0 or tells why the job ends; raises nothing."""
        self.frames: list[FrameSummary] = []
        """Where the training thread was, if it has left there by an exception."""
        self.tell: Callable[[int, str], None] = _tell_nobody
        """Is given the step and what is told, by the rank that tells; takes seconds at the most."""
        self.advise: Callable[[], str] = advise
        """What helps where a rank was killed for memory."""
        self._store, self._heartbeats = store, heartbeats
        self._everyone, self._rank = everyone, rank
        self._progress = progress
        self._tells = rank == 0

    def together(self, failure: Failure) -> None:
        """With the others, over the store.

        Raises:
            RuntimeError: it is gone.
        """
        if failure.why == "raised":
            # Its rank shows what it was; what this rank's training thread makes of it belongs in its log.
            self._report_exit(failure, f"{self._everyone[failure.rank]} failed, and says why")
            self._store.count("left")
            time.sleep(SOON)
            return
        self._last_resort()
        self._store.send_report(self._own_report(failure.why))
        if failure.rank == self._rank:
            sentence = self._sentence(failure)
            self._publish(sentence)
            self._store.publish_diagnosis(sentence)
            self.tell(self._progress.activity.step, sentence)
        else:
            self._until(lambda: self._store.diagnosis() is not None, 2 * ANSWER)
            self._report_exit(failure, self._store.diagnosis() or "it hung, or lost a rank")
        self._store.count("left")
        if self._rank == 0:  # the others read all this in its store
            self._until(lambda: self._store.counted("left") >= len(self._everyone), SOON)

    def alone(self, silent: float) -> None:
        """Without the store, which has not answered for so many seconds. Does not return."""
        self._last_resort()
        with suppress(RuntimeError):
            self._own_report("lost")
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if by_launcher or self._rank == 0:
            line = (
                f"the launcher on {os.environ.get('MASTER_ADDR')} is gone, or the link to it: its store gave "
                f"no answer for {silent:.1f} s"
            )
        else:
            line = describe_lost([self._heartbeats.describe(0, silent)], self.advise)
        if self._is_reporter():
            self._publish(line)
            self.tell(self._progress.activity.step, line)
        elif reports_own_exit(self._is_head):
            self._write(line)
        self.leave(HANG_EXIT_CODE)

    def _last_resort(self) -> None:
        # A thread of C: it needs no lock of Python's, should even this thread get stuck.
        faulthandler.dump_traceback_later(DEADLINE + 5, exit=True, file=STDERR)

    def _own_report(self, why: str) -> RankReport:
        """Where this rank stands; its stacks are written."""
        activity = self._progress.activity
        in_flight = in_flight_now()
        now = thread_position(self.frames or main_frames(), in_flight)
        own = self._everyone[self._rank]
        number = in_flight[0].number if in_flight and in_flight[0].name == now.collective else None
        if self.folder is not None:
            with suppress(OSError):
                write_stacks(self.folder, own.rank, f"{why}: {own}, {activity.doing}, step {activity.step}")
        return RankReport(own, activity.doing, activity.step, now.place, now.collective, number)

    def _sentence(self, failure: Failure) -> str:
        ranks = range(len(self._everyone))
        began = last = time.monotonic()
        while True:
            self._heartbeats.update(ranks, self._store.heartbeats(ranks), time.monotonic() - last)
            last = time.monotonic()
            self._heartbeats.check_processes()
            reports = self._store.reports(ranks)
            heard = {w.process.rank for w in reports}
            lost = self._heartbeats.lost(ANSWER, set(ranks) - heard, checks=1)
            if len(heard) + len(lost) == len(ranks) or last - began > ANSWER:
                break
            time.sleep(PERIOD / 5)
        known = heard | {each.process.rank for each in lost}
        lost += [self._heartbeats.describe(rank) for rank in ranks if rank not in known]
        if failure.why == "lost":
            return describe_lost(lost, self.advise) if lost else f"{failure.what}; by now all ranks answer"
        return describe_hang(reports, failure.seconds, lost, self.advise)

    def _publish(self, line: str) -> None:
        self._tells = True
        # Not through logging or rich: the training thread may be stuck with their locks.
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / "diagnosis.txt").write_text(line + "\n")
            line += f"; stacks: {self.folder}"
        self._write(line)

    def _report_exit(self, failure: Failure, sentence: str) -> None:
        """The same on this rank's own console, where it is another one's failure and nobody says it there."""
        own, teller = self._everyone[self._rank], self._everyone[failure.rank]
        if own.rank != teller.rank and reports_own_exit(self._is_head and own.machine != teller.machine):
            self._write(f"{own}: ends with {failure.code}: {sentence}")

    @property
    def _is_head(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self._rank == min([self._rank, *self._heartbeats.neighbours])

    def _write(self, line: str) -> None:
        with suppress(OSError):
            os.write(STDERR, f"{os.linesep if os.isatty(STDERR) else ''}{line}\n".encode())

    def _is_reporter(self) -> bool:
        """Whether this rank is the one that reports where no store agrees on it: one a file system."""
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    (self.folder / f".told-{self._everyone[0].pid}").touch(exist_ok=False)
                except FileExistsError:
                    return False
                return True
        return self._rank == min({self._rank, *self._heartbeats.neighbours} - {0}, default=0)

    def _until(self, is_so: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        while not is_so() and time.monotonic() - began < seconds:
            time.sleep(PERIOD / 10)

    def leave(self, code: int) -> None:
        """Ends this process and its data workers at once; no destructor and no other thread is waited for."""
        if self._tells:
            self.before_leaving()  # takes seconds at the most
        write_exit_code(self._rank, len(self._everyone), code)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)
