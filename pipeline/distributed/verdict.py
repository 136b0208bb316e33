"""From what the ranks say of themselves to the one sentence that says who holds up the job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.distributed.memory import Memory

NEARLY_FULL = 0.9  # of the memory that is allowed
ADVICE = "lower batch.micro_batch_size or loader.num_workers, or give the job more memory"


@dataclass(frozen=True)
class Who:
    """A rank and its process."""

    rank: int
    host: str
    pid: int
    machine: str = ""
    """See machine.machine_id."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Witness:
    """What a rank that lives says of itself."""

    who: Who
    doing: str
    step: int
    """Optimizer steps done."""
    place: str
    """A line of ours or of the user's."""
    collective: str | None = None
    """The one it waits in; None: it is busy with something else."""
    number: int | None = None
    """Of the collective in its group, where the flight recorder knows it."""


@dataclass(frozen=True)
class Lost:
    """A rank that has stopped to give signs."""

    who: Who
    silent: float
    """Seconds since its last sign."""
    step: int | None
    state: str | None
    """Of its process, seen from its own machine: `gone`, `stopped`, `there`; None: nobody looked."""
    memory: Memory | None
    num_kills: int = 0
    """Processes that its cgroup lost for want of memory since its last sign."""


def sentence_of_lost(lost: Sequence[Lost]) -> str:
    """Who is gone, since when, and why as far as it shows."""
    parties: dict[tuple[str, str | None], list[Lost]] = {}
    for each in lost:
        parties.setdefault((each.who.host, each.state), []).append(each)
    return "; ".join(_of_party(party) for party in parties.values())


def _of_party(party: list[Lost]) -> str:
    """One rank, or several that a machine took with it: what is said of them is said of the first."""
    if len(party) == 1:
        return _of_one(party[0])
    first, ranks = party[0], ranks_in_words([each.who.rank for each in party])
    text = _of_one(first).replace(str(first.who), f"{ranks} on {first.who.host}", 1)
    for one, many in ((" is gone", " are gone"), (" is stopped", " are stopped"), (" gives ", " give ")):
        text = text.replace(one, many, 1)
    return text


def _of_one(lost: Lost) -> str:
    where = "" if lost.step is None else f" at step {lost.step}"
    sign = f"last sign {lost.silent:.1f} s ago{where}"
    if lost.state == "stopped":
        return f"{lost.who} is stopped: {sign}; it was sent SIGSTOP (by a scheduler, a debugger)"
    if lost.state == "there":
        return f"{lost.who} gives no sign: {sign}; its process is there and runs no Python: a call that hangs"
    memory = lost.memory
    is_full = memory is not None and memory.used > NEARLY_FULL * memory.limit
    if lost.num_kills or (is_full and lost.state != "there"):
        how = "killed for memory (exit code -9)" if lost.num_kills else "most likely killed for memory"
        return f"{lost.who} is gone: {sign}; {memory}: {how}; {ADVICE}"
    if lost.state == "gone":
        held = "" if memory is None else f"; {memory}"
        return f"{lost.who} is gone: {sign}{held}; killed or crashed: its launcher knows the exit code"
    return f"{lost.who} gives no sign: {sign}; its process, its machine or the link to it is gone"


def sentence_of_hang(witnesses: Sequence[Witness], seconds: float, silent: Sequence[Lost] = ()) -> str:
    """Who is behind, where, and where the others wait for them.

    Args:
        witnesses: Of the ranks that answered, in any order; one at least.
        seconds: Without progress.
        silent: The ranks that gave no sign while this was asked.
    """
    everyone = sorted(witnesses, key=lambda w: w.who.rank)
    doing = max(everyone, key=lambda w: w.step).doing
    since = f"{seconds:.0f}" if seconds >= 1 else f"{max(seconds, 0.1):.1f}"
    start = f"hang: no {'step' if doing == 'step' else f'progress ({doing})'} for {since} s. "
    waiting = [w for w in everyone if w.collective is not None]
    busy = [w for w in everyone if w.collective is None]
    if silent:
        rest = f"; {_waits(waiting)}" if waiting else ""
        return start + sentence_of_lost(silent) + rest
    if waiting and busy:
        # What is not at the same step waits for no one here, but is behind all the same.
        return start + "; ".join([*(_behind(w) for w in busy), _waits(waiting)])
    if busy:
        return start + "no rank waits in a collective: " + "; ".join(_grouped(busy, _place))
    return start + _all_waiting(waiting)


def _behind(witness: Witness) -> str:
    return f"{witness.who} is behind: step {witness.step}, {_at(witness)}{witness.place}"


def _at(witness: Witness) -> str:
    return "at " if witness.doing == "step" else f"{witness.doing}, at "


def _all_waiting(waiting: list[Witness]) -> str:
    calls = _by(waiting, _call)
    if len(calls) == 1:
        w = waiting[0]
        return (
            f"all ranks wait in {w.collective} (step {w.step}, {w.place}), and nothing arrives: look at the "
            "network between the hosts, and at the interface that is used (GLOO_SOCKET_IFNAME, "
            "NCCL_SOCKET_IFNAME)"
        )
    # The smaller party is more likely the one that went astray; where both are as large, the one that is at
    # an earlier step.
    parties = sorted(calls.values(), key=lambda party: (len(party), party[0].step, party[0].who.rank))
    first, rest = parties[0], [w for party in parties[1:] for w in party]
    astray = "; ".join(
        f"{w.who} is in {w.collective}{_numbered(w)} (step {w.step}, {w.place})" for w in first
    )
    return f"the ranks are in different collectives: {astray}; {_waits(rest)}"


def _call(witness: Witness) -> str:
    # All ranks run one program: they belong together where name, number in the group and line agree.
    return f"{witness.collective} {witness.number} {witness.place}"


def _waits(waiting: Sequence[Witness]) -> str:
    return "; ".join(_grouped(waiting, _wait))


def _wait(witness: Witness) -> str:
    return f"in {witness.collective}{_numbered(witness)} (step {witness.step}, {witness.place})"


def _numbered(witness: Witness) -> str:
    return "" if witness.number is None else f" number {witness.number}"


def _place(witness: Witness) -> str:
    return f"step {witness.step}, {_at(witness)}{witness.place}"


def _grouped(witnesses: Sequence[Witness], words: Callable[[Witness], str]) -> list[str]:
    sentences = []
    for text, party in _by(witnesses, words).items():
        verb = " wait " if party[0].collective is not None else ": "
        if len(party) == 1 and verb == " wait ":
            verb = " waits "
        sentences.append(f"{ranks_in_words([w.who.rank for w in party])}{verb}{text}")
    return sentences


def _by(witnesses: Iterable[Witness], key: Callable[[Witness], str]) -> dict[str, list[Witness]]:
    parties: dict[str, list[Witness]] = {}
    for witness in witnesses:
        parties.setdefault(key(witness), []).append(witness)
    return parties


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1`, `ranks 0-6, 8`."""
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
