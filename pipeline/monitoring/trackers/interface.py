"""Interface of a tracker: three methods, called in the main process alone, and one optional method.

A user's own tracker comes by import path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pipeline.config.import_paths import import_object, may_not_exit, refuse_misfit
from pipeline.config.watching_schema import SinkConfig
from pipeline.errors import ConfigError
from pipeline.monitoring.events import Event, Shown

GIT_DIFF = "git.diff"
"""File of a run directory with the changes since the commit; a tracker may upload it."""
METHODS = ("write", "tell", "close")


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


def import_sink(config: SinkConfig) -> Callable[..., Any]:
    """The class that `kind` names.

    Raises:
        ConfigError: there is none, or it does not take what it will be given.
    """
    make = import_object(config.kind, ConfigError)
    message = f"log.sinks: {config.kind} cannot be called with (run_dir, start_step, run_config) and its args"
    refuse_misfit(make, message, ConfigError, Path(), 0, {}, **config.args)
    missing = [name for name in METHODS if isinstance(make, type) and not hasattr(make, name)]
    if missing:
        raise ConfigError(_lacks(config, missing))
    return make


def open_own(config: SinkConfig, run_dir: Path, start_step: int, run_config: dict[str, Any]) -> Sink:
    """Makes it.

    Args:
        run_dir: Directory of the run, which is there.
        start_step: Optimizer steps done before this process; rows of later steps come again.
        run_config: Recipe, DeepSpeed JSON and number of ranks.

    Raises:
        ConfigError: see import_sink; or what it makes is no sink.
    """
    make = import_sink(config)
    with may_not_exit(f"log.sinks: {config.kind}", ConfigError):
        sink: Sink = make(run_dir, start_step, run_config, **config.args)
    missing = [name for name in METHODS if not callable(getattr(sink, name, None))]
    if missing:
        raise ConfigError(_lacks(config, missing))
    return sink


def _lacks(config: SinkConfig, missing: list[str]) -> str:
    return (
        f"log.sinks: {config.kind} has no {' and no '.join(missing)}; a sink has write(step, row), "
        "tell(step, event) and close(exit_code), see docs/your-own-sink.md"
    )
