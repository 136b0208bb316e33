"""What a place for metrics is: three methods, in the main process alone, and one that it may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from pipeline.events import Event, Shown


class Sink(Protocol):
    """A place where the numbers of a run go."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Take one row.

        Args:
            step: Optimizer steps done (`global_step`); smaller than in the row before only after a ROLLBACK.
            row: Metric key (`group/snake_case`) to value.
        """

    def tell(self, step: int, event: Event) -> None:
        """Take what happened at a step.

        Args:
            step: As of `write`, but that the row of the same step may come after it.
        """

    def close(self, exit_code: int) -> None:
        """Write out what is left.

        Args:
            exit_code: 0 for a run that ended as it should, 128 + n for one that signal n stopped, anything
                else for one that failed.
        """


@runtime_checkable
class Shows(Protocol):
    """A sink that takes what is neither a row nor an event, too. metrics.jsonl has none of it."""

    def show(self, what: Shown) -> None:
        """Take it. Histograms come behind their row."""
