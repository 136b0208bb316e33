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

from pipeline.distributed.machine import machine_id
from pipeline.distributed.memory import Memory
from pipeline.distributed.verdict import Who, Witness

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
    """Of `lost`: the rank that gave no sign, as it was known then."""


@dataclass(frozen=True)
class Beat:
    """A sign of life, about once a second."""

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


def arrive(store: Store, rank: int) -> str:
    """Says that a process is there as this rank, under a token of its own. It is answered to the token."""
    token = secrets.token_hex(8)
    store.set(f"pipeline/arrived/{rank}", token)
    return token


def answer(store: Store, world_size: int, attempt: str) -> None:
    """Tells those who have arrived so far which attempt of the job they belong to. For rank 0, repeatedly.

    In a store that outlives attempts (torchrun's) they may be of an earlier one: that answer is never read.
    """
    for token in _present(store, "arrived", range(world_size)).values():
        store.compare_set(_answer_to(token.decode()), "", attempt)


def part_of_attempt(store: Store, token: str) -> Store:
    """What only the processes of this attempt write to and read. Waits for rank 0's answer.

    No number in the environment tells one attempt from the next: torchrun counts failures, each machine its
    own, and not the changes of membership.
    """
    return PrefixStore(f"pipeline/{store.get(_answer_to(token)).decode()}", store)


def _answer_to(token: str) -> str:
    return f"pipeline/answer/{token}"


def introduce(store: Store, rank: int, pid: int) -> None:
    """Says who this rank is. Before the process group exists."""
    store.set(f"pipeline/who/{rank}", json.dumps([platform.node(), pid, machine_id()]))
    store.compare_set(FAILURE, "", NOBODY)


def everyone(store: Store, world_size: int) -> list[Who]:
    """All ranks, in order; waits until each has introduced itself."""
    values = store.multi_get([f"pipeline/who/{rank}" for rank in range(world_size)])
    return [Who(rank, *json.loads(value)) for rank, value in enumerate(values)]


def whoever(store: Store, world_size: int) -> list[Who]:
    """Those that have introduced themselves so far, in order."""
    present = _present(store, "who", range(world_size))
    return [Who(rank, *json.loads(value)) for rank, value in present.items()]


class Lines:
    """A connection of the watchdog's own: the training thread may be stuck in the other one."""

    def __init__(self, store: Store, rank: int, patience: float):
        """`patience`: seconds that the store may take to answer."""
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=patience))
        self._rank = rank

    def beat(self, beat: Beat) -> None:
        """Gives a sign of life."""
        self._store.set(f"pipeline/beat/{self._rank}", json.dumps(asdict(beat)))

    def beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """The last signs of those that gave any."""
        return {rank: _beat(value) for rank, value in _present(self._store, "beat", ranks).items()}

    def failure(self) -> Failure | None:
        """What the job ends of, if it does."""
        value = self._store.get(FAILURE).decode()
        return None if value == NOBODY else _failure(value.encode())

    def claim(self, failure: Failure) -> Failure:
        """See claim."""
        return claim(self._store, failure)

    def testify(self, witness: Witness) -> None:
        """Says where this rank stands."""
        self._store.set(f"pipeline/witness/{self._rank}", json.dumps(asdict(witness)))

    def witnesses(self, ranks: Sequence[int]) -> list[Witness]:
        """Of those that have testified."""
        found = [json.loads(value) for value in _present(self._store, "witness", ranks).values()]
        return [Witness(**values | {"who": Who(**values["who"])}) for values in found]

    def tell(self, sentence: str) -> None:
        """Says what the job ends of, for all that ask."""
        self._store.set("pipeline/verdict", sentence)

    def told(self) -> str | None:
        """What was told, if anything was."""
        key = "pipeline/verdict"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def mark(self, what: str) -> None:
        """Something is done on this rank, once."""
        self._store.add(f"pipeline/{what}", 1)

    def marks(self, what: str) -> int:
        """How many ranks have marked it."""
        return int(self._store.add(f"pipeline/{what}", 0))


def _present(store: Store, what: str, ranks: Sequence[int]) -> dict[int, bytes]:
    keys = {rank: f"pipeline/{what}/{rank}" for rank in ranks}
    if keys and not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


def _failure(value: bytes) -> Failure:
    return Failure(**json.loads(value))


def _beat(value: bytes) -> Beat:
    values: dict[str, Any] = json.loads(value)
    return Beat(values["count"], values["step"], Memory(**values["memory"]))
