"""The wall time of a run over all of its processes: what it went into, how much of it counts, what it cost.

Of this rank, which on a GPU means its device's time. What a process did after its last row, and how long
nobody ran, is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.distributed.phases import NO_STEP, Moment, Phases, columns, seconds_between
from pipeline.files import format_duration
from pipeline.monitoring.events import TIME, Event
from pipeline.monitoring.trackers.jsonl import newest

ELAPSED, COST, ENERGY = "perf/elapsed_seconds", "perf/cost", "gpu/energy_kwh"
SMALLEST_SHARE = 0.005  # of the process's time, that is told in words


@dataclass(frozen=True)
class Earlier:
    """What the run's processes before this one took."""

    elapsed_seconds: float = 0.0
    training_seconds: float = 0.0
    """Of the steps that its checkpoint has."""
    cost: float = 0.0
    energy_kwh: float = 0.0

    @staticmethod
    def of(record: Path, state: Mapping[str, Any]) -> Earlier:
        """By its metrics.jsonl, before rows are taken back, and by the checkpoint that it goes on from."""
        row, end = newest(record, ELAPSED) or {}, newest(record, _name(ELAPSED)) or {}

        def most(key: str) -> float:
            return max(row.get(key, 0.0), end.get(_name(key), 0.0), state.get(_name(key), 0.0))

        return Earlier(most(ELAPSED), state.get("training_seconds", 0.0), most(COST), most(ENERGY))


def _name(key: str) -> str:
    """Of a column among the fields of an event."""
    return key.partition("/")[2]


class WallTime:
    """Of one process, and with it of the run.

    Args:
        phases: Where the engine's steps go.
        clock: Theirs.
        devices: Of all ranks.
        price: Of a device for an hour, in any currency; None: not known.
        communicates: There are other ranks to wait for.
    """

    def __init__(
        self,
        phases: Phases,
        clock: Callable[[], float],
        *,
        earlier: Earlier | None = None,
        devices: int = 1,
        price: float | None = None,
        communicates: bool = False,
    ):
        self.phases = phases
        self._clock = clock
        self.began = clock()
        """When the process did."""
        self._earlier = earlier or Earlier()
        self._price_per_second = None if price is None else price * devices / 3600
        self._communicates = communicates
        self._startup = 0.0
        self._first_step: Moment = None
        self._told_of_first = False
        self.begin()

    def begin(self) -> None:
        """The run is built: what comes next is its first step, or the evaluation before it."""
        self._startup = self._clock() - self.began
        self.phases.restart()
        self._loop_began = self.phases.began

    def end_first_step(self) -> None:
        """Note that the first step has ended; further calls do nothing."""
        if self._first_step is None:
            self._first_step = self.phases.now()

    def by_phase(self, spent: Mapping[str, float]) -> dict[str, float]:
        """Return the columns of a row.

        Args:
            spent: Seconds by phase of the row's steps.
        """
        told = columns(spent, communicates=self._communicates)
        row = {f"time/{phase}_seconds": seconds for phase, seconds in told.items()}
        if not self._told_of_first and (first := self._first_step_seconds()) is not None:
            self._told_of_first = True
            row["perf/first_step_seconds"] = first
        return row

    def _first_step_seconds(self) -> float | None:
        """From the start of the process to the end of its first step. Waits for the device."""
        if self._first_step is None:
            return None
        return self._startup + seconds_between(self._loop_began, self._first_step)

    def so_far(self) -> dict[str, float]:
        """The run's columns, up to now. Waits for nothing."""
        state = self.remembered()
        elapsed = state["elapsed_seconds"]
        row = {ELAPSED: elapsed, "perf/goodput": state["training_seconds"] / max(elapsed, 1e-9)}
        if self._price_per_second is not None:
            row[COST] = self._earlier.cost + self._price_per_second * (self._clock() - self.began)
        return row

    def remembered(self) -> dict[str, float]:
        """What a checkpoint keeps: seconds of the run, and those of them that went into its steps."""
        process = self._clock() - self.began
        totals = self.phases.totals()
        training = process - self._startup - sum(totals.get(phase, 0.0) for phase in NO_STEP)
        return {
            "elapsed_seconds": self._earlier.elapsed_seconds + process,
            "training_seconds": self._earlier.training_seconds + max(0.0, training),
        }

    def conclusion(self, energy_kwh: float | None = None) -> Event:
        """Where the time of this process went, to its last moment. Waits for the device."""
        phases = columns(self.phases.totals(waits=True), communicates=self._communicates)
        process = max(1e-9, self._clock() - self.began)
        row = self.so_far()
        fields = {"startup_seconds": self._startup}
        if (first := self._first_step_seconds()) is not None:
            fields["first_step_seconds"] = first
        fields |= {f"{phase}_seconds": seconds for phase, seconds in phases.items()}
        fields |= {_name(key): value for key, value in row.items()}
        fields |= {} if energy_kwh is None else {_name(ENERGY): energy_kwh}
        shares = sorted({"start": self._startup, **phases}.items(), key=lambda each: -each[1])
        told = [f"{name} {x / process:.0%}" for name, x in shares if x > SMALLEST_SHARE * process]
        whole = format_duration(row[ELAPSED])
        message = f"{format_duration(process)} went into {', '.join(told)}; of the run's {whole} "
        message += f"{row['perf/goodput']:.1%} are steps that count"
        if COST in row:
            message += f", and cost {row[COST]:.2f}"
        return Event(TIME, message, level="info", fields=fields)
