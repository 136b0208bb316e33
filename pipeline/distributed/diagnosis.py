"""Turns the reports of the ranks into one sentence that names the rank at fault.

The functions here have no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.distributed.machine import MemoryUsage
from pipeline.files import format_bytes

Item = TypeVar("Item")
Key = TypeVar("Key")
NEARLY_FULL = 0.9
"""Share of the memory limit above which a lost process was most likely killed for memory."""
ADVICE = "lower batch.micro_batch_size or loader.num_workers, or give the job more memory"


@dataclass(frozen=True)
class RankProcess:
    """Rank of a job and the process that runs it."""

    rank: int
    host: str
    pid: int
    machine: str = ""
    """Id of its machine; see machine.machine_id."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class RankReport:
    """Position of a rank that is alive, as the rank itself reports it."""

    process: RankProcess
    doing: str
    """Kind of activity; see progress.Activity."""
    step: int
    """Number of optimizer steps completed."""
    place: str
    """Innermost line on the stack that is not of a library, with its file and function."""
    collective: str | None = None
    """Collective that the rank waits in; `None` if it is busy with something else."""
    number: int | None = None
    """Number of the collective in its process group; `None` if the flight recorder does not know it."""


@dataclass(frozen=True)
class LostRank:
    """Rank whose heartbeats have stopped."""

    process: RankProcess
    silent: float
    """Seconds since its last heartbeat."""
    step: int | None
    """Number of optimizer steps completed at its last heartbeat; `None` if it sent none."""
    state: str | None
    """State of its process: `gone`, `stopped` or `there`; `None` if it runs on another machine."""
    memory: MemoryUsage | None
    """Memory usage at its last heartbeat; `None` if it sent none."""
    num_kills: int = 0
    """Number of processes that the kernel killed for memory in its cgroup since its last heartbeat."""
    ranks_there: int = 1
    """Number of ranks on its machine, including itself."""


def advise() -> str:
    """Return the general advice for a rank that was killed for memory."""
    return ADVICE


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
    where = "" if lost.step is None else f" at step {lost.step}"
    last = f"last heartbeat {lost.silent:.1f} s ago{where}"
    if lost.state == "stopped":
        return f"{who} {are} stopped: {last}; it received SIGSTOP, for example from a scheduler or a debugger"
    if lost.state == "there":
        hangs = "its process is alive but runs no Python code: a native call hangs"
        return f"{who} {send} no heartbeat: {last}; {hangs}"
    memory = lost.memory
    is_full = memory is not None and memory.used > NEARLY_FULL * memory.limit
    if lost.num_kills or is_full:
        how = "killed for memory (exit code -9)" if lost.num_kills else "most likely killed for memory"
        ranks = lost.ranks_there
        resident = 0 if memory is None else memory.resident
        several = f": {ranks} ranks there x {format_bytes(resident)}" if ranks > 1 else ""
        return f"{who} {are} gone: {last}; {memory}: {how}{several}; {advise()}"
    if lost.state == "gone":
        held = "" if memory is None else f"; {memory}"
        return (
            f"{who} {are} gone: {last}{held}; killed or crashed: see the launcher's output for the exit code"
        )
    return f"{who} {send} no heartbeat: {last}; its process, its machine or the link to it {are} gone"


def describe_hang(
    reports: Sequence[RankReport],
    seconds: float,
    silent: Sequence[LostRank] = (),
    advise: Callable[[], str] = advise,
) -> str:
    """Return a sentence that names the ranks that are behind, their positions, and where the others wait.

    Args:
        reports: Reports of the ranks that answered, in any order; at least one.
        seconds: Seconds without progress.
        silent: Ranks that sent no heartbeat while the others reported.
        advise: Returns advice against a lack of memory; called only if that is the cause.
    """
    everyone = sorted(reports, key=lambda report: report.process.rank)
    doing = max(everyone, key=lambda report: report.step).doing
    since = f"{seconds:.0f}" if seconds >= 1 else f"{max(seconds, 0.1):.1f}"
    start = f"hang: no {'step' if doing == 'step' else f'progress ({doing})'} for {since} s. "
    waiting = [report for report in everyone if report.collective is not None]
    busy = [report for report in everyone if report.collective is None]
    if silent:
        rest = f"; {_describe_waiting(waiting)}" if waiting else ""
        return start + describe_lost(silent, advise) + rest
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
    # The smallest group most likely made the wrong call; of equally small ones, that at the earliest step.
    groups = sorted(calls.values(), key=lambda group: (len(group), group[0].step, group[0].process.rank))
    suspects = groups[0]
    others = [report for group in groups[1:] for report in group]
    described = "; ".join(f"{report.process} is {_format_wait(report)}" for report in suspects)
    return f"the ranks are in different collectives: {described}; {_describe_waiting(others)}"


def _describe_waiting(waiting: Sequence[RankReport]) -> str:
    groups = _group_by(waiting, _format_wait).items()
    return "; ".join(
        f"{_format_ranks_of(group)} wait{'s' * (len(group) == 1)} {wait}" for wait, group in groups
    )


def _format_wait(report: RankReport) -> str:
    number = "" if report.number is None else f" number {report.number}"
    return f"in {report.collective}{number} (step {report.step}, {report.place})"


def _format_position(report: RankReport) -> str:
    doing = "" if report.doing == "step" else f"{report.doing}, "
    return f"step {report.step}, {doing}at {report.place}"


def _format_ranks_of(group: Iterable[RankReport] | Iterable[LostRank]) -> str:
    return format_ranks([each.process.rank for each in group])


def _group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def format_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 1` or `ranks 0-6, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"
