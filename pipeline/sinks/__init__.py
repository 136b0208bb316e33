"""Where a run's numbers go: metrics.jsonl (the record), the console, Weights & Biases, TensorBoard."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config.schema import RunConfig
from pipeline.sinks.console import ConsoleSink
from pipeline.sinks.interface import Sink, Sinks
from pipeline.sinks.jsonl import (
    METRICS_FILE,
    JsonlSink,
    MetricsFileError,
    gaps,
    iterate_metrics,
    read_metrics,
)

__all__ = ["METRICS_FILE", "JsonlSink", "MetricsFileError", "Sink", "Sinks", "build_sinks", "read_metrics"]

logger = logging.getLogger(__name__)


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
        if (said := gaps(record.found, due or {})) is not None:
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
