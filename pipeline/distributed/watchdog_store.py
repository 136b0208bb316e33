"""The watchdog's side of the job's store: what ranks write there, and read of each other.

Every method may raise RuntimeError: the store, or the link to it, is gone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from pipeline.distributed.diagnosis import RankProcess, RankReport
from pipeline.distributed.machine import Memory

HANG_EXIT_CODE = 124
"""Of every rank of a job that hung or lost a rank; `timeout` ends with it too."""
FAILURE = "pipeline/failure"
NOBODY = "-"


@dataclass(frozen=True)
class Failure:
    """Why the job ends: claimed once, by the first rank that knows."""

    rank: int
    why: str
    """`raised`: the rank shows its own error. `hang`, `lost`: a rank must be found out."""
    code: int
    seconds: float = 0.0
    """Without progress, of a hang."""
    what: str = ""
    """Of `lost`: the rank whose heartbeats stopped, as it was known then."""


@dataclass(frozen=True)
class Heartbeat:
    """Sent about once a second."""

    count: int
    step: int
    memory: Memory


def claim(store: Store, failure: Failure) -> Failure:
    """The job's failure: this one, or the one that was claimed before.

    Raises:
        RuntimeError: the store is gone.
    """
    # Where the key is not there yet, the first call makes it; two that do so at once still agree below.
    store.compare_set(FAILURE, "", NOBODY)
    return _failure(store.compare_set(FAILURE, NOBODY, json.dumps(asdict(failure))))


class WatchdogStore:
    """A connection of the watchdog's own: the training thread may be stuck in the other one."""

    def __init__(self, store: Store, rank: int, patience: float):
        """`patience`: seconds that the store may take to answer."""
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=patience))
        self._rank = rank

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Tells the others that this rank is alive."""
        self._store.set(f"pipeline/heartbeat/{self._rank}", json.dumps(asdict(heartbeat)))

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """The newest heartbeats of those that sent any."""
        return {rank: _heartbeat(value) for rank, value in present(self._store, "heartbeat", ranks).items()}

    def failure(self) -> Failure | None:
        """What the job ends of, if it does."""
        value = self._store.get(FAILURE).decode()
        return None if value == NOBODY else _failure(value.encode())

    def claim(self, failure: Failure) -> Failure:
        """See claim."""
        return claim(self._store, failure)

    def send_report(self, report: RankReport) -> None:
        """Says where this rank stands."""
        self._store.set(f"pipeline/report/{self._rank}", json.dumps(asdict(report)))

    def reports(self, ranks: Sequence[int]) -> list[RankReport]:
        """Of those that have sent one."""
        found = [json.loads(value) for value in present(self._store, "report", ranks).values()]
        return [RankReport(**values | {"process": RankProcess(**values["process"])}) for values in found]

    def publish_diagnosis(self, sentence: str) -> None:
        """Says what the job ends of, for all that ask."""
        self._store.set("pipeline/diagnosis", sentence)

    def diagnosis(self) -> str | None:
        """What was published, if anything was."""
        key = "pipeline/diagnosis"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def count(self, what: str) -> None:
        """Something is done on this rank, once."""
        self._store.add(f"pipeline/{what}", 1)

    def counted(self, what: str) -> int:
        """How many ranks have counted it."""
        return int(self._store.add(f"pipeline/{what}", 0))


def present(store: Store, what: str, ranks: Sequence[int]) -> dict[int, bytes]:
    """What those of the ranks wrote that wrote anything, by rank."""
    keys = {rank: f"pipeline/{what}/{rank}" for rank in ranks}
    if keys and not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


def _failure(value: bytes) -> Failure:
    return Failure(**json.loads(value))


def _heartbeat(value: bytes) -> Heartbeat:
    values: dict[str, Any] = json.loads(value)
    return Heartbeat(values["count"], values["step"], Memory(**values["memory"]))
