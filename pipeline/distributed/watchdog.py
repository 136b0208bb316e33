"""Ends a job that hangs or has lost a rank, within seconds, and names the rank at fault and its position.

Each rank has two watchdog threads. One talks to the job's store. The other never waits for the store, and
ends the process if the store does not answer. Neither thread waits for the training thread, a collective or
a device.

Through the store the ranks exchange heartbeats, the failure that one of them claims, and a report of the
position of each rank. Every call on the store raises RuntimeError if the store, or the link to it, is gone.
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

HANG_EXIT_CODE = 124
"""Exit code of every rank of a job that hung or lost a rank. The command `timeout` has the same code."""
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
"""Seconds that the ranks have to report their positions. On a busy machine this takes a few seconds."""
SHUTDOWN_SECONDS = 20.0
"""Seconds after which a rank exits even if its shutdown has not finished."""
MAX_SHUTDOWN_SECONDS = 30.0
"""Seconds after a failure within which the watchdog has ended its process."""
# Matches messages of gloo, NCCL and torch's store after another rank has failed, or after a timeout.
_PEER_FAILURE = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out|[Tt]imed? ?out after|DistStore|recv"
)
_TIMEOUT = re.compile(r"Timed out waiting|timeout")
# Frames in these files belong to a collective, except for functions with these names, which only wrap it.
_COLLECTIVE_FILES = ("/torch/distributed/", "/deepspeed/comm/")
_WRAPPERS = {"wrapper", "log_wrapper", "inner", "_fn", "<lambda>", "fn"}
# A line with one of these calls synchronizes with the device, and so waits for the device's collective.
_SYNCHRONIZING_CALLS = (".wait(", ".item(", "float(", "int(", "bool(", "synchronize(", ".tolist(", ".cpu(")
_THIS_PACKAGE = os.path.dirname(__file__)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


class ThreadPosition(NamedTuple):
    """Line of code at which a thread is, and the collective that it waits in."""

    collective: str | None
    """Collective that the thread waits in (`all_reduce`, `barrier`, ...); `None` if it waits in none."""
    place: str
    """Innermost line on the stack that is not of a library, with its file and function."""


class InFlight(NamedTuple):
    """Collective that this rank has entered and not left."""

    name: str
    """Name of the collective, such as `all_reduce`."""
    number: int
    """Sequence number in its process group. Collectives and point-to-point operations count separately."""


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
    # Native code that waits, such as autograd's, shows its collective only in the flight recorder. But the
    # user's code may also compute while a collective is in flight. Its line counts as waiting only if it
    # synchronizes with the device.
    line = "" if user_frame is None else user_frame.line or ""
    may_wait = bool(library_frames) or any(call in line for call in _SYNCHRONIZING_CALLS)
    if in_flight and may_wait:
        return ThreadPosition(in_flight[0].name, place)
    return ThreadPosition(None, place)


def _is_library_frame(frame: FrameSummary) -> bool:
    """Return whether a frame is of a library or of this package, which wraps collectives."""
    return (
        frame.filename.startswith((_STANDARD_LIBRARY, _THIS_PACKAGE, "<"))
        or "site-packages" in frame.filename
    )


def _format_frame(frame: FrameSummary) -> str:
    """Return `FILE:LINE in FUNCTION (CODE)`, with a relative path below the working folder."""
    file = os.path.relpath(frame.filename) if frame.filename.startswith(os.getcwd()) else frame.filename
    code = f" ({frame.line})" if frame.line else ""
    return f"{file}:{frame.lineno or 0} in {frame.name}{code}"


def main_frames() -> list[FrameSummary]:
    """Return the main thread's stack, innermost frame last. Call it on another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.extract_stack(frame) if frame is not None else []


def in_flight_now() -> list[InFlight]:
    """Return the collectives that training has entered and not left, in order, from the flight recorders.

    Collectives of other Python threads, such as the one that writes a checkpoint, are left out.
    """
    # Autograd's threads run collectives of training. Those that have run a Python hook are _DummyThreads.
    other_threads = {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    }
    collectives = []
    for entry in _read_flight_recorders(only_active=True).get("entries", []):
        has_ended = entry.get("retired") or entry.get("state") == "completed"
        if has_ended or entry.get("thread_id") in other_threads:
            continue
        name = entry["profiling_name"].rpartition(":")[2]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        collectives.append(InFlight(name, int(number)))
    return collectives


def write_stacks(folder: Path, rank: int, headline: str) -> None:
    """Write the Python stack of each thread, and the flight recorders' entries, to two files of this rank.

    For rank 1 the files are `rank-00001.txt` and, if there are entries, `rank-00001.collectives.json`.

    Args:
        folder: Folder of the files, which is created.
        rank: This rank.
        headline: Text of the first line of the stacks' file, which begins with the time.

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


@dataclass(frozen=True)
class Failure:
    """Reason why the job ends, claimed once, by the first rank that knows of it."""

    rank: int
    """Rank that claimed the failure."""
    kind: str
    """`raised` if the claiming rank prints its own error; `hang`; or `lost` if heartbeats of a rank stopped.

    For `hang` and `lost` the ranks then report their positions, so that the rank at fault can be named.
    """
    code: int
    """Exit code of the job."""
    idle_seconds: float = 0.0
    """Seconds without progress, for `hang`."""
    description: str = ""
    """Sentence about the ranks whose heartbeats stopped, for `lost`."""


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

    def __init__(self, store: Store, rank: int, timeout_seconds: float):
        """Connect to the store.

        Args:
            store: The job's store, which is cloned.
            rank: This rank.
            timeout_seconds: Seconds that the store may take to answer.
        """
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=timeout_seconds))
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
        """Return the reports of `ranks`, without the ranks that have not sent a report."""
        reports = []
        for value in read_by_rank(self._store, "report", ranks).values():
            fields = json.loads(value)
            fields["process"] = RankProcess(**fields["process"])
            reports.append(RankReport(**fields))
        return reports

    def publish_diagnosis(self, sentence: str) -> None:
        """Publish the sentence that says why the job ends, for all ranks."""
        self._store.set("pipeline/diagnosis", sentence)

    def diagnosis(self) -> str | None:
        """Return the published sentence; `None` if there is none yet."""
        key = "pipeline/diagnosis"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def count_rank(self, event: str) -> None:
        """Count this rank as one on which an event has happened, such as `left`. Call it once per event."""
        self._store.add(f"pipeline/{event}", 1)

    def num_counted(self, event: str) -> int:
        """Return the number of ranks that were counted for an event."""
        return int(self._store.add(f"pipeline/{event}", 0))


def read_by_rank(store: Store, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
    """Return rank -> value of `pipeline/KEY/RANK` for each of `ranks` that has written one."""
    keys = {rank: f"pipeline/{key}/{rank}" for rank in ranks}
    # The first check asks for all keys in one message. Reading a missing key would wait for it.
    if keys and not store.check(list(keys.values())):
        keys = {rank: each for rank, each in keys.items() if store.check([each])}
    if not keys:
        return {}
    return dict(zip(keys, store.multi_get(list(keys.values())), strict=True))


def _parse_failure(value: bytes) -> Failure:
    """Return the failure in a value of FAILURE_KEY other than NO_FAILURE."""
    return Failure(**json.loads(value))


def _parse_heartbeat(value: bytes) -> Heartbeat:
    values: dict[str, Any] = json.loads(value)
    return Heartbeat(values["count"], values["step"], MemoryUsage(**values["memory"]))


@dataclass
class _LatestHeartbeat:
    """Latest heartbeat of a rank, its age, and the state of the rank's process."""

    heartbeat: Heartbeat | None = None
    """`None` if the rank has sent none."""
    age: float = 0.0
    """Seconds that the rank has been watched since the heartbeat last changed."""
    checks_without_process: int = 0
    """Number of checks in a row that did not find the rank's process; 0 for ranks of other machines."""


class Heartbeats:
    """Records the heartbeats of the other ranks, and finds ranks that are lost.

    Args:
        rank_processes: Processes of all ranks, in the order of the ranks.
        rank: This rank.
    """

    def __init__(self, rank_processes: Sequence[RankProcess], rank: int):
        self._rank_processes = rank_processes
        self._heartbeats = {each.rank: _LatestHeartbeat() for each in rank_processes if each.rank != rank}
        machine = rank_processes[rank].machine
        self.neighbours = [other for other in self._heartbeats if rank_processes[other].machine == machine]
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
            is_gone = process_state(self._rank_processes[rank].pid) == "gone"
            last = self._heartbeats[rank]
            last.checks_without_process = last.checks_without_process + 1 if is_gone else 0

    def find_lost(
        self, silence_seconds: float, candidates: Iterable[int], num_checks: int = 2
    ) -> list[LostRank]:
        """Return the lost ranks.

        Args:
            silence_seconds: Seconds without a heartbeat after which a rank is lost.
            candidates: Ranks to consider.
            num_checks: Number of checks in a row without its process after which a rank is lost (see
                `check_processes`). A single check may come while a process exits normally.
        """
        lost_ranks = []
        for rank in sorted(candidates):
            last = self._heartbeats.get(rank)
            if last is None:
                continue
            if last.age > silence_seconds or last.checks_without_process >= num_checks:
                lost_ranks.append(self.describe(rank))
        return lost_ranks

    def describe(self, rank: int, silent_seconds: float | None = None) -> LostRank:
        """Return the known facts about a rank that counts as lost.

        Args:
            rank: The lost rank.
            silent_seconds: Seconds since its last heartbeat; `None` for the recorded age of the heartbeat.
        """
        process = self._rank_processes[rank]
        last = self._heartbeats[rank]
        is_on_this_machine = rank in self.neighbours
        heartbeat = last.heartbeat
        state = process_state(process.pid) if is_on_this_machine else None
        num_kills = 0
        if is_on_this_machine and heartbeat is not None:
            num_kills = max(0, count_kills() - heartbeat.memory.num_kills)
        return LostRank(
            process=process,
            silent_seconds=last.age if silent_seconds is None else silent_seconds,
            step=None if heartbeat is None else heartbeat.step,
            state=state,
            memory=None if heartbeat is None else heartbeat.memory,
            num_kills=num_kills,
            ranks_on_machine=sum(each.machine == process.machine for each in self._rank_processes),
        )


def _ignore_notification(step: int, sentence: str) -> None:
    """Do nothing: this is the `notify` of a rank without a run directory."""


class Shutdown:
    """Ends this process, after its rank has reported its position.

    It never waits for the training thread. It waits for other ranks, but only for seconds.

    Args:
        store: Connection to the job's store.
        heartbeats: Heartbeats of the other ranks.
        rank_processes: Processes of all ranks, in the order of the ranks.
        rank: This rank.
        progress: Activity of the training thread.
    """

    def __init__(
        self,
        store: WatchdogStore,
        heartbeats: Heartbeats,
        rank_processes: Sequence[RankProcess],
        rank: int,
        progress: Progress,
    ):
        self.folder: Path | None = None
        """Folder for the stacks and the diagnosis; `None` before the run has a directory."""
        self.last_work: Callable[[], object] = lambda: None
        """Function that `leave` calls on rank 0 and on the rank that printed the diagnosis.

        It must not raise.
        """
        self.frames: list[FrameSummary] = []
        """Stack of the training thread when it raised an exception; empty if it did not."""
        self.notify: Callable[[int, str], None] = _ignore_notification
        """Function that is called with the step and the diagnosis, on the rank that prints the diagnosis.

        It may take a few seconds.
        """
        self.advise: Callable[[], str] = advise
        """Function that returns the advice for a rank that was killed for memory."""
        self._store = store
        self._heartbeats = heartbeats
        self._rank_processes = rank_processes
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
        if failure.kind == "raised":
            # The failed rank prints its error. The pause below lets the training thread of this rank log the
            # errors that follow from it.
            failed = self._rank_processes[failure.rank]
            self._print_own_exit(failure, f"{failed} failed; see its error message")
            self._store.count_rank("left")
            time.sleep(SHORT_SILENCE_SECONDS)
            return
        self._arm_exit_timer()
        self._store.send_report(self._make_report(failure.kind))
        if failure.rank == self._rank:
            sentence = self._diagnose(failure)
            self._print_diagnosis(sentence)
            self._store.publish_diagnosis(sentence)
            self.notify(self._progress.activity.step, sentence)
        else:
            self._wait_until(lambda: self._store.diagnosis() is not None, 2 * REPORT_SECONDS)
            self._print_own_exit(failure, self._store.diagnosis() or "the job hung or lost a rank")
        self._store.count_rank("left")
        if self._rank == 0:  # the store ends with this process, and the others read the diagnosis in it
            self._wait_until(
                lambda: self._store.num_counted("left") >= len(self._rank_processes), SHORT_SILENCE_SECONDS
            )

    def end_without_store(self, silent_seconds: float) -> None:
        """End this process without the store; does not return.

        The process that serves the store counts as lost: the launcher, or else rank 0.

        Args:
            silent_seconds: Seconds since the store last answered.
        """
        self._arm_exit_timer()
        with suppress(RuntimeError):
            self._make_report("lost")
        is_served_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_served_by_launcher or self._rank == 0:
            line = (
                f"the launcher on {os.environ.get('MASTER_ADDR')}, or the link to it, is gone: its store has "
                f"not answered for {silent_seconds:.1f} s"
            )
        else:
            line = describe_lost([self._heartbeats.describe(0, silent_seconds)], self.advise)
        if self._claim_printing():
            self._print_diagnosis(line)
            self.notify(self._progress.activity.step, line)
        elif reports_own_exit(self._is_first_on_machine):
            self._print_line(line)
        self.leave(HANG_EXIT_CODE)

    def _arm_exit_timer(self) -> None:
        """Start a timer that ends the process if the shutdown hangs."""
        # The timer is a C thread. It needs no lock of Python's, so it works even if this thread hangs.
        faulthandler.dump_traceback_later(SHUTDOWN_SECONDS + 5, exit=True, file=STDERR)

    def _make_report(self, failure_kind: str) -> RankReport:
        """Return the report of this rank's position, and write its stacks."""
        activity = self._progress.activity
        in_flight = in_flight_now()
        position = thread_position(self.frames or main_frames(), in_flight)
        own = self._rank_processes[self._rank]
        number = None
        if in_flight and in_flight[0].name == position.collective:
            number = in_flight[0].number
        if self.folder is not None:
            headline = f"{failure_kind}: {own}, {activity.doing}, step {activity.step}"
            with suppress(OSError):
                write_stacks(self.folder, own.rank, headline)
        return RankReport(
            process=own,
            doing=activity.doing,
            step=activity.step,
            place=position.place,
            collective=position.collective,
            number=number,
        )

    def _diagnose(self, failure: Failure) -> str:
        """Return the sentence that names the rank at fault, after waiting for the reports of all ranks.

        Raises:
            RuntimeError: The store is gone.
        """
        ranks = range(len(self._rank_processes))
        began = time.monotonic()
        last = began
        while True:
            self._heartbeats.update(ranks, self._store.heartbeats(ranks), time.monotonic() - last)
            last = time.monotonic()
            self._heartbeats.check_processes()
            reports = self._store.reports(ranks)
            reported = {report.process.rank for report in reports}
            lost = self._heartbeats.find_lost(REPORT_SECONDS, set(ranks) - reported, num_checks=1)
            if len(reported) + len(lost) == len(ranks) or last - began > REPORT_SECONDS:
                break
            time.sleep(HEARTBEAT_SECONDS / 5)
        accounted = reported | {each.process.rank for each in lost}
        lost += [self._heartbeats.describe(rank) for rank in ranks if rank not in accounted]
        if failure.kind == "lost":
            if not lost:
                return f"{failure.description}; all ranks answer again"
            return describe_lost(lost, self.advise)
        return describe_hang(reports, failure.idle_seconds, lost, self.advise)

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
        """Print why this rank exits, if the rank that claimed the failure prints on another console."""
        own = self._rank_processes[self._rank]
        claimant = self._rank_processes[failure.rank]
        is_only_reporter = self._is_first_on_machine and own.machine != claimant.machine
        if own.rank != claimant.rank and reports_own_exit(is_only_reporter):
            self._print_line(f"{own}: exits with code {failure.code}: {sentence}")

    @property
    def _is_first_on_machine(self) -> bool:
        """Return whether this is the first rank of its machine."""
        return self._rank == min([self._rank, *self._heartbeats.neighbours])

    def _print_line(self, line: str) -> None:
        """Print a line on standard error. On a terminal it begins a new line, after an unfinished one."""
        prefix = os.linesep if os.isatty(STDERR) else ""
        with suppress(OSError):
            os.write(STDERR, f"{prefix}{line}\n".encode())

    def _claim_printing(self) -> bool:
        """Claim the printing of the diagnosis without the store, and return whether this rank has it.

        Of the ranks that share a run directory, the first rank that creates a file there prints it. Without a
        run directory, one rank of each machine prints it: the lowest rank other than rank 0.
        """
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    (self.folder / f".diagnosis-printed-{self._rank_processes[0].pid}").touch(exist_ok=False)
                except FileExistsError:
                    return False
                return True
        return self._rank == min({self._rank, *self._heartbeats.neighbours} - {0}, default=0)

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition holds, but at most so many seconds."""
        began = time.monotonic()
        while not condition() and time.monotonic() - began < seconds:
            time.sleep(HEARTBEAT_SECONDS / 10)

    def leave(self, code: int) -> None:
        """End this process and its data workers, without waiting for any destructor or thread.

        It calls `last_work` if that applies to this rank, and writes the exit code for our launch scripts.

        Args:
            code: Exit code of the process.
        """
        if self._runs_last_work:
            self.last_work()
        write_exit_code(self._rank, len(self._rank_processes), code)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)


def may_be_from_peer(error: BaseException) -> bool:
    """Return whether another rank may have caused an exception: it comes from a collective or the store."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or _PEER_FAILURE.search(str(error)) is not None
    )


class Watchdog:
    """Ends this process if the job hangs or loses a rank, between `start` and `stop`.

    Args:
        store: The job's store, to which the watchdog opens its own connection.
        rank_processes: Processes of all ranks, in the order of the ranks.
        rank: This rank.
        progress: Activity of the training thread.
        limits: Limits of time without progress; see Progress.limit.
    """

    def __init__(
        self,
        store: Store,
        rank_processes: Sequence[RankProcess],
        rank: int,
        progress: Progress,
        limits: DistributedConfig,
    ):
        self._rank_processes = rank_processes
        self._rank = rank
        self._progress = progress
        self._limits = limits
        self._store = WatchdogStore(store, rank, SILENCE_SECONDS)
        self._heartbeats = Heartbeats(rank_processes, rank)
        self._shutdown = Shutdown(self._store, self._heartbeats, rank_processes, rank, progress)
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._shutdown_lock = threading.Lock()  # never released: the thread that acquires it ends the process
        self._store_silent_seconds = 0.0
        self._has_store_failed = False
        self._suspected: Failure | None = None  # hang that this rank has detected and not yet claimed
        self._has_raised = False  # whether the training thread has raised an exception
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._communicate, self._check_limits)
        ]

    def start(self) -> None:
        """Start the two threads."""
        for thread in self._threads:
            thread.start()

    def set_run_dir(self, run_dir: Path, notify: Callable[[int, str], None] | None = None) -> None:
        """Set the run's directory. The stacks are written to its folder `hang/`.

        Args:
            run_dir: The run's directory.
            notify: Function that is called with the step and the reason why the job ends, on the rank that
                prints the reason. `None` leaves it as it is.
        """
        self._shutdown.folder = run_dir / "hang"
        self._shutdown.notify = notify or self._shutdown.notify

    def notify(self, sentence: str) -> None:
        """Pass the error that ends the job to the `notify` function of `set_run_dir`.

        Call it on the rank that raised the error.

        Args:
            sentence: The error, in one sentence.
        """
        self._shutdown.notify(self._progress.activity.step, sentence)

    def set_memory_advice(self, advise: Callable[[], str]) -> None:
        """Set the function that returns advice for a rank that was killed for memory; it must not raise."""
        self._shutdown.advise = advise

    def set_last_work(self, work: Callable[[], object]) -> None:
        """Set the function that rank 0 and the rank that prints the diagnosis call before they end.

        It must not raise, and may take a few seconds.
        """
        self._shutdown.last_work = work

    def stop(self) -> None:
        """Stop watching. Call it at the end of a run that succeeded, before its store is closed."""
        self._stopped.set()
        self._wake.set()
        self._threads[0].join(timeout=2 * HEARTBEAT_SECONDS)

    def exit_if_peer_failed(self, error: BaseException) -> None:
        """Wait for the watchdog to end the process if another rank has failed; else return after 6 s.

        Call it on the training thread.

        Args:
            error: Exception of the training thread.
        """
        self._shutdown.frames = traceback.extract_tb(error.__traceback__)
        if may_be_from_peer(error) and _TIMEOUT.search(str(error)):
            idle = time.monotonic() - self._progress.activity.since
            self._suspected = Failure(self._rank, "hang", HANG_EXIT_CODE, idle)
        self._has_raised = True
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
        shutdown_seconds = 0.0
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
                shutdown_seconds += passed
                if shutdown_seconds > SHUTDOWN_SECONDS:
                    self._shutdown.leave(HANG_EXIT_CODE)
                continue
            if self._suspected is None and idle > self._progress.limit(self._limits):
                self._suspected = Failure(self._rank, "hang", HANG_EXIT_CODE, idle)
                self._wake.set()
            max_silence = SHORT_SILENCE_SECONDS if self._has_store_failed else SILENCE_SECONDS
            if self._store_silent_seconds > max_silence and self._shutdown_lock.acquire(blocking=False):
                self._shutdown.end_without_store(self._store_silent_seconds)

    def _communicate(self) -> None:
        """Exchange heartbeats and failures with the other ranks, and shut down once there is a failure."""
        count = 0
        last = time.monotonic()
        memory = read_memory_usage()
        while not self._stopped.is_set():
            try:
                count += 1
                with suppress(OSError):  # the process can open no more files, so the last value is sent again
                    memory = read_memory_usage()
                self._store.send_heartbeat(Heartbeat(count, self._progress.activity.step, memory))
                failure = self._store.failure()
                now = time.monotonic()
                passed = min(now - last, 2 * HEARTBEAT_SECONDS)
                last = now
                # Rank 0, which hosts the store, watches all ranks. If every rank did, the store would have to
                # serve the square of the number of ranks in reads.
                watches_all = self._rank == 0 or self._has_raised
                watched = range(len(self._rank_processes)) if watches_all else [0]
                self._heartbeats.update(watched, self._store.heartbeats(watched), passed)
                self._heartbeats.check_processes()
                suspected = self._suspected or self._find_lost_ranks(watched)
                if failure is None and suspected is not None:
                    failure = self._store.claim(suspected)
            except dist.DistNetworkError:  # the store's process has ended; _check_limits ends this process
                self._has_store_failed = True
                return
            except RuntimeError:  # no answer in time
                continue
            self._store_silent_seconds = 0.0
            # If this rank raised the error itself, its training thread prints it and ends the process.
            is_own = failure is not None and (failure.rank, failure.kind) == (self._rank, "raised")
            if failure is not None and not is_own and self._shutdown_lock.acquire(blocking=False):
                with suppress(RuntimeError):  # rank 0 has ended meanwhile, and the store with it
                    self._shutdown.coordinate_exit(failure)
                self._shutdown.leave(failure.code)
            self._wake.wait(HEARTBEAT_SECONDS / (4 if self._has_raised else 1))
            self._wake.clear()

    def _find_lost_ranks(self, watched: Sequence[int]) -> Failure | None:
        """Return a failure that describes the lost ranks; `None` if no rank is lost.

        Args:
            watched: Ranks whose heartbeats this rank reads. Its neighbours are checked too.
        """
        candidates = {*watched, *self._heartbeats.neighbours}
        if self._has_raised:
            lost = self._heartbeats.find_lost(SHORT_SILENCE_SECONDS, candidates, num_checks=1)
        else:
            # Imports and loading CUDA may keep all other Python threads from running for seconds.
            is_starting = self._progress.activity.doing == "starting"
            lost = self._heartbeats.find_lost(SILENCE_SECONDS * (4 if is_starting else 1), candidates)
        if not lost:
            return None
        description = describe_lost(lost, self._shutdown.advise)
        return Failure(self._rank, "lost", HANG_EXIT_CODE, description=description)
