"""Trained parameters that never move, looked for once: their values are compared with those at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import listed
from pipeline.events import Event
from pipeline.shards import BUFFER, WEIGHT, Shard
from pipeline.watchers import Seen

STEPS = 20  # that have moved something
# Values of a shard that are looked at: some of each row of an embedding, of which few rows move.
SAMPLE = 2**18

Shards = Callable[[], Iterator[Shard]]
Gather = Callable[[Any], list[Any]]
"""Every rank's value on every rank. Collective."""


class FrozenParameters:
    """Names parameters that are trained and all of whose values are after STEPS steps what they were, or that
    weight decay alone has moved: what the optimizer keeps of their gradients is still 0.

    Every process looks once, also that of a run which goes on: what it does to parameters may be new, with
    another split, optimizer or code, and what it is compared with lies in other shards.

    A rank looks at its shards; one collective, at that one row, says whether a parameter moved anywhere.

    Args:
        shards: Of the engine. Collective.
        gather: Of the job.
    """

    def __init__(self, shards: Shards, gather: Gather) -> None:
        self._shards, self._gather = shards, gather
        self._before: dict[tuple[str, int, int], Tensor] | None = dict(_checksums(shards()))
        self._steps = 0

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher. Collective at one of the rows."""
        if self._before is None:
            return None
        self._steps += seen.steps - sum(seen.skipped)
        if self._steps < STEPS:
            return None
        moved, was_given = self._look(self._before)
        self._before = None
        everyones = self._gather((moved, was_given))
        stuck = [_nowhere([each[part] for each in everyones]) for part in (0, 1)]
        return self._event(*stuck)

    def _look(self, before: dict[tuple[str, int, int], Tensor]) -> tuple[dict[str, bool], dict[str, bool]]:
        """Of this rank's parts of parameters: name -> it moved; name -> its gradient was not always 0."""
        moved: dict[str, list[Tensor]] = {}
        was_given: dict[str, list[Tensor]] = {}
        for shard in _trained(self._shards()):
            if shard.kind == WEIGHT:
                then = before.get(_place(shard))
                if then is not None:
                    moved.setdefault(shard.name, []).append(_checksum(shard) != then)
            elif shard.values is not None:
                was_given.setdefault(shard.name, []).append(shard.values.any())
        return _read(moved), _read(was_given)

    def _event(self, unmoved: list[str], never_given: list[str]) -> Event | None:
        only_decayed = [name for name in never_given if name not in unmoved]
        if not unmoved and not only_decayed:
            return None
        said = [
            f"{listed(names)} {what}"
            for names, what in (
                (unmoved, f"did not move in {self._steps} steps"),
                (only_decayed, f"had no gradient but 0 in {self._steps} steps"),
            )
            if names
        ]
        return Event(
            "frozen_parameter",
            f"trained parameters stand still: {'; '.join(said)}",
            "look for what cuts them off (.detach(), a mask, an activation that is always 0, a branch that "
            "is never taken), for a learning rate too small for the precision of the weights, or put them in "
            "model.freeze",
            fields={"parameters": len(unmoved) + len(only_decayed), "first": (unmoved + only_decayed)[0]},
        )


def _trained(shards: Iterator[Shard]) -> Iterator[Shard]:
    return (each for each in shards if each.kind != BUFFER and not each.is_frozen and each.region.length)


def _place(shard: Shard) -> tuple[str, int, int]:
    first = 0 if shard.region.box is None else hash(shard.region.box)
    return shard.name, first, shard.region.start


def _checksums(shards: Iterator[Shard]) -> Iterator[tuple[tuple[str, int, int], Tensor]]:
    return ((_place(each), _checksum(each)) for each in _trained(shards) if each.kind == WEIGHT)


def _checksum(shard: Shard) -> Tensor:
    """Of the bits of some values, 0-dim, where they lie; nothing waits for it."""
    assert shard.values is not None
    stride = -(-shard.region.length // SAMPLE) | 1  # odd: rows are as wide as some power of 2 mostly
    bits = shard.values[::stride].contiguous().view(torch.uint8).to(torch.int64)
    return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()


def _read(found: dict[str, list[Tensor]]) -> dict[str, bool]:
    """One read of the device for each of them."""
    if not found:
        return {}
    flags = torch.stack([torch.stack(each).any().cpu() for each in found.values()])
    return dict(zip(found, flags.tolist(), strict=True))


def _nowhere(everyones: list[dict[str, bool]]) -> list[str]:
    """Names that no rank says True of."""
    names = dict.fromkeys(name for each in everyones for name in each)
    return [name for name in names if not any(each.get(name, False) for each in everyones)]
