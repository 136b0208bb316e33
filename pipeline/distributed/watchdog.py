"""Ends a job that hangs or has lost a rank, on every rank within seconds, and says which rank and where.

Two threads a rank: one talks to the job's store, the other waits for nothing and ends the process where even
the store does not answer. Neither waits for the training thread, a collective or a device.

Ranks tell each other through the store: heartbeats, the failure that one of them claims, where each one is.
Whatever uses the store may raise RuntimeError: the store, or the link to it, is gone.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import Store

from pipeline.config.schema import DistributedConfig
from pipeline.distributed.diagnosis import (
    LostRank,
    RankProcess,
    RankReport,
    advise,
    describe_hang,
    describe_lost,
)
from pipeline.distributed.machine import MemoryUsage, count_kills, process_state, read_memory_usage
from pipeline.distributed.progress import Progress
from pipeline.distributed.ranks import write_exit_code
from pipeline.distributed.signals import STDERR, reports_own_exit

# Frames in these files are a collective's own; the functions around it that say nothing.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
_WRAPPERS = {"wrapper", "log_wrapper", "inner", "_fn", "<lambda>", "fn"}
# A line of Python that waits for the device, and with it for the collective that the device is in.
_WAITS = (".wait(", ".item(", "float(", "int(", "bool(", "synchronize(", ".tolist(", ".cpu(")
_HERE = os.path.dirname(__file__)
_STDLIB = sysconfig.get_paths()["stdlib"]


class ThreadPosition(NamedTuple):
    """Position of a thread."""

    collective: str | None
    """`all_reduce`, `barrier`, ...; None if it waits for no other rank."""
    place: str
    """The innermost line that is not of a library."""


class InFlight(NamedTuple):
    """A collective that this rank has entered and not left: its name and its number in its group."""

    name: str
    number: int


def thread_position(frames: Sequence[FrameSummary], in_flight: Sequence[InFlight] = ()) -> ThreadPosition:
    """Return where a thread with this stack (innermost last) is."""
    inner: list[FrameSummary] = []
    mine = None
    for frame in reversed(frames):
        if not _is_library(frame):
            mine = frame
            break
        inner.append(frame)
    place = _described(mine or (frames[-1] if frames else FrameSummary("?", 0, "?", line="")))
    for frame in reversed(inner):  # from the outside: all_gather_object, and not the all_gather in it
        if any(part in frame.filename for part in _COLLECTIVES) and frame.name not in _WRAPPERS:
            return ThreadPosition(frame.name, place)
    # Autograd, and whatever else waits outside Python, is seen by the flight recorder alone. What the
    # user's own line is busy with may have a collective under way beside it.
    if in_flight and (inner or (mine is not None and any(word in (mine.line or "") for word in _WAITS))):
        return ThreadPosition(in_flight[0].name, place)
    return ThreadPosition(None, place)


def _is_library(frame: FrameSummary) -> bool:
    """Return whether a frame is not the user's; our own wrappers of collectives count as a library."""
    return frame.filename.startswith((_STDLIB, _HERE, "<")) or "site-packages" in frame.filename


def _described(frame: FrameSummary) -> str:
    file = os.path.relpath(frame.filename) if frame.filename.startswith(os.getcwd()) else frame.filename
    return f"{file}:{frame.lineno or 0} in {frame.name}" + (f" ({frame.line})" if frame.line else "")


def main_frames() -> list[FrameSummary]:
    """Return the main thread's stack, innermost last. For other threads."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.extract_stack(frame) if frame is not None else []


def in_flight_now() -> list[InFlight]:
    """Return the collectives that training has entered and not left, by the flight recorder, in their order.

    Those of a thread of ours beside training (a checkpoint being written) are left out.
    """
    # Autograd's own threads show up as dummies where a hook of theirs was Python.
    beside = {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    }
    found = []
    for entry in _recorded(only_active=True).get("entries", []):
        if entry.get("retired") or entry.get("state") == "completed" or entry.get("thread_id") in beside:
            continue
        name = entry["profiling_name"].rpartition(":")[2]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        found.append(InFlight(name, int(number)))
    return found


def write_stacks(folder: Path, rank: int, headline: str) -> None:
    """Write every thread's Python stack to `rank-00001.txt`, and what the flight recorder holds beside it.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank:05d}.txt").open("w") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {headline}\n\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
    recorded = _recorded(only_active=False)
    if recorded.get("entries"):
        (folder / f"rank-{rank:05d}.collectives.json").write_text(json.dumps(recorded))


def _recorded(only_active: bool) -> dict[str, Any]:
    """Return what both recorders hold, NCCL's own first, which only CUDA builds can read."""
    merged: dict[str, Any] = {}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is None:
            continue
        with suppress(RuntimeError, ValueError):
            recorded = json.loads(dump(True, only_active))
            entries = [*merged.get("entries", []), *recorded.pop("entries", [])]
            merged = recorded | merged | {"entries": entries}
    return merged


HANG_EXIT_CODE = 124
"""Exit code of every rank of a job that hung or lost a rank, as of `timeout`."""
FAILURE_KEY = "pipeline/failure"
NO_FAILURE = "-"

# Seconds.
PERIOD = 1.0  # between two heartbeats
SILENCE = 15.0  # without a heartbeat, after which a rank, or the store, counts as lost
SOON = 3.0  # the same once a collective has failed
ANSWER = 6.0  # for every rank to report where it is, also on a busy machine
DEADLINE = 20.0  # after which a rank leaves, whatever is still to be said
LONGEST_END = 30.0  # within which a watchdog has ended its process after a failure
# What gloo, NCCL and torch's store say when it is another rank that failed, or when they gave up waiting.
_OF_PEERS = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out|[Tt]imed? ?out after|DistStore|recv"
)
_TIMED_OUT = re.compile(r"Timed out waiting|timeout")


@dataclass(frozen=True)
class Failure:
    """Reason why the job ends, claimed once, by the first rank that knows."""

    rank: int
    why: str
    """`raised`: the rank shows its own error. `hang`, `lost`: the rank at fault must be found."""
    code: int
    seconds: float = 0.0
    """Seconds without progress, for `hang`."""
    what: str = ""
    """Description of the rank whose heartbeats stopped, for `lost`."""


@dataclass(frozen=True)
class Heartbeat:
    """Sign of life that a rank sends about once a second."""

    count: int
    step: int
    memory: MemoryUsage


def claim_failure(store: Store, failure: Failure) -> Failure:
    """Return the job's failure: this one, or the one that was claimed before.

    Raises:
        RuntimeError: The store is gone.
    """
    # Where the key is not there yet, the first call makes it; two that do so at once still agree below.
    store.compare_set(FAILURE_KEY, "", NO_FAILURE)
    return _failure(store.compare_set(FAILURE_KEY, NO_FAILURE, json.dumps(asdict(failure))))


class WatchdogStore:
    """A connection of the watchdog's own: the training thread may be stuck in the other one."""

    def __init__(self, store: Store, rank: int, patience: float):
        """Connect to the store.

        Args:
            store: The job's store, which is cloned.
            rank: This rank.
            patience: Seconds that the store may take to answer.
        """
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=patience))
        self._rank = rank

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Tell the others that this rank is alive."""
        self._store.set(f"pipeline/heartbeat/{self._rank}", json.dumps(asdict(heartbeat)))

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Return the newest heartbeat of each rank that sent any."""
        return {
            rank: _heartbeat(value) for rank, value in read_by_rank(self._store, "heartbeat", ranks).items()
        }

    def failure(self) -> Failure | None:
        """Return why the job ends, if it does."""
        value = self._store.get(FAILURE_KEY).decode()
        return None if value == NO_FAILURE else _failure(value.encode())

    def claim(self, failure: Failure) -> Failure:
        """Claim a failure: see `claim`."""
        return claim_failure(self._store, failure)

    def send_report(self, report: RankReport) -> None:
        """Send where this rank is."""
        self._store.set(f"pipeline/report/{self._rank}", json.dumps(asdict(report)))

    def reports(self, ranks: Sequence[int]) -> list[RankReport]:
        """Return the reports that were sent."""
        found = [json.loads(value) for value in read_by_rank(self._store, "report", ranks).values()]
        return [RankReport(**values | {"process": RankProcess(**values["process"])}) for values in found]

    def publish_diagnosis(self, sentence: str) -> None:
        """Publish why the job ends, for all ranks."""
        self._store.set("pipeline/diagnosis", sentence)

    def diagnosis(self) -> str | None:
        """Return what was published, if anything was."""
        key = "pipeline/diagnosis"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def count(self, what: str) -> None:
        """Count that something is done on this rank."""
        self._store.add(f"pipeline/{what}", 1)

    def counted(self, what: str) -> int:
        """Return how many ranks have counted it."""
        return int(self._store.add(f"pipeline/{what}", 0))


def read_by_rank(store: Store, what: str, ranks: Sequence[int]) -> dict[int, bytes]:
    """Return rank -> value of the key `what` of each rank that has written one."""
    keys = {rank: f"pipeline/{what}/{rank}" for rank in ranks}
    if keys and not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


def _failure(value: bytes) -> Failure:
    return Failure(**json.loads(value))


def _heartbeat(value: bytes) -> Heartbeat:
    values: dict[str, Any] = json.loads(value)
    return Heartbeat(values["count"], values["step"], MemoryUsage(**values["memory"]))


@dataclass
class _Last:
    heartbeat: Heartbeat | None = None
    age: float = 0.0
    checks_without_process: int = 0


class Heartbeats:
    """The heartbeats of the other ranks, as one rank sees them.

    Args:
        everyone: All ranks, in order.
        rank: The rank that looks.
    """

    def __init__(self, everyone: Sequence[RankProcess], rank: int):
        self._everyone = everyone
        self._heartbeats = {each.rank: _Last() for each in everyone if each.rank != rank}
        here = everyone[rank].machine
        self.neighbours = [other for other in self._heartbeats if everyone[other].machine == here]

    def update(self, watched: Iterable[int], heartbeats: Mapping[int, Heartbeat], seconds: float) -> None:
        """Record the newest heartbeats of the ranks that are watched now.

        Args:
            watched: Ranks to record.
            heartbeats: Newest heartbeat of each rank that sent any.
            seconds: Seconds since the last call, by which a heartbeat that has not changed is older. Time in
                which this rank itself stood still must not be in it.
        """
        for rank in watched:
            last = self._heartbeats.get(rank)
            if last is None:
                continue
            last.age += seconds
            heartbeat = heartbeats.get(rank)
            if heartbeat is not None and (last.heartbeat is None or heartbeat.count != last.heartbeat.count):
                last.heartbeat, last.age = heartbeat, 0.0

    def check_processes(self) -> None:
        """Check whether the ranks' processes on this machine are there."""
        for rank in self.neighbours:
            is_gone = process_state(self._everyone[rank].pid) == "gone"
            last = self._heartbeats[rank]
            last.checks_without_process = last.checks_without_process + 1 if is_gone else 0

    def lost(self, silence: float, among: Iterable[int], checks: int = 2) -> list[LostRank]:
        """Return those of `among` that were silent for `silence` seconds, or gone at `checks` checks."""
        found = []
        for rank in sorted(among):
            last = self._heartbeats.get(rank)
            if last is not None and (last.age > silence or last.checks_without_process >= checks):
                found.append(self.describe(rank))
        return found

    def describe(self, rank: int, silent: float | None = None) -> LostRank:
        """Return what is known of a rank that counts as lost.

        Args:
            rank: The lost rank.
            silent: Seconds of its silence, if another clock knows better.
        """
        process, last = self._everyone[rank], self._heartbeats[rank]
        is_near = rank in self.neighbours
        heartbeat = last.heartbeat
        return LostRank(
            process=process,
            silent=last.age if silent is None else silent,
            step=None if heartbeat is None else heartbeat.step,
            state=process_state(process.pid) if is_near else None,
            memory=None if heartbeat is None else heartbeat.memory,
            num_kills=max(0, count_kills() - heartbeat.memory.num_kills)
            if is_near and heartbeat is not None
            else 0,
            ranks_there=sum(each.machine == process.machine for each in self._everyone),
        )


def _tell_nobody(step: int, sentence: str) -> None:
    pass


class Shutdown:
    """Ends this process. It never waits for the training thread, and for other ranks only for seconds."""

    def __init__(
        self,
        store: WatchdogStore,
        heartbeats: Heartbeats,
        everyone: Sequence[RankProcess],
        rank: int,
        progress: Progress,
    ):
        self.folder: Path | None = None
        """Folder for the stacks; None if there is none yet."""
        self.before_leaving: Callable[[], object] = lambda: None
        """Last work of a process that is rank 0 or reports why the job ends; raises nothing."""
        self.frames: list[FrameSummary] = []
        """Stack of the training thread when it raised an exception; empty if it did not."""
        self.tell: Callable[[int, str], None] = _tell_nobody
        """Called with the step and the sentence by the rank that reports; takes seconds at the most."""
        self.advise: Callable[[], str] = advise
        """Gives the advice for a rank that was killed for memory."""
        self._store, self._heartbeats = store, heartbeats
        self._everyone, self._rank = everyone, rank
        self._progress = progress
        self._tells = rank == 0

    def end_with_others(self, failure: Failure) -> None:
        """Report this rank and end together with the others, coordinated through the store.

        Raises:
            RuntimeError: The store is gone.
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

    def end_without_store(self, silent: float) -> None:
        """End without the store, which has not answered for so many seconds. Does not return."""
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
        """Return where this rank is, and write its stacks."""
        activity = self._progress.activity
        in_flight = in_flight_now()
        now = thread_position(self.frames or main_frames(), in_flight)
        own = self._everyone[self._rank]
        number = in_flight[0].number if in_flight and in_flight[0].name == now.collective else None
        if self.folder is not None:
            with suppress(OSError):
                write_stacks(self.folder, own.rank, f"{why}: {own}, {activity.doing}, step {activity.step}")
        return RankReport(
            process=own,
            doing=activity.doing,
            step=activity.step,
            place=now.place,
            collective=now.collective,
            number=number,
        )

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
        """Write the sentence on this rank's own console too, if the rank that reports has another one."""
        own, teller = self._everyone[self._rank], self._everyone[failure.rank]
        if own.rank != teller.rank and reports_own_exit(self._is_head and own.machine != teller.machine):
            self._write(f"{own}: ends with {failure.code}: {sentence}")

    @property
    def _is_head(self) -> bool:
        """Return whether this is the first rank of its machine."""
        return self._rank == min([self._rank, *self._heartbeats.neighbours])

    def _write(self, line: str) -> None:
        with suppress(OSError):
            os.write(STDERR, f"{os.linesep if os.isatty(STDERR) else ''}{line}\n".encode())

    def _is_reporter(self) -> bool:
        """Return whether this rank reports although no store can agree on one: one rank a file system."""
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
        """End this process and its data workers, without waiting for any destructor or thread."""
        if self._tells:
            self.before_leaving()  # takes seconds at the most
        write_exit_code(self._rank, len(self._everyone), code)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)


def is_from_peers(error: BaseException) -> bool:
    """Return whether another rank may have caused an exception: a collective that failed."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or _OF_PEERS.search(str(error)) is not None
    )


class Watchdog:
    """Ends this process if the job hangs or loses a rank, between `start` and `stop`.

    Args:
        store: The job's store; the watchdog makes a connection of its own to it.
        everyone: All ranks, in order.
        rank: This rank.
        progress: Activity of the training thread.
        limits: Seconds after which it counts as a hang.
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
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def set_run_dir(self, run_dir: Path, tell: Callable[[int, str], None] | None = None) -> None:
        """Write stacks to `hang/` in the run's directory.

        Args:
            run_dir: The run's directory.
            tell: Called with the step and why the job ends, on the rank that says so on the console.
        """
        self._shutdown.folder = run_dir / "hang"
        self._shutdown.tell = tell or self._shutdown.tell

    def tell(self, sentence: str) -> None:
        """Call the `tell` of `set_run_dir` with what ends the job, on a rank that raised it."""
        self._shutdown.tell(self._progress.activity.step, sentence)

    def set_memory_advice(self, advise: Callable[[], str]) -> None:
        """Set what gives the advice for a rank that was killed for memory; it raises nothing."""
        self._shutdown.advise = advise

    def _described(self, lost: Sequence[LostRank]) -> str:
        return describe_lost(lost, self._shutdown.advise)

    def before_leaving(self, work: Callable[[], object]) -> None:
        """Set the last work before the process ends: it raises nothing and takes seconds."""
        self._shutdown.before_leaving = work

    def stop(self) -> None:
        """Stop watching, at the good end of a run and before the store goes."""
        self._stopped.set()
        self._wake.set()
        self._threads[0].join(timeout=2 * PERIOD)

    def exit_if_peer_failed(self, error: BaseException) -> None:
        """End the process if another rank made a collective fail; return if none did."""
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
        """Count time in ticks. Time in which this thread did not run (a stopped process) is left out."""
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
                self._shutdown.end_without_store(self._quiet)

    def _talk(self) -> None:
        count, last, memory = 0, time.monotonic(), read_memory_usage()
        while not self._stopped.is_set():
            try:
                count += 1
                with suppress(OSError):  # no more files may be opened: what was known last will do
                    memory = read_memory_usage()
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
                    self._shutdown.end_with_others(failure)
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
