"""A loss or a gradient norm that stands out of what was normal before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.band import Band
from pipeline.events import Event
from pipeline.watchers import Seen

CALM = 32  # steps without a spike, after which the next one is told again


class Spikes:
    """Tells of the first spike of an episode: until CALM steps have gone by without one, also where the run
    goes on within it.
    """

    def __init__(self, name: str, of: str, advice: str, band: Band) -> None:
        """What it is called and looks at; see `of_losses`, `of_norms`. Who made the band keeps it."""
        self.name, self._of, self._advice = name, of, advice
        self._band = band
        self._calm = CALM

    @staticmethod
    def of_losses(band: Band) -> Spikes:
        """Each step's training loss."""
        advice = (
            "look at the samples of that step; if it does not come down by itself, go back to the last "
            "checkpoint with a lower optimizer.learning_rate, a longer schedule.warmup or a lower "
            "optimizer.max_grad_norm"
        )
        return Spikes("loss_spike", "loss", advice, band)

    @staticmethod
    def of_norms(band: Band) -> Spikes:
        """Each step's gradient norm, before clipping."""
        advice = (
            "where the loss follows, lower optimizer.learning_rate or optimizer.max_grad_norm, or raise "
            "schedule.warmup; look at the samples of that step"
        )
        return Spikes("grad_norm_spike", "gradient norm", advice, band)

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        found = None
        values = seen.losses if self.name == "loss_spike" else seen.norms
        for at, value in enumerate(values, step - len(values) + 1):
            if self._band.is_spike(value) and self._calm >= CALM and found is None:
                found = self._event(at, value, self._band.middle, self._band.limit)
            is_spike = self._band.add(value)
            self._calm = 0 if is_spike else self._calm + 1
        return found

    def _event(self, at: int, value: float, middle: float, limit: float) -> Event:
        return Event(
            self.name,
            f"the {self._of} of step {at} is {value:.4g}, {value / middle:.1f} times what was normal before "
            f"({middle:.4g}, up to {limit:.4g})",
            self._advice,
            fields={"at_step": at, "value": value, "normal": middle, "limit": limit},
        )

    def state_dict(self) -> dict[str, Any]:
        """See Remembers. The band is not its own to keep."""
        return {"calm": self._calm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Remembers."""
        self._calm = int(state["calm"])
