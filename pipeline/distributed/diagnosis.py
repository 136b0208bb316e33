"""Turns the reports of the ranks into one sentence that names the rank at fault.

The functions here have no side effects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.distributed.machine import MemoryUsage
from pipeline.files import format_bytes

Item = TypeVar("Item")
Key = TypeVar("Key")
NEARLY_FULL_SHARE = 0.9
"""Share of the memory limit above which a lost process was most likely killed for memory."""
MEMORY_ADVICE = "lower batch.micro_batch_size or loader.num_workers, or give the job more memory"
"""General advice for a rank that was killed for memory."""


@dataclass(frozen=True)
class RankProcess:
    """Rank of a job and the process that runs it."""

    rank: int
    host: str
    """Host name of the process's machine, for messages."""
    pid: int
    """Process id, in the process's own PID namespace."""
    machine: str = ""
    """Id of the process's machine and PID namespace; see machine.machine_id."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class RankReport:
    """Position of a rank that is alive, as the rank itself reports it."""

    process: RankProcess
    doing: str
    """Kind of activity; see progress.Progress.start_activity."""
    step: int
    """Number of optimizer steps completed."""
    place: str
    """Innermost line on the stack that is not of a library, with its file and function."""
    collective: str | None = None
    """Collective that the rank waits in; `None` if the rank is busy with something else."""
    number: int | None = None
    """Sequence number of the collective in its process group; `None` if the flight recorder has none."""


@dataclass(frozen=True)
class LostRank:
    """Rank whose heartbeats have stopped."""

    process: RankProcess
    silent_seconds: float
    """Seconds since its last heartbeat."""
    step: int | None
    """Number of optimizer steps completed at its last heartbeat; `None` if it sent none."""
    state: str | None
    """State of its process: `gone`, `stopped` or `alive`; `None` if it runs on another machine."""
    memory: MemoryUsage | None
    """Memory usage at its last heartbeat; `None` if it sent none."""
    num_kills: int = 0
    """Number of processes that the kernel killed for memory in its cgroup since its last heartbeat.

    It is 0 for a rank on another machine.
    """
    ranks_on_machine: int = 1
    """Number of ranks on its machine, including itself."""


def advise() -> str:
    """Return the general advice for a rank that was killed for memory."""
    return MEMORY_ADVICE


def describe_lost(lost: Sequence[LostRank], advise: Callable[[], str] = advise) -> str:
    """Return a sentence that names the lost ranks, the time of their last heartbeat, and the cause if known.

    Args:
        lost: The lost ranks, at least one.
        advise: Returns advice against a lack of memory; called only if that is the cause.
    """
    groups = _group_by(lost, lambda each: (each.process.host, each.state))
    return "; ".join(_describe_lost_group(group, advise) for group in groups.values())


def _describe_lost_group(group: Sequence[LostRank], advise: Callable[[], str]) -> str:
    """Describe lost ranks of one host and state, with the facts of the first of them.

    Several ranks of a host are usually lost for one reason: their machine.
    """
    lost = group[0]
    if len(group) > 1:
        who = f"{_format_ranks_of(group)} on {lost.process.host}"
        are = "are"
        send = "send"
    else:
        who = str(lost.process)
        are = "is"
        send = "sends"
    at_step = "" if lost.step is None else f" at step {lost.step}"
    last = f"last heartbeat {lost.silent_seconds:.1f} s ago{at_step}"
    if lost.state == "stopped":
        return f"{who} {are} stopped: {last}; it received SIGSTOP, for example from a scheduler or a debugger"
    if lost.state == "alive":
        reason = "its process is alive but runs no Python code: a native call hangs"
        return f"{who} {send} no heartbeat: {last}; {reason}"
    memory = lost.memory
    is_nearly_full = memory is not None and memory.used > NEARLY_FULL_SHARE * memory.limit
    if lost.num_kills or is_nearly_full:
        cause = "killed for memory (exit code -9)" if lost.num_kills else "most likely killed for memory"
        ranks = lost.ranks_on_machine
        if ranks > 1 and memory is not None:
            cause += f": {ranks} ranks on its machine x {format_bytes(memory.resident)}"
        return f"{who} {are} gone: {last}; {memory}: {cause}; {advise()}"
    if lost.state == "gone":
        usage = "" if memory is None else f"; {memory}"
        hint = "see the launcher's output for the exit code"
        if "CROSS_SIZE" in os.environ:  # only deepspeed's launcher sets it
            hint = "deepspeed prints the exit code, with the command of its last rank"
        return f"{who} {are} gone: {last}{usage}; killed or crashed: {hint}"
    process = "its process" if len(group) == 1 else "their processes"
    return f"{who} {send} no heartbeat: {last}; {process}, its machine or the link to it is gone"


def describe_hang(
    reports: Sequence[RankReport],
    idle_seconds: float,
    lost: Sequence[LostRank] = (),
    advise: Callable[[], str] = advise,
) -> str:
    """Return a sentence that names the ranks that are behind, their positions, and where the others wait.

    Args:
        reports: Reports of the ranks that answered, in any order; at least one.
        idle_seconds: Seconds without progress.
        lost: Ranks that sent no heartbeat while the others reported.
        advise: Returns advice against a lack of memory; called only if that is the cause.
    """
    by_rank = sorted(reports, key=lambda report: report.process.rank)
    activity = max(by_rank, key=lambda report: report.step).doing
    missing = "step" if activity == "step" else f"progress ({activity})"
    duration = f"{idle_seconds:.0f}" if idle_seconds >= 1 else f"{max(idle_seconds, 0.1):.1f}"
    start = f"hang: no {missing} for {duration} s. "
    waiting = [report for report in by_rank if report.collective is not None]
    busy = [report for report in by_rank if report.collective is None]
    if lost:
        rest = f"; {_describe_waiting(waiting)}" if waiting else ""
        return start + describe_lost(lost, advise) + rest
    if waiting and busy:
        # A busy rank counts as behind even if it is at another step than the ranks that wait.
        behind = [f"{report.process} is behind: {_format_position(report)}" for report in busy]
        return start + "; ".join([*behind, _describe_waiting(waiting)])
    if busy:
        groups = _group_by(busy, _format_position)
        positions = [f"{_format_ranks_of(group)}: {position}" for position, group in groups.items()]
        return start + "no rank waits in a collective: " + "; ".join(positions)
    return start + _describe_all_waiting(waiting)


def _describe_all_waiting(waiting: list[RankReport]) -> str:
    """Describe a hang in which every rank waits in a collective."""
    # All ranks run one program, so ranks are in the same call if its name, number and line are equal.
    calls = _group_by(waiting, lambda report: (report.collective, report.number, report.place))
    if len(calls) == 1:
        first = waiting[0]
        return (
            f"all ranks wait in {first.collective} (step {first.step}, {first.place}), and nothing arrives: "
            "check the network between the hosts, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the "
            "interface that connects them"
        )
    # The smallest group most likely made the wrong call. Of equally small groups, the one at the earliest
    # step did.
    groups = sorted(calls.values(), key=lambda group: (len(group), group[0].step, group[0].process.rank))
    suspects = groups[0]
    others = [report for group in groups[1:] for report in group]
    suspect_waits = "; ".join(f"{report.process} is {_format_wait(report)}" for report in suspects)
    return f"the ranks are in different collectives: {suspect_waits}; {_describe_waiting(others)}"


def _describe_waiting(waiting: Sequence[RankReport]) -> str:
    """Describe which ranks wait in which collective. Ranks that wait in the same call are named together."""
    parts = []
    for wait, group in _group_by(waiting, _format_wait).items():
        verb = "waits" if len(group) == 1 else "wait"
        parts.append(f"{_format_ranks_of(group)} {verb} {wait}")
    return "; ".join(parts)


def _format_wait(report: RankReport) -> str:
    """Return the collective of a waiting rank, its number, its step and its line of code."""
    number = "" if report.number is None else f" number {report.number}"
    return f"in {report.collective}{number} (step {report.step}, {report.place})"


def _format_position(report: RankReport) -> str:
    """Return the step, the activity (if it is not a step) and the line of code of a busy rank."""
    activity = "" if report.doing == "step" else f"{report.doing}, "
    return f"step {report.step}, {activity}at {report.place}"


def _format_ranks_of(group: Iterable[RankReport] | Iterable[LostRank]) -> str:
    return format_ranks([each.process.rank for each in group])


def _group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return key -> items with this key, in the order of the items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def format_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 1` or `ranks 0-6, 8`."""
    consecutive: list[list[int]] = []
    for rank in sorted(ranks):
        if consecutive and rank == consecutive[-1][-1] + 1:
            consecutive[-1].append(rank)
        else:
            consecutive.append([rank])
    words = []
    for numbers in consecutive:
        if len(numbers) > 2:
            words.append(f"{numbers[0]}-{numbers[-1]}")
        else:
            words += map(str, numbers)
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(words)}"
