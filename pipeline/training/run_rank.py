"""Runs one rank of a training job from start to end, and turns every way it can end into an exit code.

Only the first failure is shown. A rank that fails claims the job's failure in the group's store. Ranks that
fail because another rank has failed write their messages only to their log files.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from typing import Any

from pipeline.checkpoint.catalog import list_published_folders
from pipeline.config.settings import Settings
from pipeline.distributed.ranks import Ranks, write_exit_code
from pipeline.distributed.signals import STDOUT, ignore_stop_signals, reports_own_exit
from pipeline.distributed.watchdog import MAX_SHUTDOWN_SECONDS, may_be_from_peer
from pipeline.errors import (
    INTERRUPTS,
    NO_FURTHER_CHECKPOINT,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceFailedError,
    DeviceMemoryError,
    LaunchError,
    ModelError,
    PipelineError,
    Terminated,
    escape_unprintable,
    explain_interrupt,
    explain_long_path,
)
from pipeline.files import is_run_locked
from pipeline.monitoring.report.page import write_final_report
from pipeline.monitoring.report.runs import format_closing_line, summary_lines
from pipeline.training.api import JobContext, Run, join_job
from pipeline.training.device_failures import TrainingAdvice, explain_failure
from pipeline.training.run_directory import remove_created_folders

INPUT_ERRORS = (ConfigError, DataError, ModelError, CheckpointError, LaunchError)
"""Errors in the user's input. Other PipelineErrors happen to runs whose input is correct."""


def run_rank(settings: Settings, ranks: Ranks, deepspeed: dict[str, Any] | None) -> int:
    """Train one rank and return its exit code. If the process must not end normally, it exits here.

    Args:
        settings: From `load_settings`.
        ranks: Rank and world size of this process.
        deepspeed: DeepSpeed's configuration, see pipeline.training.api.join_job.

    Returns:
        0 if the run finished, 1 for an unexpected error or one in a callback, 2 for wrong input or a run that
        `watch` ended, 12 if memory ran out, 14 if the device failed, 128 + n if signal n stopped it. The
        watchdog exits with 124 if the run hung or lost a rank.
    """
    context: JobContext | None = None
    try:
        context = join_job(settings, ranks, deepspeed)
        return _train(settings, context)
    except PipelineError as error:
        if context is not None and isinstance(error, INPUT_ERRORS) and not context.has_trained:
            remove_created_folders(context.created_folders)
        if isinstance(error, (DeviceMemoryError, DeviceFailedError)):
            logging.getLogger("pipeline.failure").error("%s", traceback.format_exc())
        return _end_with_failure(context, ranks, f"error: {error}", error.exit_code)
    except INTERRUPTS as interrupt:
        message, code = explain_interrupt(interrupt, NO_FURTHER_CHECKPOINT)
        return _end_with_failure(context, ranks, message, code, interrupt)
    except Exception as error:
        explained = explain_long_path(error) if isinstance(error, OSError) else None
        job = context.job if context is not None else None
        device = job.device if job is not None else None
        explained = explained or explain_failure(error, device, TrainingAdvice(settings, job))
        if explained is not None:
            logging.getLogger("pipeline.failure").error("%s", traceback.format_exc())
            return _end_with_failure(context, ranks, f"error: {explained}", explained.exit_code)
        # A programmer's mistake is shown with its traceback.
        return _end_with_failure(context, ranks, traceback.format_exc(), 1, error)


def _train(settings: Settings, context: JobContext) -> int:
    """Train, print the result on rank 0, leave the process group, and return the exit code."""
    job = context.job
    sample = None
    if job.watchdog is not None:
        job.watchdog.set_last_work(partial(_write_report, context))
    with Run(settings, context) as run:
        try:
            run.train()
        except BaseException:
            if job.ranks.world_size > 1:
                # The launcher's SIGTERM after a rank's exit must not cut off the error message.
                ignore_stop_signals()
            raise
        finally:
            context.has_trained = run.global_step > 0
        if run.stopped_by is None:
            sample = run.sample()
    signal_number = run.stopped_by
    if job.ranks.is_main_process:
        _print_result(run, settings, sample)
    elif reports_own_exit(job.ranks.local_rank == 0):
        outcome = "finished" if signal_number is None else "stopped"
        print(f"{_format_rank(job.ranks)}: {outcome} at step {run.global_step}", file=sys.stderr, flush=True)
    job.barrier()
    if job.ranks.world_size > 1:
        ignore_stop_signals()  # the launcher ends all ranks once one exits with a nonzero code
    job.close()
    return 0 if signal_number is None else 128 + signal_number


def _format_rank(ranks: Ranks) -> str:
    return f"rank {ranks.rank} on {platform.node()} (pid {os.getpid()})"


def _print_result(run: Run, settings: Settings, sample: str | None) -> None:
    """Write the run's report, and print its result, its sample and the paths of its files."""
    path = run.directory
    if run.stopped_by is not None:
        # The last save may have been skipped because the grace period was too short.
        saved = max(list_published_folders(path / "checkpoints"), default=None)
        continuation = "starts again" if saved is None else f"resumes from step {saved}"
        print(f"stopped at step {run.global_step}; the same command {continuation}")
    if sample is not None:
        print(f"\nthe model wrote:\n\n{escape_unprintable(sample)}\n")
    for line in summary_lines(path, settings.config.eval):
        print(line)
    report = write_final_report(path)
    if report is not None:
        print(format_closing_line("report", report))
    print(format_closing_line("run", f"{path}: metrics.jsonl, recipe.yaml, checkpoints/"), flush=True)


def _write_report(context: JobContext) -> None:
    """Write the report of a failed run, and print its path.

    Rank 0 writes it, or if that process is gone, the rank that shows the failure.
    """
    directory = context.directory
    if directory is None or not directory.exists():
        return
    # Rank 0 holds the lock until its process ends.
    if not context.job.ranks.is_main_process and is_run_locked(directory):
        return
    report = write_final_report(directory)
    if report is not None:
        with suppress(OSError):  # not through sys.stdout, whose lock a stuck thread may hold
            os.write(STDOUT, f"{format_closing_line('report', report)}\n".encode())


def _end_with_failure(
    context: JobContext | None, ranks: Ranks, message: str, code: int, error: BaseException | None = None
) -> int:
    """Show a failure once for the whole job, write it to this rank's log, and return or exit with the code.

    With several ranks, or after a device failure, the process exits here. Ranks that fail because another
    rank failed print nothing: their messages would hide the first one.

    Args:
        context: This process of the job; `None` if it has not joined the job.
        ranks: Rank and world size of this process.
        message: Text to show.
        code: Exit code.
        error: Exception, if another rank may have caused it; else `None`.
    """
    job = context.job if context is not None else None
    watchdog = job.watchdog if job is not None else None
    if ranks.world_size > 1:
        ignore_stop_signals()
    logging.getLogger("pipeline.failure").error("%s", message)
    was_reported = ranks.is_main_process  # by the trackers of rank 0
    if watchdog is not None and error is not None:
        is_from_peer = may_be_from_peer(error)
        was_reported = was_reported and not is_from_peer
        if is_from_peer or isinstance(error, Terminated):
            watchdog.exit_if_peer_failed(error)  # does not return if another rank caused the failure
    if job is not None:
        shows_failure = job.claim_failure(code)
    else:
        shows_failure = ranks.local_rank == 0 or reports_own_exit(False)
    if shows_failure:
        prefix = f"[rank {ranks.rank}] " if ranks.world_size > 1 and code != 2 else ""
        print(prefix + escape_unprintable(message.rstrip()), file=sys.stderr, flush=True)
        if watchdog is not None and not was_reported:
            watchdog.notify(prefix + message.strip().rpartition("\n")[2])
    if context is not None and ranks.is_main_process:
        _write_report(context)  # after the message, which does not have to wait for the report
    if ranks.world_size > 1 or code == DeviceFailedError.exit_code:
        # The launcher ends every rank when the first one exits, so the rank that shows the failure needs time
        # to finish. `_exit` skips the destructor of the process group, which would wait for peers, and the
        # destructors of CUDA, which abort after a device failure with another exit code.
        if not shows_failure:
            # The watchdog, if there is one, exits with the job's code during this time.
            time.sleep(3 if watchdog is None else MAX_SHUTDOWN_SECONDS)
            if reports_own_exit(ranks.local_rank == 0):
                print(
                    f"{_format_rank(ranks)}: exits with code {code}, because the job failed on another rank",
                    file=sys.stderr,
                    flush=True,
                )
        elif job is not None:
            job.wait_for_other_ranks_to_exit()
        logging.shutdown()
        sys.stdout.flush()
        write_exit_code(ranks.rank, ranks.world_size, code)
        os._exit(code)
    if job is not None:
        job.close()
    return code
