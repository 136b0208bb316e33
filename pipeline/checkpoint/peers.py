"""Lets the ranks of a save exchange values, and finds out which of them share a file system.

The ranks of a save use a separate gloo group, because a background thread saves while the main thread runs
the collectives of training. With one group for both, their order could differ between ranks, and the run
would hang.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
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
MARKER_PREFIX = ".meeting-"  # prefix of the files by which ranks find out who shares a file system
GROUP_TIMEOUT = timedelta(hours=2)  # long, because some ranks may write slowly
MEMORY_SHARE = 0.9  # largest share of the free memory that snapshots may take; other processes need some


@dataclass(frozen=True)
class SpaceReport:
    """Bytes that a save of one rank needs, and bytes that are free on its machine."""

    host: str
    """Name of the rank's machine."""
    disk: int
    """Bytes that this rank writes to the disk."""
    disk_free: int
    """Bytes free on the file system of the checkpoints."""
    memory: int
    """Bytes of host memory for this rank's snapshot; 0 if it exists already or none is taken."""
    memory_free: int
    """Bytes of host memory free on the machine."""


@dataclass(frozen=True)
class Peers:
    """Connects this rank with the others of a save."""

    rank: int
    """Rank of this process."""
    host: str
    """Name of this machine for messages."""
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
        """Ranks on this rank's file system, itself included, in ascending order."""
        return [rank for rank, leader in enumerate(self.leaders) if leader == self.leader]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on every rank, by rank. Collective."""
        return _gather(self.group, value)

    def collect(self, value: T) -> list[T]:
        """Return every rank's value on the leaders, and an empty list on other ranks. Collective.

        For values that are so large that not every rank should get them.
        """
        if self.group is None:
            return [value]
        collected: list[T] = []
        for leader in sorted(set(self.leaders)):
            if self.rank == leader:
                values: list[Any] = [None] * len(self.leaders)
                dist.gather_object(value, values, dst=leader, group=self.group)
                collected = values
            else:
                dist.gather_object(value, None, dst=leader, group=self.group)
        return collected

    def attempt(self, action: Callable[[], None]) -> list[str | None]:
        """Run an action on every leader, and return each rank's problem on every rank. Collective.

        An OSError of the action becomes such a problem. If one rank raised it, the others would wait for that
        rank forever.

        Returns:
            Problem by rank; `None` for a rank without a problem.
        """
        problem = None
        if self.is_leader:
            try:
                action()
            except OSError as error:
                problem = self.describe(error)
        return self.gather(problem)

    def find_disk_shortage(self, reports: list[SpaceReport], folder: Path) -> str | None:
        """Return one line about the first file system that is too full; `None` if all have enough space.

        Args:
            reports: Report of each rank, by rank.
            folder: Folder of the checkpoints, for the message.
        """
        needed_by_leader: Counter[int] = Counter()
        for report, leader in zip(reports, self.leaders, strict=True):
            needed_by_leader[leader] += report.disk
        for leader, needed in sorted(needed_by_leader.items()):
            host = reports[leader].host
            free = reports[leader].disk_free
            if needed > free:
                return (
                    f"{folder} on {host} has {format_bytes(free)} free and a checkpoint takes "
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

    Each machine's first rank creates a file in `folder`, and all ranks look for all files. The files are
    removed afterwards.

    Args:
        job: Ranks of the job.
        folder: Folder of the checkpoints; created if missing.
        host: Name of this machine for messages.

    Raises:
        OSError: A machine cannot write to the folder; raised on every rank.
    """
    ranks = job.ranks
    group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if job.is_distributed else None
    token = _gather(group, uuid.uuid4().hex)[0]
    is_writer = ranks.local_rank == 0
    own_marker = folder / f"{MARKER_PREFIX}{token}-{ranks.rank}"
    problem = None
    if is_writer:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own_marker.touch()
        except OSError as error:
            problem = f"{host}: {folder}: {error.strerror or error}"
    are_writers, problems = zip(*_gather(group, (is_writer, problem)), strict=True)
    # Network file systems may cache a listing, but not the existence of a name that was never looked up.
    visible = [
        rank
        for rank, is_other_writer in enumerate(are_writers)
        if is_other_writer and os.path.exists(folder / f"{MARKER_PREFIX}{token}-{rank}")
    ]
    leaders = _gather(group, min(visible, default=ranks.rank))
    with suppress(OSError):
        own_marker.unlink()
    problem = find_first_problem(problems)
    if problem is not None:
        raise OSError(problem)
    return Peers(ranks.rank, host, tuple(leaders), group)


def find_memory_shortage(reports: list[SpaceReport]) -> str | None:
    """Return one line about the first machine without memory for its ranks' snapshots; `None` if all fit."""
    for host in dict.fromkeys(report.host for report in reports):
        reports_of_host = [report for report in reports if report.host == host]
        needed = sum(report.memory for report in reports_of_host)
        free = min(report.memory_free for report in reports_of_host)
        if needed > MEMORY_SHARE * free:
            return f"{host} has {format_bytes(free)} of memory free, and a copy takes {format_bytes(needed)}"
    return None


def find_first_problem(problems: Iterable[str | None]) -> str | None:
    """Return the first problem; `None` if there is none."""
    return next((problem for problem in problems if problem is not None), None)


def _gather(group: Any, value: T) -> list[T]:
    """Return the value of every rank of a group; a group of `None` has this rank alone."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
