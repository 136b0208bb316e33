"""A user's own sink by import path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.watching_schema import SinkConfig
from pipeline.errors import ConfigError
from pipeline.importing import import_object, may_not_exit, refuse_misfit
from pipeline.sinks.interface import Sink

METHODS = ("write", "tell", "close")


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
