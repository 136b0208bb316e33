"""The watchdog's side of the job's store: what ranks write there, and read of each other.

Every method may raise RuntimeError: the store, or the link to it, is gone.
"""

from __future__ import annotations

import json
import platform
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from pipeline.distributed.diagnosis import RankProcess, RankReport
from pipeline.distributed.machine import Memory, machine_id

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


def announce(store: Store, rank: int) -> str:
    """Says that a process is there as this rank, under a token of its own. It is answered to the token."""
    token = secrets.token_hex(8)
    store.set(f"pipeline/arrived/{rank}", token)
    return token


def answer_arrivals(store: Store, world_size: int, attempt: str) -> None:
    """Tells those who have arrived so far which attempt of the job they belong to. For rank 0, repeatedly.

    In a store that outlives attempts (torchrun's) they may be of an earlier one: that answer is never read.
    """
    for token in _present(store, "arrived", range(world_size)).values():
        store.compare_set(_answer_to(token.decode()), "", attempt)


def attempt_store(store: Store, token: str) -> Store:
    """What only the processes of this attempt write to and read. Waits for rank 0's answer.

    No number in the environment tells one attempt from the next: torchrun counts failures, each machine its
    own, and not the changes of membership.
    """
    return PrefixStore(f"pipeline/{store.get(_answer_to(token)).decode()}", store)


def _answer_to(token: str) -> str:
    return f"pipeline/answer/{token}"


def register(store: Store, rank: int, pid: int) -> None:
    """Says who this rank is. Before the process group exists."""
    store.set(f"pipeline/process/{rank}", json.dumps([platform.node(), pid, machine_id()]))
    store.compare_set(FAILURE, "", NOBODY)


def all_ranks(store: Store, world_size: int) -> list[RankProcess]:
    """All ranks, in order; waits until each has introduced itself."""
    values = store.multi_get([f"pipeline/process/{rank}" for rank in range(world_size)])
    return [RankProcess(rank, *json.loads(value)) for rank, value in enumerate(values)]


def registered(store: Store, world_size: int) -> list[RankProcess]:
    """Those that have introduced themselves so far, in order."""
    present = _present(store, "process", range(world_size))
    return [RankProcess(rank, *json.loads(value)) for rank, value in present.items()]


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
        return {rank: _heartbeat(value) for rank, value in _present(self._store, "heartbeat", ranks).items()}

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
        found = [json.loads(value) for value in _present(self._store, "report", ranks).values()]
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


def _present(store: Store, what: str, ranks: Sequence[int]) -> dict[int, bytes]:
    keys = {rank: f"pipeline/{what}/{rank}" for rank in ranks}
    if keys and not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


def _failure(value: bytes) -> Failure:
    return Failure(**json.loads(value))


def _heartbeat(value: bytes) -> Heartbeat:
    values: dict[str, Any] = json.loads(value)
    return Heartbeat(values["count"], values["step"], Memory(**values["memory"]))
