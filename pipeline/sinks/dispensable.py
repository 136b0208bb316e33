"""Sinks that a run can do without: one that fails is dropped with one line. Not here: metrics.jsonl."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from pipeline.errors import PipelineError, one_line
from pipeline.events import Event, Shown
from pipeline.sinks.interface import Shows, Sink

logger = logging.getLogger(__name__)


class Dispensable:
    """A sink, until it raises for the first time; from then on nothing.

    It is not closed then: what failed to write may wait for ever to be written out.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        """Args:
        name: As the line names it.
        """
        self._sink: Sink | None = sink
        self._name = name

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """See Sink."""
        if self._sink is not None:
            self._attempt(self._sink.write, step, row)

    def tell(self, step: int, event: Event) -> None:
        """See Sink."""
        if self._sink is not None:
            self._attempt(self._sink.tell, step, event)

    def show(self, what: Shown) -> None:
        """See Shows."""
        if isinstance(self._sink, Shows):
            self._attempt(self._sink.show, what)

    def close(self, exit_code: int) -> None:
        """See Sink."""
        if self._sink is not None:
            self._attempt(self._sink.close, exit_code)

    def _attempt(self, method: Callable[..., object], *arguments: object) -> None:
        try:
            method(*arguments)
        except (Exception, SystemExit) as error:  # whatever a library raises: the record is metrics.jsonl
            self._sink = None
            _say_dropped(self._name, error)


def open_dispensable(name: str, make: Callable[[], Sink]) -> list[Sink]:
    """The sink, or none where it cannot be opened now: a server that is down must not end a run at a restart.

    Raises:
        PipelineError: what was asked for is a mistake.
    """
    try:
        return [Dispensable(make(), name)]
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        _say_dropped(name, error)
        return []


def _say_dropped(name: str, error: BaseException) -> None:
    what = type(error).__name__
    logger.warning("%s is dropped (%s: %s); the run goes on without it", name, what, one_line(error))
