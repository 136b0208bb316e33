"""What runs on this machine took against what was expected of them: it corrects the next plan.

A small file of the user's own, one line a run; a line that cannot be read is passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.config.schema import RunConfig, cache_folder
from pipeline.config.settings import Resolved
from pipeline.files import CONFIGURATION_LIMIT, read_plain, replace_file
from pipeline.planning.model import Model

FILE = "plans.jsonl"
MOST_LINES = 400
RECENT = 5
"""Runs of a kind that count."""
OFFLOADED = ("offload_optimizer", "offload_param")
LIMITS = (0.5, 2.0)
"""Of a correction: what lies beyond was another kind of run."""


@dataclass(frozen=True)
class Kind:
    """Runs whose plans are wrong by the same factor."""

    device: str
    """`H100 SXM 80GB`, `2 CPU cores`."""
    family: str
    split: str
    """Offload named, too."""
    compiled: bool
    size: int = 0
    """Of the model, and"""
    rows: int = 0
    """of what a rank computes at a time: each the power of two that is next."""

    @classmethod
    def of(cls, device: str, model: Model, config: RunConfig, resolved: Resolved) -> Kind:
        """Of a run."""
        family = model.dimensions.family if model.dimensions is not None else model.name
        zero = (resolved.deepspeed or {}).get("zero_optimization", {})
        where = (f"{name} on {zero[name]['device']}" for name in OFFLOADED if zero.get(name))
        split = ", ".join((str(resolved.split), *where))
        size = model.numel.bit_length()
        rows = resolved.plan.micro_batch_size * (config.data.tokens_per_row or 1)
        return cls(device, family, split, resolved.compile, size, rows.bit_length())


@dataclass(frozen=True)
class Measured:
    """One run, over what was expected of it."""

    kind: Kind
    memory: float | None
    """Peak over what was expected; None: either is not known."""
    speed: float | None
    """Tokens a second over what was expected."""
    flops: float | None
    """Model FLOPs a second of a rank."""


@dataclass(frozen=True)
class Correction:
    """Factors on what the formulas say."""

    memory: float = 1.0
    speed: float = 1.0
    runs: int = 0
    """That it comes of."""


class History:
    """Of one user on one machine."""

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._known: list[Measured] | None = None

    def correction(self, kind: Kind) -> Correction:
        """By the newest runs of this kind; without one there is none."""
        found = [each for each in self._runs() if each.kind == kind][-RECENT:]
        memory, speed = (_mean(getattr(each, name) for each in found) for name in ("memory", "speed"))
        return Correction(memory or 1.0, speed or 1.0, len(found))

    def flops(self, device: str) -> float | None:
        """A second of a rank, that runs on this device reached; None: none did yet."""
        found = [each.flops for each in self._runs() if each.kind.device == device and each.flops]
        return max(found[-RECENT:], default=None)

    def add(self, measured: Measured) -> None:
        """Nothing is said where it cannot be written: a plan is right enough without."""
        self._known = None
        lines = [json.dumps(asdict(each)) for each in [*self._read(), measured]][-MOST_LINES:]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, "\n".join(lines) + "\n")

    def _runs(self) -> list[Measured]:
        """Read once: a search asks for hundreds of corrections."""
        if self._known is None:
            self._known = list(self._read())
        return self._known

    def _read(self) -> Iterator[Measured]:
        with suppress(OSError):
            for line in read_plain(self._path, CONFIGURATION_LIMIT).splitlines():
                with suppress(ValueError, TypeError, KeyError):
                    found = json.loads(line)
                    numbers = [found[name] for name in ("memory", "speed", "flops")]
                    if all(each is None or 0 < float(each) < math.inf for each in numbers):
                        yield Measured(Kind(**found["kind"]), *numbers)


def history_of(config: RunConfig) -> History:
    """Beside what the recipe's runs keep between starts."""
    return History(cache_folder(config))


def _mean(ratios: Iterable[float | None]) -> float | None:
    """Geometric, within the limits."""
    found = [math.log(min(max(each, LIMITS[0]), LIMITS[1])) for each in ratios if each is not None]
    return math.exp(sum(found) / len(found)) if found else None
