"""Lets the ranks of a save exchange values, and finds out which of them share a file system.

The ranks of a save use a separate gloo group. A background thread uses it while the main thread runs the
collectives of training; one group for both would mix up their order and hang.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from pipeline.distributed.process_group import Job
from pipeline.files import format_bytes

T = TypeVar("T")
MARKER = ".meeting-"  # prefix of the file by which a rank shows that it writes here
PATIENCE = timedelta(hours=2)  # timeout of the group, for ranks that write slowly


@dataclass(frozen=True)
class SpaceReport:
    """Bytes that a save needs on a rank's machine, and bytes that are free there."""

    host: str
    disk: int
    disk_free: int
    memory: int
    """Bytes of host memory for a snapshot; 0 if it exists already."""
    memory_free: int


@dataclass(frozen=True)
class Peers:
    """Connects this rank with the others of a save. Methods are collective unless they say otherwise."""

    rank: int
    host: str
    leaders: tuple[int, ...]
    """Lowest rank on each rank's file system, by rank."""
    group: Any = field(repr=False)
    """Process group of the save; `None` with a single rank."""

    @property
    def leader(self) -> int:
        """Lowest rank on this rank's file system."""
        return self.leaders[self.rank]

    @property
    def is_leader(self) -> bool:
        """Return whether this rank creates, renames and removes folders on its file system."""
        return self.leader == self.rank

    @property
    def neighbours(self) -> list[int]:
        """List of all ranks on this file system."""
        return [rank for rank, leader in enumerate(self.leaders) if leader == self.leader]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on every rank."""
        return _gather(self.group, value)

    def collect(self, value: T) -> list[T]:
        """Return every rank's value on the leaders, and an empty list on other ranks. For large values."""
        if self.group is None:
            return [value]
        collected: list[T] = []
        for leader in sorted(set(self.leaders)):
            values: list[Any] = [None] * len(self.leaders)
            is_there = self.rank == leader
            dist.gather_object(value, values if is_there else None, dst=leader, group=self.group)
            collected = values if is_there else collected
        return collected

    def attempt(self, action: Callable[[], None]) -> list[str | None]:
        """Run an action on every leader and return each rank's problem, or `None`, on every rank.

        An OSError thus reaches all ranks. If a single rank raised it, the others would wait forever.
        """
        problem = None
        if self.is_leader:
            try:
                action()
            except OSError as error:
                problem = self.describe(error)
        return self.gather(problem)

    def find_disk_shortage(self, rooms: list[SpaceReport], folder: Path) -> str | None:
        """Return one line about the first file system that is too full, else `None`. Not collective."""
        for leader in sorted(set(self.leaders)):
            at = rooms[leader]
            needed = sum(room.disk for room, its in zip(rooms, self.leaders, strict=True) if its == leader)
            if needed > at.disk_free:
                return (
                    f"{folder} on {at.host} has {format_bytes(at.disk_free)} free and a checkpoint takes "
                    f"{format_bytes(needed)}; make room, or lower checkpoint.keep_last"
                )
        return None

    def close(self) -> None:
        """Release the group. No other method may be called afterwards."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def describe(self, error: OSError) -> str:
        """Return the text of an error with its rank, machine and file."""
        where = f" ({error.filename})" if error.filename else ""
        return f"rank {self.rank} on {self.host}: {error.strerror or error}{where}"


def find_peers(job: Job, folder: Path, host: str) -> Peers:
    """Determine which ranks share a file system. Collective.

    Each machine's first rank creates a file in `folder` (created if missing), and all ranks look for all
    files.

    Raises:
        OSError: A machine cannot write there; raised on every rank.
    """
    ranks = job.ranks
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if job.is_distributed else None
    token = _gather(group, uuid.uuid4().hex)[0]
    own = folder / f"{MARKER}{token}-{ranks.rank}"
    problem = None
    if ranks.local_rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.touch()
        except OSError as error:
            problem = f"{host}: {folder}: {error.strerror or error}"
    answers = _gather(group, (ranks.local_rank == 0, problem))
    problems = [said for _, said in answers if said is not None]
    # Network file systems may cache a listing, but not the existence of a name that was never looked up.
    seen = [
        rank
        for rank, (wrote, _) in enumerate(answers)
        if wrote and os.path.exists(folder / f"{MARKER}{token}-{rank}")
    ]
    leaders = _gather(group, min(seen, default=ranks.rank))
    with suppress(OSError):
        own.unlink()
    if problems:
        raise OSError(problems[0])
    return Peers(ranks.rank, host, tuple(leaders), group)


def find_memory_shortage(rooms: list[SpaceReport]) -> str | None:
    """Return one line about the first machine without memory for its ranks' snapshots, else `None`."""
    for host in dict.fromkeys(room.host for room in rooms):
        there = [room for room in rooms if room.host == host]
        needed = sum(room.memory for room in there)
        free = min(room.memory_free for room in there)
        if needed > 0.9 * free:  # leaves some memory for other processes
            return f"{host} has {format_bytes(free)} of memory free, a copy takes {format_bytes(needed)}"
    return None


def first_problem(problems: Iterable[str | None]) -> str | None:
    """Return the first problem; `None` if there is none."""
    return next((problem for problem in problems if problem is not None), None)


def _gather(group: Any, value: T) -> list[T]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
