"""How long ago each rank gave its last sign of life, and which of them count as lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.distributed.lines import Beat
from pipeline.distributed.machine import process_state
from pipeline.distributed.memory import kills
from pipeline.distributed.verdict import Lost, Who


@dataclass
class _Sign:
    beat: Beat | None = None
    age: float = 0.0
    looks_without_process: int = 0


class Signs:
    """What one rank sees of the others.

    Args:
        everyone: All ranks, in order.
        rank: The one that looks.
    """

    def __init__(self, everyone: Sequence[Who], rank: int):
        self._everyone = everyone
        self._machine = everyone[rank].machine
        self._rank = rank
        self._signs = {who.rank: _Sign() for who in everyone if who.rank != rank}
        self.neighbours = [w.rank for w in everyone if w.machine == self._machine and w.rank != rank]

    def hear(self, watched: Iterable[int], beats: Mapping[int, Beat], seconds: float) -> None:
        """Takes the newest beats of the ranks that are watched now.

        Args:
            seconds: Since it was called last: so much older is a beat that has not changed. Time in which
                this rank itself stood still must not be in it.
        """
        for rank in watched:
            sign = self._signs.get(rank)
            if sign is None:
                continue
            sign.age += seconds
            beat = beats.get(rank)
            if beat is not None and (sign.beat is None or beat.count != sign.beat.count):
                sign.beat, sign.age = beat, 0.0

    def look(self) -> None:
        """Looks at the processes on this machine."""
        for rank in self.neighbours:
            is_gone = process_state(self._everyone[rank].pid) == "gone"
            sign = self._signs[rank]
            sign.looks_without_process = sign.looks_without_process + 1 if is_gone else 0

    def lost(self, silence: float, among: Iterable[int], looks: int = 2) -> list[Lost]:
        """Those of `among` without a sign for `silence` seconds, or whose process was gone `looks` times."""
        found = []
        for rank in sorted(among):
            sign = self._signs.get(rank)
            if sign is not None and (sign.age > silence or sign.looks_without_process >= looks):
                found.append(self.describe(rank))
        return found

    def describe(self, rank: int, silent: float | None = None) -> Lost:
        """What is known of a rank that counts as lost.

        Args:
            silent: Seconds, where another clock knows better.
        """
        who, sign = self._everyone[rank], self._signs[rank]
        is_near = rank in self.neighbours
        beat = sign.beat
        return Lost(
            who,
            sign.age if silent is None else silent,
            None if beat is None else beat.step,
            process_state(who.pid) if is_near else None,
            None if beat is None else beat.memory,
            max(0, kills() - beat.memory.num_kills) if is_near and beat is not None else 0,
        )
