"""From settings to a process of the job with its data: what comes before there is a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline.config.settings import Settings
from pipeline.data import prepare_data
from pipeline.data.bundle import DataBundle
from pipeline.distributed.accelerator import choose_accelerator
from pipeline.distributed.machine import raise_open_files_limit
from pipeline.distributed.process_group import Job, start_job
from pipeline.distributed.progress import Phase, phase
from pipeline.distributed.ranks import Ranks
from pipeline.monitoring.logs import log_to_console
from pipeline.monitoring.trackers import check_sinks
from pipeline.planner.shapes import check_pretrained
from pipeline.redaction import declare_secret_variable
from pipeline.training.callbacks import import_callbacks


@dataclass
class Joined:
    """A process of the job, with its data; and the run's directory, once there is one."""

    job: Job
    data: DataBundle
    directory: Path | None = None
    made: tuple[Path, ...] = ()
    """Folders that this process made for the run, innermost first."""
    has_trained: bool = False
    """Whether a step was made."""


@phase(Phase.DATA)
def join(settings: Settings, ranks: Ranks, deepspeed: dict[str, Any] | None) -> Joined:
    """Prepares the data and joins the process group. Collective.

    Args:
        deepspeed: The configuration on the device that there most likely is, for DeepSpeed's own validation.

    Raises:
        PipelineError: the JSON or the data cannot be used; not all ranks came.
    """
    if (variable := settings.config.notify.webhook_env) is not None:
        declare_secret_variable(variable)
    log_to_console(ranks, settings.config.log.console)
    raise_open_files_limit(ranks.world_size, is_told=ranks.is_main_process)
    choose_accelerator(tells=ranks.is_main_process)  # before DeepSpeed, which would choose itself
    if deepspeed is not None:
        from pipeline.engine.deepspeed_patches import check_configuration

        check_configuration(deepspeed)
    if ranks.is_main_process:
        check_sinks(settings.config)  # before hours go into the data
        import_callbacks(settings.config)
    check_pretrained(settings.config)
    # Before the process group exists: preparing data may take longer than its timeout.
    data = prepare_data(settings.config.data)
    waits = settings.config.distributed
    job = start_job(
        ranks,
        distributed=settings.deepspeed is not None or ranks.world_size > 1,
        timeout=timedelta(seconds=waits.timeout_seconds),
        bound=waits.bind_cores,
    )
    if ranks.world_size > 1:
        job.watch(waits)
    return Joined(job, data)
