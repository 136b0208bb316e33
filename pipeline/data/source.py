"""What the loop knows of where its rows come from: read from data sets, or made while training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pipeline.data.batches import Batch


class BatchSource(Protocol):
    """The training rows of one rank, a group of micro-batches for each optimizer step.

    Where it stands is a state that a checkpoint can keep: a run that goes on from there is given the rows
    that the unbroken run would have been given.
    """

    @property
    def samples_seen(self) -> int:
        """Samples of the steps handed out so far, over all ranks."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""

    def source_samples(self) -> dict[str, int]:
        """Samples handed out so far, over all ranks, by their source. Not collective."""

    def next_group(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step."""

    def fetch_ahead(self) -> None:
        """Called once a step is on its way: the time to begin with the next group."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: plain numbers, names and lists of them, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`, also one of another number of ranks."""

    def close(self) -> None:
        """Ends what it has started."""
