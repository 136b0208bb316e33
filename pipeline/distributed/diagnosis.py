"""Turns the reports of the ranks into one sentence that names the rank at fault. Without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.distributed.machine import MemoryUsage
from pipeline.files import format_bytes

Item = TypeVar("Item")
Key = TypeVar("Key")
NEARLY_FULL = 0.9  # of the memory that is allowed
ADVICE = "lower batch.micro_batch_size or loader.num_workers, or give the job more memory"


@dataclass(frozen=True)
class RankProcess:
    """A rank and its process."""

    rank: int
    host: str
    pid: int
    machine: str = ""
    """See machine.machine_id."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class RankReport:
    """The report of a rank that is alive."""

    process: RankProcess
    doing: str
    step: int
    """Optimizer steps done."""
    place: str
    """A line of ours or of the user's."""
    collective: str | None = None
    """Collective that it waits in; None if it is busy with something else."""
    number: int | None = None
    """Number of the collective in its group, if the flight recorder knows it."""


@dataclass(frozen=True)
class LostRank:
    """A rank whose heartbeats have stopped."""

    process: RankProcess
    silent: float
    """Seconds since its last heartbeat."""
    step: int | None
    state: str | None
    """State of its process on its own machine: `gone`, `stopped`, `there`; None if nobody looked."""
    memory: MemoryUsage | None
    num_kills: int = 0
    """Processes that the kernel killed for memory in its cgroup since its last heartbeat."""
    ranks_there: int = 1
    """Number of ranks on its machine, with itself."""


def advise() -> str:
    """Return the general advice for a rank that was killed for memory."""
    return ADVICE


def describe_lost(lost: Sequence[LostRank], advise: Callable[[], str] = advise) -> str:
    """Return a sentence that names the lost ranks, the time of their last heartbeat, and the cause if known.

    Args:
        lost: The lost ranks, at least one.
        advise: Gives the advice if memory is why; called only then.
    """
    parties = _by(lost, lambda each: (each.process.host, each.state))
    return "; ".join(_of_party(party, advise) for party in parties.values())


def _of_party(party: Sequence[LostRank], advise: Callable[[], str]) -> str:
    """Describe one rank, or several that a machine took with it, by the first of them."""
    lost = party[0]
    who, are, send = str(lost.process), "is", "sends"
    if len(party) > 1:
        who, are, send = f"{_ranks_of(party)} on {lost.process.host}", "are", "send"
    where = "" if lost.step is None else f" at step {lost.step}"
    last = f"last heartbeat {lost.silent:.1f} s ago{where}"
    if lost.state == "stopped":
        return f"{who} {are} stopped: {last}; it was sent SIGSTOP (by a scheduler, a debugger)"
    if lost.state == "there":
        hangs = "its process is there and runs no Python: a call that hangs"
        return f"{who} {send} no heartbeat: {last}; {hangs}"
    memory = lost.memory
    is_full = memory is not None and memory.used > NEARLY_FULL * memory.limit
    if lost.num_kills or is_full:
        how = "killed for memory (exit code -9)" if lost.num_kills else "most likely killed for memory"
        ranks, resident = lost.ranks_there, 0 if memory is None else memory.resident
        several = f": {ranks} ranks there x {format_bytes(resident)}" if ranks > 1 else ""
        return f"{who} {are} gone: {last}; {memory}: {how}{several}; {advise()}"
    if lost.state == "gone":
        held = "" if memory is None else f"; {memory}"
        return f"{who} {are} gone: {last}{held}; killed or crashed: its launcher knows the exit code"
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
        advise: Gives the advice if memory is the cause; called only then.
    """
    everyone = sorted(reports, key=lambda w: w.process.rank)
    doing = max(everyone, key=lambda w: w.step).doing
    since = f"{seconds:.0f}" if seconds >= 1 else f"{max(seconds, 0.1):.1f}"
    start = f"hang: no {'step' if doing == 'step' else f'progress ({doing})'} for {since} s. "
    waiting = [w for w in everyone if w.collective is not None]
    busy = [w for w in everyone if w.collective is None]
    if silent:
        rest = f"; {_waits(waiting)}" if waiting else ""
        return start + describe_lost(silent, advise) + rest
    if waiting and busy:
        # What is not at the same step waits for no one here, but is behind all the same.
        behind = [f"{w.process} is behind: {_place(w)}" for w in busy]
        return start + "; ".join([*behind, _waits(waiting)])
    if busy:
        places = [f"{_ranks_of(party)}: {place}" for place, party in _by(busy, _place).items()]
        return start + "no rank waits in a collective: " + "; ".join(places)
    return start + _all_waiting(waiting)


def _all_waiting(waiting: list[RankReport]) -> str:
    # All ranks run one program: they belong together where name, number in the group and line agree.
    calls = _by(waiting, lambda w: (w.collective, w.number, w.place))
    if len(calls) == 1:
        w = waiting[0]
        return (
            f"all ranks wait in {w.collective} (step {w.step}, {w.place}), and nothing arrives: look at the "
            "network between the hosts, and at the interface that is used (GLOO_SOCKET_IFNAME, "
            "NCCL_SOCKET_IFNAME)"
        )
    # The smaller party is more likely the one that went astray; where both are as large, the one that is at
    # an earlier step.
    parties = sorted(calls.values(), key=lambda party: (len(party), party[0].step, party[0].process.rank))
    first, rest = parties[0], [w for party in parties[1:] for w in party]
    astray = "; ".join(f"{w.process} is {_wait(w)}" for w in first)
    return f"the ranks are in different collectives: {astray}; {_waits(rest)}"


def _waits(waiting: Sequence[RankReport]) -> str:
    parties = _by(waiting, _wait).items()
    return "; ".join(f"{_ranks_of(party)} wait{'s' * (len(party) == 1)} {wait}" for wait, party in parties)


def _wait(report: RankReport) -> str:
    number = "" if report.number is None else f" number {report.number}"
    return f"in {report.collective}{number} (step {report.step}, {report.place})"


def _place(report: RankReport) -> str:
    doing = "" if report.doing == "step" else f"{report.doing}, "
    return f"step {report.step}, {doing}at {report.place}"


def _ranks_of(party: Iterable[RankReport] | Iterable[LostRank]) -> str:
    return format_ranks([each.process.rank for each in party])


def _by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    parties: dict[Key, list[Item]] = {}
    for item in items:
        parties.setdefault(key(item), []).append(item)
    return parties


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
