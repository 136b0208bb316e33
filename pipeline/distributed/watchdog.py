"""Ends a job that hangs or has lost a rank, within seconds, and names the rank at fault and its position.

Each rank has two threads. One talks to the job's store. The other never waits, and ends the process if even
the store does not answer. Neither waits for the training thread, a collective or a device.

Through the store the ranks exchange heartbeats, the failure that one of them claims, and a report of the
position of each rank. Every use of the store may raise RuntimeError if the store, or the link to it, is gone.
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

# Frames in these files belong to a collective, and functions with these names only wrap it.
_COLLECTIVE_FILES = ("/torch/distributed/", "/deepspeed/comm/")
_WRAPPERS = {"wrapper", "log_wrapper", "inner", "_fn", "<lambda>", "fn"}
# A line with one of these calls waits for the device, and so for the collective that the device is in.
_WAITING_CALLS = (".wait(", ".item(", "float(", "int(", "bool(", "synchronize(", ".tolist(", ".cpu(")
_OWN_FOLDER = os.path.dirname(__file__)
_STDLIB = sysconfig.get_paths()["stdlib"]


class ThreadPosition(NamedTuple):
    """Position of a thread."""

    collective: str | None
    """Collective that the thread waits in (`all_reduce`, `barrier`, ...); `None` if it waits for no rank."""
    place: str
    """Innermost line on the stack that is not of a library, with its file and function."""


class InFlight(NamedTuple):
    """Collective that this rank has entered and not left."""

    name: str
    number: int
    """Number of the collective in its process group."""


def thread_position(frames: Sequence[FrameSummary], in_flight: Sequence[InFlight] = ()) -> ThreadPosition:
    """Return the position of a thread.

    Args:
        frames: Stack of the thread, innermost frame last.
        in_flight: Collectives that the rank has entered and not left, in order.
    """
    library_frames: list[FrameSummary] = []
    user_frame = None
    for frame in reversed(frames):
        if not _is_library_frame(frame):
            user_frame = frame
            break
        library_frames.append(frame)
    innermost = frames[-1] if frames else FrameSummary("?", 0, "?", line="")
    place = _format_frame(user_frame or innermost)
    for frame in reversed(library_frames):  # outermost first: all_gather_object, not the all_gather in it
        if any(part in frame.filename for part in _COLLECTIVE_FILES) and frame.name not in _WRAPPERS:
            return ThreadPosition(frame.name, place)
    # Code that waits outside Python, such as autograd, shows its collective only in the flight recorder. A
    # line of the user's may also compute beside a collective in flight, so it must be one that waits.
    line = "" if user_frame is None else user_frame.line or ""
    if in_flight and (library_frames or any(call in line for call in _WAITING_CALLS)):
        return ThreadPosition(in_flight[0].name, place)
    return ThreadPosition(None, place)


def _is_library_frame(frame: FrameSummary) -> bool:
    """Return whether a frame is of a library; this package's wrappers of collectives count as one."""
    return frame.filename.startswith((_STDLIB, _OWN_FOLDER, "<")) or "site-packages" in frame.filename


def _format_frame(frame: FrameSummary) -> str:
    file = os.path.relpath(frame.filename) if frame.filename.startswith(os.getcwd()) else frame.filename
    return f"{file}:{frame.lineno or 0} in {frame.name}" + (f" ({frame.line})" if frame.line else "")


def main_frames() -> list[FrameSummary]:
    """Return the main thread's stack, innermost frame last; to be called by other threads."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.extract_stack(frame) if frame is not None else []


def in_flight_now() -> list[InFlight]:
    """Return the collectives that training has entered and not left, in order, from the flight recorders.

    Collectives of this package's other threads, such as the one that writes a checkpoint, are left out.
    """
    # An autograd thread that has run a Python hook is a _DummyThread, and its collectives are training's.
    others = {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    }
    found = []
    for entry in _read_flight_recorders(only_active=True).get("entries", []):
        if entry.get("retired") or entry.get("state") == "completed" or entry.get("thread_id") in others:
            continue
        name = entry["profiling_name"].rpartition(":")[2]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        found.append(InFlight(name, int(number)))
    return found


def write_stacks(folder: Path, rank: int, headline: str) -> None:
    """Write the Python stack of each thread, and the flight recorders' entries, to two files of this rank.

    For rank 1 the files are `rank-00001.txt` and, if there are entries, `rank-00001.collectives.json`.

    Args:
        folder: Folder of the files, which is created.
        rank: This rank.
        headline: First line of the stacks' file, after the time.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank:05d}.txt").open("w") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {headline}\n\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
    recorded = _read_flight_recorders(only_active=False)
    if recorded.get("entries"):
        (folder / f"rank-{rank:05d}.collectives.json").write_text(json.dumps(recorded))


def _read_flight_recorders(only_active: bool) -> dict[str, Any]:
    """Return the merged dumps of both flight recorders: NCCL's, which only CUDA builds have, then torch's.

    Args:
        only_active: Whether to leave out collectives that have completed.
    """
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
"""Exit code of every rank of a job that hung or lost a rank, the same as that of the command `timeout`."""
FAILURE_KEY = "pipeline/failure"
"""Key of the job's failure in the store."""
NO_FAILURE = "-"
"""Value of FAILURE_KEY until a rank claims a failure."""

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
SILENCE_SECONDS = 15.0
"""Seconds without a heartbeat, or without an answer, after which a rank or the store counts as lost."""
SHORT_SILENCE_SECONDS = 3.0
"""Seconds that replace SILENCE_SECONDS after a collective has failed."""
REPORT_SECONDS = 6.0
"""Seconds for every rank to report its position, also on a busy machine."""
SHUTDOWN_SECONDS = 20.0
"""Seconds after which a rank exits even if its shutdown has not finished."""
LONGEST_END = 30.0
"""Seconds after a failure within which the watchdog has ended its process."""
# Messages of gloo, NCCL and torch's store if another rank has failed, or if they have timed out.
_PEER_FAILURE = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out|[Tt]imed? ?out after|DistStore|recv"
)
_TIMEOUT = re.compile(r"Timed out waiting|timeout")


@dataclass(frozen=True)
class Failure:
    """Reason why the job ends, claimed once, by the first rank that knows of it."""

    rank: int
    """Rank that claimed the failure."""
    why: str
    """Kind of failure: `raised` if that rank prints its own error, else `hang` or `lost`.

    For `hang` and `lost` the rank at fault is still to be found.
    """
    code: int
    """Exit code of the job."""
    seconds: float = 0.0
    """Seconds without progress, for `hang`."""
    what: str = ""
    """Description of the rank whose heartbeats stopped, for `lost`."""


@dataclass(frozen=True)
class Heartbeat:
    """Sign of life that a rank sends about once a second."""

    count: int
    """Number of heartbeats that the rank has sent."""
    step: int
    """Number of optimizer steps completed."""
    memory: MemoryUsage


def claim_failure(store: Store, failure: Failure) -> Failure:
    """Claim a failure of the job, and return the job's failure: this one, or one that was claimed before.

    Raises:
        RuntimeError: The store is gone.
    """
    # The first call creates the key. Ranks that do so at the same time still agree in the second call.
    store.compare_set(FAILURE_KEY, "", NO_FAILURE)
    return _parse_failure(store.compare_set(FAILURE_KEY, NO_FAILURE, json.dumps(asdict(failure))))


class WatchdogStore:
    """Connects the watchdog to the job's store.

    It clones the store's connection, since the training thread may hang in a call on the original.
    """

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
        """Send a heartbeat of this rank."""
        self._store.set(f"pipeline/heartbeat/{self._rank}", json.dumps(asdict(heartbeat)))

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Return the newest heartbeat of each rank that sent any."""
        return {
            rank: _parse_heartbeat(value)
            for rank, value in read_by_rank(self._store, "heartbeat", ranks).items()
        }

    def failure(self) -> Failure | None:
        """Return the failure that ends the job; `None` if there is none."""
        value = self._store.get(FAILURE_KEY).decode()
        return None if value == NO_FAILURE else _parse_failure(value.encode())

    def claim(self, failure: Failure) -> Failure:
        """Claim a failure, and return the job's failure; see claim_failure."""
        return claim_failure(self._store, failure)

    def send_report(self, report: RankReport) -> None:
        """Send the report of this rank's position."""
        self._store.set(f"pipeline/report/{self._rank}", json.dumps(asdict(report)))

    def reports(self, ranks: Sequence[int]) -> list[RankReport]:
        """Return the reports of those of `ranks` that sent one."""
        found = [json.loads(value) for value in read_by_rank(self._store, "report", ranks).values()]
        return [RankReport(**values | {"process": RankProcess(**values["process"])}) for values in found]

    def publish_diagnosis(self, sentence: str) -> None:
        """Publish the sentence that says why the job ends, for all ranks."""
        self._store.set("pipeline/diagnosis", sentence)

    def diagnosis(self) -> str | None:
        """Return the published sentence; `None` if there is none yet."""
        key = "pipeline/diagnosis"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def count_rank(self, event: str) -> None:
        """Count this rank as one on which an event has happened."""
        self._store.add(f"pipeline/{event}", 1)

    def num_counted(self, event: str) -> int:
        """Return the number of ranks that were counted for an event."""
        return int(self._store.add(f"pipeline/{event}", 0))


def read_by_rank(store: Store, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
    """Return rank -> value of `pipeline/KEY/RANK` for each of `ranks` that has written one."""
    keys = {rank: f"pipeline/{key}/{rank}" for rank in ranks}
    if keys and not store.check(list(keys.values())):
        keys = {rank: each for rank, each in keys.items() if store.check([each])}
    return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


def _parse_failure(value: bytes) -> Failure:
    return Failure(**json.loads(value))


def _parse_heartbeat(value: bytes) -> Heartbeat:
    values: dict[str, Any] = json.loads(value)
    return Heartbeat(values["count"], values["step"], MemoryUsage(**values["memory"]))


@dataclass
class _LatestHeartbeat:
    """Latest heartbeat of a rank, and what has happened since."""

    heartbeat: Heartbeat | None = None
    """`None` if the rank has sent none."""
    age: float = 0.0
    """Seconds since the heartbeat changed."""
    checks_without_process: int = 0
    """Number of successive checks that did not find the rank's process."""


class Heartbeats:
    """Records the heartbeats of the other ranks, and finds ranks that are lost.

    Args:
        everyone: All ranks, in order.
        rank: This rank.
    """

    def __init__(self, everyone: Sequence[RankProcess], rank: int):
        self._everyone = everyone
        self._heartbeats = {each.rank: _LatestHeartbeat() for each in everyone if each.rank != rank}
        machine = everyone[rank].machine
        self.neighbours = [other for other in self._heartbeats if everyone[other].machine == machine]
        """Other ranks on this machine."""

    def update(self, watched: Iterable[int], heartbeats: Mapping[int, Heartbeat], seconds: float) -> None:
        """Record the newest heartbeats of the ranks that are watched.

        Args:
            watched: Ranks to record.
            heartbeats: Newest heartbeat of each rank that sent any.
            seconds: Seconds since the last call, without the time in which this process itself was stopped.
                They are added to the age of each heartbeat that has not changed.
        """
        for rank in watched:
            last = self._heartbeats.get(rank)
            if last is None:
                continue
            last.age += seconds
            heartbeat = heartbeats.get(rank)
            if heartbeat is not None and (last.heartbeat is None or heartbeat.count != last.heartbeat.count):
                last.heartbeat = heartbeat
                last.age = 0.0

    def check_processes(self) -> None:
        """Check whether the processes of the other ranks on this machine exist."""
        for rank in self.neighbours:
            is_gone = process_state(self._everyone[rank].pid) == "gone"
            last = self._heartbeats[rank]
            last.checks_without_process = last.checks_without_process + 1 if is_gone else 0

    def lost(self, silence: float, among: Iterable[int], checks: int = 2) -> list[LostRank]:
        """Return the lost ranks.

        Args:
            silence: Seconds without a heartbeat after which a rank is lost.
            among: Ranks to consider.
            checks: Number of successive calls of check_processes without its process after which a rank is
                lost. A single call may come while a process exits normally.
        """
        found = []
        for rank in sorted(among):
            last = self._heartbeats.get(rank)
            if last is not None and (last.age > silence or last.checks_without_process >= checks):
                found.append(self.describe(rank))
        return found

    def describe(self, rank: int, silent: float | None = None) -> LostRank:
        """Return the known facts about a rank that counts as lost.

        Args:
            rank: The lost rank.
            silent: Seconds since its last heartbeat; `None` for the seconds recorded here.
        """
        process = self._everyone[rank]
        last = self._heartbeats[rank]
        is_on_this_machine = rank in self.neighbours
        heartbeat = last.heartbeat
        state = process_state(process.pid) if is_on_this_machine else None
        num_kills = 0
        if is_on_this_machine and heartbeat is not None:
            num_kills = max(0, count_kills() - heartbeat.memory.num_kills)
        return LostRank(
            process=process,
            silent=last.age if silent is None else silent,
            step=None if heartbeat is None else heartbeat.step,
            state=state,
            memory=None if heartbeat is None else heartbeat.memory,
            num_kills=num_kills,
            ranks_there=sum(each.machine == process.machine for each in self._everyone),
        )


def _ignore_diagnosis(step: int, sentence: str) -> None:
    pass


class Shutdown:
    """Ends this process, after its rank has reported its position.

    It never waits for the training thread, and waits for other ranks only for seconds.

    Args:
        store: Connection to the job's store.
        heartbeats: Heartbeats of the other ranks.
        everyone: All ranks, in order.
        rank: This rank.
        progress: Activity of the training thread.
    """

    def __init__(
        self,
        store: WatchdogStore,
        heartbeats: Heartbeats,
        everyone: Sequence[RankProcess],
        rank: int,
        progress: Progress,
    ):
        self.folder: Path | None = None
        """Folder for the stacks; `None` if there is none yet."""
        self.before_leaving: Callable[[], object] = lambda: None
        """Last work of the process if it is rank 0 or prints the diagnosis; it must not raise."""
        self.frames: list[FrameSummary] = []
        """Stack of the training thread when it raised an exception; empty if it did not."""
        self.tell: Callable[[int, str], None] = _ignore_diagnosis
        """Called with the step and the sentence on the rank that prints the diagnosis.

        It may take a few seconds.
        """
        self.advise: Callable[[], str] = advise
        """Returns the advice for a rank that was killed for memory."""
        self._store = store
        self._heartbeats = heartbeats
        self._everyone = everyone
        self._rank = rank
        self._progress = progress
        self._runs_last_work = rank == 0

    def coordinate_exit(self, failure: Failure) -> None:
        """Coordinate this rank's exit with the other ranks through the store; the caller then calls `leave`.

        If the job hangs or has lost a rank, every rank sends a report of its position. The rank that claimed
        the failure prints the diagnosis.

        Raises:
            RuntimeError: The store is gone.
        """
        if failure.why == "raised":
            # The failed rank prints its error. Errors that it causes on this rank belong in this rank's log.
            self._print_own_exit(failure, f"{self._everyone[failure.rank]} failed; see its error message")
            self._store.count_rank("left")
            time.sleep(SHORT_SILENCE_SECONDS)
            return
        self._arm_exit_timer()
        self._store.send_report(self._make_report(failure.why))
        if failure.rank == self._rank:
            sentence = self._diagnose(failure)
            self._print_diagnosis(sentence)
            self._store.publish_diagnosis(sentence)
            self.tell(self._progress.activity.step, sentence)
        else:
            self._wait_until(lambda: self._store.diagnosis() is not None, 2 * REPORT_SECONDS)
            self._print_own_exit(failure, self._store.diagnosis() or "the job hung or lost a rank")
        self._store.count_rank("left")
        if self._rank == 0:  # the store ends with this process, and the others read the diagnosis in it
            self._wait_until(
                lambda: self._store.num_counted("left") >= len(self._everyone), SHORT_SILENCE_SECONDS
            )

    def end_without_store(self, silent: float) -> None:
        """End this process without the store; does not return.

        Args:
            silent: Seconds since the store last answered.
        """
        self._arm_exit_timer()
        with suppress(RuntimeError):
            self._make_report("lost")
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if by_launcher or self._rank == 0:
            line = (
                f"the launcher on {os.environ.get('MASTER_ADDR')}, or the link to it, is gone: its store has "
                f"not answered for {silent:.1f} s"
            )
        else:
            line = describe_lost([self._heartbeats.describe(0, silent)], self.advise)
        if self._claim_printing():
            self._print_diagnosis(line)
            self.tell(self._progress.activity.step, line)
        elif reports_own_exit(self._is_first_on_machine):
            self._print_line(line)
        self.leave(HANG_EXIT_CODE)

    def _arm_exit_timer(self) -> None:
        # The timer is a C thread, so it needs no lock of Python's and works even if this thread hangs.
        faulthandler.dump_traceback_later(SHUTDOWN_SECONDS + 5, exit=True, file=STDERR)

    def _make_report(self, why: str) -> RankReport:
        """Return the report of this rank's position, and write its stacks."""
        activity = self._progress.activity
        in_flight = in_flight_now()
        position = thread_position(self.frames or main_frames(), in_flight)
        own = self._everyone[self._rank]
        number = in_flight[0].number if in_flight and in_flight[0].name == position.collective else None
        if self.folder is not None:
            with suppress(OSError):
                write_stacks(self.folder, own.rank, f"{why}: {own}, {activity.doing}, step {activity.step}")
        return RankReport(
            process=own,
            doing=activity.doing,
            step=activity.step,
            place=position.place,
            collective=position.collective,
            number=number,
        )

    def _diagnose(self, failure: Failure) -> str:
        """Return the sentence that names the rank at fault, after waiting for the reports of all ranks."""
        ranks = range(len(self._everyone))
        began = last = time.monotonic()
        while True:
            self._heartbeats.update(ranks, self._store.heartbeats(ranks), time.monotonic() - last)
            last = time.monotonic()
            self._heartbeats.check_processes()
            reports = self._store.reports(ranks)
            reported = {report.process.rank for report in reports}
            lost = self._heartbeats.lost(REPORT_SECONDS, set(ranks) - reported, checks=1)
            if len(reported) + len(lost) == len(ranks) or last - began > REPORT_SECONDS:
                break
            time.sleep(HEARTBEAT_SECONDS / 5)
        known = reported | {each.process.rank for each in lost}
        lost += [self._heartbeats.describe(rank) for rank in ranks if rank not in known]
        if failure.why == "lost":
            if not lost:
                return f"{failure.what}; all ranks answer again"
            return describe_lost(lost, self.advise)
        return describe_hang(reports, failure.seconds, lost, self.advise)

    def _print_diagnosis(self, line: str) -> None:
        """Print the diagnosis on the console, and write it to the folder of the stacks."""
        self._runs_last_work = True
        # Logging and rich are not used, since the training thread may hang while it holds their locks.
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / "diagnosis.txt").write_text(line + "\n")
            line += f"; stacks: {self.folder}"
        self._print_line(line)

    def _print_own_exit(self, failure: Failure, sentence: str) -> None:
        """Print the sentence on this rank's console too, if the rank that prints it has another console."""
        own = self._everyone[self._rank]
        printing = self._everyone[failure.rank]
        is_alone_here = self._is_first_on_machine and own.machine != printing.machine
        if own.rank != printing.rank and reports_own_exit(is_alone_here):
            self._print_line(f"{own}: ends with {failure.code}: {sentence}")

    @property
    def _is_first_on_machine(self) -> bool:
        """Return whether this is the first rank of its machine."""
        return self._rank == min([self._rank, *self._heartbeats.neighbours])

    def _print_line(self, line: str) -> None:
        with suppress(OSError):
            os.write(STDERR, f"{os.linesep if os.isatty(STDERR) else ''}{line}\n".encode())

    def _claim_printing(self) -> bool:
        """Return whether this rank prints the diagnosis, decided without the store.

        One rank prints it for each shared run directory. Without a run directory, it is the first rank of
        each machine that is not rank 0.
        """
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    (self.folder / f".told-{self._everyone[0].pid}").touch(exist_ok=False)
                except FileExistsError:
                    return False
                return True
        return self._rank == min({self._rank, *self._heartbeats.neighbours} - {0}, default=0)

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        while not is_so() and time.monotonic() - began < seconds:
            time.sleep(HEARTBEAT_SECONDS / 10)

    def leave(self, code: int) -> None:
        """End this process and its data workers, without waiting for any destructor or thread.

        Args:
            code: Exit code of the process.
        """
        if self._runs_last_work:
            self.before_leaving()
        write_exit_code(self._rank, len(self._everyone), code)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)


def is_from_peers(error: BaseException) -> bool:
    """Return whether another rank may have caused an exception, since a collective or the store failed."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or _PEER_FAILURE.search(str(error)) is not None
    )


class Watchdog:
    """Ends this process if the job hangs or loses a rank, between `start` and `stop`.

    Args:
        store: The job's store, to which the watchdog opens its own connection.
        everyone: All ranks, in order.
        rank: This rank.
        progress: Activity of the training thread.
        limits: Limits of time without progress; see Progress.limit.
    """

    def __init__(
        self,
        store: Store,
        everyone: Sequence[RankProcess],
        rank: int,
        progress: Progress,
        limits: DistributedConfig,
    ):
        self._everyone = everyone
        self._rank = rank
        self._progress = progress
        self._limits = limits
        self._store = WatchdogStore(store, rank, SILENCE_SECONDS)
        self._heartbeats = Heartbeats(everyone, rank)
        self._shutdown = Shutdown(self._store, self._heartbeats, everyone, rank, progress)
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._shutdown_lock = threading.Lock()  # never released: the thread that acquires it ends the process
        self._store_silent_seconds = 0.0
        self._has_store_failed = False
        self._suspected: Failure | None = None
        self._is_suspicious = False
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._communicate, self._check_limits)
        ]

    def start(self) -> None:
        """Start to watch."""
        for thread in self._threads:
            thread.start()

    def set_run_dir(self, run_dir: Path, tell: Callable[[int, str], None] | None = None) -> None:
        """Set the run's directory, in whose folder `hang/` the stacks are written.

        Args:
            run_dir: The run's directory.
            tell: Called with the step and the reason why the job ends, on the rank that prints the reason.
        """
        self._shutdown.folder = run_dir / "hang"
        self._shutdown.tell = tell or self._shutdown.tell

    def tell(self, sentence: str) -> None:
        """Call the `tell` of `set_run_dir` with the error that ends the job, on the rank that raised it."""
        self._shutdown.tell(self._progress.activity.step, sentence)

    def set_memory_advice(self, advise: Callable[[], str]) -> None:
        """Set the function that returns advice for a rank that was killed for memory; it must not raise."""
        self._shutdown.advise = advise

    def _describe_lost(self, lost: Sequence[LostRank]) -> str:
        return describe_lost(lost, self._shutdown.advise)

    def before_leaving(self, work: Callable[[], object]) -> None:
        """Set the last work before the process ends; it must not raise, and may take a few seconds."""
        self._shutdown.before_leaving = work

    def stop(self) -> None:
        """Stop watching, at the end of a run that succeeded and before its store is closed."""
        self._stopped.set()
        self._wake.set()
        self._threads[0].join(timeout=2 * HEARTBEAT_SECONDS)

    def exit_if_peer_failed(self, error: BaseException) -> None:
        """Wait for the watchdog to end the process if another rank has failed; else return after seconds.

        Args:
            error: Exception of the training thread.
        """
        self._shutdown.frames = traceback.extract_tb(error.__traceback__)
        if is_from_peers(error) and _TIMEOUT.search(str(error)):
            idle = time.monotonic() - self._progress.activity.since
            self._suspected = Failure(self._rank, "hang", HANG_EXIT_CODE, idle)
        self._is_suspicious = True
        self._wake.set()
        time.sleep(2 * SHORT_SILENCE_SECONDS)
        if self._shutdown_lock.locked():
            time.sleep(SHUTDOWN_SECONDS)

    def _check_limits(self) -> None:
        """Detect hangs and a lost store, and end a shutdown that takes too long.

        Time is counted in ticks, without the time in which this thread did not run (a stopped process).
        """
        tick = HEARTBEAT_SECONDS / 2
        previous = self._progress.activity
        idle = 0.0
        ending = 0.0
        last = time.monotonic()
        while not self._stopped.wait(tick):
            now = time.monotonic()
            passed = min(now - last, 4 * tick)
            last = now
            self._store_silent_seconds += passed
            activity = self._progress.activity
            idle = idle + passed if activity is previous else 0.0
            previous = activity
            if self._shutdown_lock.locked():
                ending += passed
                if ending > SHUTDOWN_SECONDS:
                    self._shutdown.leave(HANG_EXIT_CODE)
                continue
            if self._suspected is None and idle > self._progress.limit(self._limits):
                self._suspected = Failure(self._rank, "hang", HANG_EXIT_CODE, idle)
                self._wake.set()
            patience = SHORT_SILENCE_SECONDS if self._has_store_failed else SILENCE_SECONDS
            if self._store_silent_seconds > patience and self._shutdown_lock.acquire(blocking=False):
                self._shutdown.end_without_store(self._store_silent_seconds)

    def _communicate(self) -> None:
        """Exchange heartbeats and failures with the other ranks, and shut down once there is a failure."""
        count = 0
        last = time.monotonic()
        memory = read_memory_usage()
        while not self._stopped.is_set():
            try:
                count += 1
                with suppress(OSError):  # the process can open no more files, so the last value is sent
                    memory = read_memory_usage()
                self._store.send_heartbeat(Heartbeat(count, self._progress.activity.step, memory))
                failure = self._store.failure()
                now = time.monotonic()
                passed = min(now - last, 2 * HEARTBEAT_SECONDS)
                last = now
                # Rank 0, which hosts the store, watches all ranks. For each other rank that did the same, the
                # store would have to serve as many reads again.
                watched = range(len(self._everyone)) if self._rank == 0 or self._is_suspicious else [0]
                self._heartbeats.update(watched, self._store.heartbeats(watched), passed)
                self._heartbeats.check_processes()
                suspected = self._suspected
                if suspected is None and (lost := self._find_lost(watched)):
                    suspected = Failure(self._rank, "lost", HANG_EXIT_CODE, what=self._describe_lost(lost))
                if failure is None and suspected is not None:
                    failure = self._store.claim(suspected)
            except dist.DistNetworkError:  # the store's process has ended; _check_limits ends this one
                self._has_store_failed = True
                return
            except RuntimeError:  # no answer in time
                continue
            self._store_silent_seconds = 0.0
            # The training thread prints an error that this rank raised itself.
            is_own = failure is not None and (failure.rank, failure.why) == (self._rank, "raised")
            if failure is not None and not is_own and self._shutdown_lock.acquire(blocking=False):
                with suppress(RuntimeError):  # rank 0 has ended meanwhile, and the store with it
                    self._shutdown.coordinate_exit(failure)
                self._shutdown.leave(failure.code)
            self._wake.wait(HEARTBEAT_SECONDS / (4 if self._is_suspicious else 1))
            self._wake.clear()

    def _find_lost(self, watched: Sequence[int]) -> list[LostRank]:
        among = {*watched, *self._heartbeats.neighbours}
        if self._is_suspicious:
            return self._heartbeats.lost(SHORT_SILENCE_SECONDS, among, checks=1)
        # Imports and loading CUDA may keep all other Python threads from running for seconds.
        is_starting = self._progress.activity.doing == "starting"
        return self._heartbeats.lost(SILENCE_SECONDS * (4 if is_starting else 1), among)
