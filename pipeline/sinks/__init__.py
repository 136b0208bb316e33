"""Where a run's numbers go: metrics.jsonl (the record), the console, Weights & Biases, TensorBoard.

What such a place is, several of them as one, and which of them a recipe asks for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console

from pipeline.config.schema import RunConfig
from pipeline.errors import PipelineError
from pipeline.events import Event
from pipeline.sinks.console import ConsoleSink
from pipeline.sinks.jsonl import METRICS_FILE, JsonlSink, iterate_metrics

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A place where the numbers of a run go."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Take one row.

        Args:
            step: Optimizer steps done (`global_step`); never smaller than in the row before.
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


class Sinks:
    """Every sink of the run as one; empty where nothing is written (any rank but the main process).

    As a context manager it closes them: with exit code 0, or 1 where an exception passes through.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks: tuple[Sink, ...] = tuple(sinks)

    @property
    def is_empty(self) -> bool:
        """Nothing is written, or no more."""
        return not self._sinks

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Hand one row to every sink."""
        for sink in self._sinks:
            sink.write(step, row)

    def tell(self, step: int, event: Event) -> None:
        """Log what happened, on every rank, and hand it to every sink."""
        logger.log(logging.getLevelName(event.level.upper()), "%s", event.line)
        for sink in self._sinks:
            sink.tell(step, event)

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


def build_sinks(
    config: RunConfig,
    *,
    run_dir: Path,
    is_main_process: bool,
    start_step: int,
    max_steps: int,
    run_config: dict[str, Any],
    due: Mapping[str, Collection[int]] | None = None,
    redo_evaluation: bool = False,
) -> Sinks:
    """Open every sink the recipe asks for.

    Args:
        config: The recipe; `log` and `wandb` are read.
        run_dir: Directory of the run (exists already); everything is written under it.
        is_main_process: False gives an empty `Sinks`: only one process of a job writes.
        start_step: Optimizer steps done before this process. Rows of later steps are taken back.
        max_steps: Optimizer steps of the whole run.
        run_config: What Weights & Biases shows as the run's configuration. No secrets.
        due: Group of metrics, `train` or `eval` -> steps up to `start_step` of which metrics.jsonl has a row;
            those that it lacks are told in one line.
        redo_evaluation: The evaluation of `start_step` comes again.

    Raises:
        ConfigError: TensorBoard is asked for and not installed.
        MetricsFileError: metrics.jsonl cannot be written.
    """
    if not is_main_process:
        return Sinks()
    sinks: list[Sink] = []
    with ExitStack() as undo:
        undo.callback(lambda: Sinks(sinks).close(1))
        record = JsonlSink(run_dir / METRICS_FILE, start_step=start_step, redo_evaluation=redo_evaluation)
        sinks.append(record)
        if (said := record.gaps(due or {})) is not None:
            logger.warning("%s %s; the run goes on without them", record.path, said)
        if config.log.tensorboard:
            from pipeline.sinks.tensorboard_events import TensorBoardSink

            sinks.append(TensorBoardSink(run_dir / "tensorboard", start_step=start_step))
        if config.wandb.mode != "disabled":
            # 0.4 s of imports: only where it is used.
            from pipeline.sinks.weights_and_biases import open_wandb

            online = open_wandb(
                config.wandb,
                run_name=config.name,
                run_dir=run_dir,
                start_step=start_step,
                run_config=run_config,
                earlier_rows=partial(iterate_metrics, record.path),
            )
            sinks += [online] if online is not None else []
        # Open MPI hands every rank a pty, whatever its own output is.
        console = Console(force_terminal=False if "OMPI_COMM_WORLD_RANK" in os.environ else None)
        sinks.append(ConsoleSink(console, max_steps=max_steps))
        undo.pop_all()
    return Sinks(sinks)
