"""Who profiles a run, by its recipe's section `profile`: the main rank its steps, each rank its memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.distributed.process_group import Job
from pipeline.engine.profile import counted_step
from pipeline.parts import Parts
from pipeline.profiler import FOLDER, Profiled, StepProfiler, snapshot_when_out


def build_profiler(
    config: RunConfig, resolved: Resolved, parts: Parts, folder: Path
) -> AbstractContextManager[Profiled]:
    """Closed, it writes what is left; where nothing is asked for it does nothing."""
    first, ranks = config.profile.start_step, parts.job.ranks
    last = (first or 0) + config.profile.num_steps - 1
    if first is None or not ranks.is_main_process or last <= parts.start.global_step:
        return nullcontext(nullcontext)
    in_modules = not resolved.compile and resolved.split.pipeline_stages == 1
    counting = partial(counted_step, resolved.deepspeed, parts.engine, in_modules=in_modules)
    return StepProfiler(
        folder, (first, last), parts.start.global_step, parts.job.device, counting, parts.sinks.tell
    )


def watch_memory(config: RunConfig, job: Job, folder: Path) -> AbstractContextManager[None]:
    """Where something is profiled, a GPU that runs out of memory says what it held."""
    if config.profile.start_step is None:
        return nullcontext()
    return snapshot_when_out(job.device, folder / FOLDER / f"memory-rank{job.ranks.rank}.pickle")
