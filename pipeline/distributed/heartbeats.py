"""How long ago each rank gave its last heartbeat, and which of them count as lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.distributed.diagnosis import LostRank, RankProcess
from pipeline.distributed.machine import kills, process_state
from pipeline.distributed.watchdog_store import Heartbeat


@dataclass
class _Last:
    heartbeat: Heartbeat | None = None
    age: float = 0.0
    checks_without_process: int = 0


class Heartbeats:
    """What one rank sees of the others.

    Args:
        everyone: All ranks, in order.
        rank: The one that looks.
    """

    def __init__(self, everyone: Sequence[RankProcess], rank: int):
        self._everyone = everyone
        self._heartbeats = {each.rank: _Last() for each in everyone if each.rank != rank}
        here = everyone[rank].machine
        self.neighbours = [other for other in self._heartbeats if everyone[other].machine == here]

    def update(self, watched: Iterable[int], heartbeats: Mapping[int, Heartbeat], seconds: float) -> None:
        """Takes the newest heartbeats of the ranks that are watched now.

        Args:
            seconds: Since it was called last: so much older is a heartbeat that has not changed.
                Time in which this rank itself stood still must not be in it.
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
        """Checks the processes on this machine."""
        for rank in self.neighbours:
            is_gone = process_state(self._everyone[rank].pid) == "gone"
            last = self._heartbeats[rank]
            last.checks_without_process = last.checks_without_process + 1 if is_gone else 0

    def lost(self, silence: float, among: Iterable[int], checks: int = 2) -> list[LostRank]:
        """Those of `among` that were silent for `silence` seconds, or gone at `checks` checks in a row."""
        found = []
        for rank in sorted(among):
            last = self._heartbeats.get(rank)
            if last is not None and (last.age > silence or last.checks_without_process >= checks):
                found.append(self.describe(rank))
        return found

    def describe(self, rank: int, silent: float | None = None) -> LostRank:
        """What is known of a rank that counts as lost.

        Args:
            silent: Seconds, where another clock knows better.
        """
        process, last = self._everyone[rank], self._heartbeats[rank]
        is_near = rank in self.neighbours
        heartbeat = last.heartbeat
        return LostRank(
            process,
            last.age if silent is None else silent,
            None if heartbeat is None else heartbeat.step,
            process_state(process.pid) if is_near else None,
            None if heartbeat is None else heartbeat.memory,
            max(0, kills() - heartbeat.memory.num_kills) if is_near and heartbeat is not None else 0,
            sum(each.machine == process.machine for each in self._everyone),
        )
