"""What a sink is, and several of them as one. Knows nothing of files, terminals or services."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol

from pipeline.errors import PipelineError

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A place where the numbers of a run go."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Take one row.

        Args:
            step: Optimizer steps done (`global_step`); never smaller than in the row before.
            row: Metric key (`group/snake_case`) to value.
        """

    def close(self, exit_code: int) -> None:
        """Write out what is left.

        Args:
            exit_code: 0 for a run that ended as it should, 128 + n for one that signal n stopped, anything
                else for one that failed.
        """


class Sinks:
    """Every sink of the run as one; empty where nothing is written (any rank but the main process).

    As a context manager it closes them: with exit code 0, or 1 where an exception passes through.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks: tuple[Sink, ...] = tuple(sinks)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Hand one row to every sink."""
        for sink in self._sinks:
            sink.write(step, row)

    def close(self, exit_code: int) -> None:
        """Close every sink, also after one of them failed to; the failure is raised at the end.

        Once: a second call does nothing.
        """
        sinks, self._sinks = self._sinks, ()
        with ExitStack() as stack:
            for sink in reversed(sinks):  # an ExitStack calls the last one first
                stack.callback(sink.close, exit_code)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(0 if error is None else 1)
        except (OSError, PipelineError) as failure:
            if error is None:
                raise
            logger.warning("closing the run's metrics failed: %s", failure)  # the first error is the news
