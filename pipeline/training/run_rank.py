"""Runs one rank of a training job from start to end, and turns every way it can end into an exit code.

The first failure is the one that is shown. A rank that fails claims the job's failure in the group's store.
Ranks that fail because of it write their tracebacks only to their log files.
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
from pipeline.distributed.watchdog import LONGEST_END, is_from_peers
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

REFUSALS = (ConfigError, DataError, ModelError, CheckpointError, LaunchError)
"""Errors in what the user gave. Other PipelineErrors happen to a run that was given correctly."""


def run_rank(settings: Settings, ranks: Ranks, deepspeed: dict[str, Any] | None) -> int:
    """Train one rank and return its exit code.

    Args:
        settings: From `load_settings`.
        ranks: Rank and world size of this process.
        deepspeed: See pipeline.training.api.join_job.

    Returns:
        0 if the run finished, 2 for bad input, 12 out of memory, 14 if the device failed, 128 + n if signal n
        stopped it, 124 if it hung or lost a rank (see distributed.watchdog).
    """
    begun: JobContext | None = None
    try:
        begun = join_job(settings, ranks, deepspeed)
        return _run(settings, begun)
    except PipelineError as error:
        if begun is not None and isinstance(error, REFUSALS) and not begun.has_trained:
            remove_created_folders(begun.created_folders)
        if isinstance(error, (DeviceMemoryError, DeviceFailedError)):
            logging.getLogger("pipeline.failure").error("%s", traceback.format_exc())
        return _end_with_failure(begun, ranks, f"error: {error}", error.exit_code)
    except INTERRUPTS as interrupt:
        return _end_with_failure(
            begun, ranks, *explain_interrupt(interrupt, NO_FURTHER_CHECKPOINT), interrupt
        )
    except Exception as error:  # a programmer's mistake keeps its traceback
        mistake = explain_long_path(error) if isinstance(error, OSError) else None
        job = begun.job if begun is not None else None
        device = job.device if job is not None else None
        mistake = mistake or explain_failure(error, device, TrainingAdvice(settings, job))
        if mistake is not None:
            logging.getLogger("pipeline.failure").error("%s", traceback.format_exc())
            return _end_with_failure(begun, ranks, f"error: {mistake}", mistake.exit_code)
        return _end_with_failure(begun, ranks, traceback.format_exc(), 1, error)


def _run(settings: Settings, begun: JobContext) -> int:
    job = begun.job
    text = None
    if job.watchdog is not None:
        job.watchdog.before_leaving(partial(_write_report, begun))
    with Run(settings, begun) as prepared:
        try:
            prepared.train()
        except BaseException:
            if job.ranks.world_size > 1:
                # The launcher's SIGTERM after a rank's exit must not cut off the error message.
                ignore_stop_signals()
            raise
        finally:
            begun.has_trained = prepared.global_step > 0
        if prepared.stopped_by is None:
            text = prepared.sample()
    number = prepared.stopped_by
    if job.ranks.is_main_process:
        _print_result(prepared, settings, text)
    elif reports_own_exit(job.ranks.local_rank == 0):
        how = "finished" if number is None else "stopped"
        print(f"{_format_rank(job.ranks)}: {how} at step {prepared.global_step}", file=sys.stderr, flush=True)
    job.barrier()
    if job.ranks.world_size > 1:
        ignore_stop_signals()  # the launcher ends all ranks once one exits with a nonzero code
    job.close()
    return 0 if number is None else 128 + number


def _format_rank(ranks: Ranks) -> str:
    return f"rank {ranks.rank} on {platform.node()} (pid {os.getpid()})"


def _print_result(run: Run, settings: Settings, text: str | None) -> None:
    """Print the run's result, its sample and the paths of what it wrote."""
    path = run.directory
    if run.stopped_by is not None:
        # The last save may have been skipped because the grace period was too short.
        saved = max(list_published_folders(path / "checkpoints"), default=None)
        continuation = "starts again" if saved is None else f"resumes from step {saved}"
        print(f"stopped at step {run.global_step}; the same command {continuation}")
    if text is not None:
        print(f"\nthe model wrote:\n\n{escape_unprintable(text)}\n")
    for line in summary_lines(path, settings.config.eval):
        print(line)
    report = write_final_report(path)
    if report is not None:
        print(format_closing_line("report", report))
    print(format_closing_line("run", f"{path}: metrics.jsonl, recipe.yaml, checkpoints/"), flush=True)


def _write_report(begun: JobContext) -> None:
    """Write the report of a failed run: on rank 0, or if it is gone, on the rank that shows the failure."""
    directory = begun.directory
    if (
        directory is None
        or not directory.exists()
        or (not begun.job.ranks.is_main_process and is_run_locked(directory))
    ):
        return
    if (report := write_final_report(directory)) is not None:
        with suppress(OSError):  # not through sys.stdout, whose lock a stuck thread may hold
            os.write(STDOUT, f"{format_closing_line('report', report)}\n".encode())


def _end_with_failure(
    begun: JobContext | None, ranks: Ranks, message: str, code: int, error: BaseException | None = None
) -> int:
    """Show a failure once for the whole job, write it to every rank's log, and exit without waiting.

    Ranks that fail because another rank failed stay silent: their messages would bury the first one.
    """
    job = begun.job if begun is not None else None
    watchdog = job.watchdog if job is not None else None
    if ranks.world_size > 1:
        ignore_stop_signals()
    logging.getLogger("pipeline.failure").error("%s", message)
    if watchdog is not None and (isinstance(error, Terminated) or (error and is_from_peers(error))):
        watchdog.exit_if_peer_failed(error)  # does not return if another rank caused the failure
    first = ranks.local_rank == 0 or reports_own_exit(False) if job is None else job.claim_failure(code)
    if first:
        prefix = f"[rank {ranks.rank}] " if ranks.world_size > 1 and code != 2 else ""
        print(prefix + escape_unprintable(message.rstrip()), file=sys.stderr, flush=True)
        if watchdog is not None and not ranks.is_main_process:  # rank 0's trackers report its own failure
            watchdog.tell(prefix + message.strip().rpartition("\n")[2])
    if begun is not None and ranks.is_main_process:
        _write_report(begun)  # after the message is shown, so that nothing waits for the report
    if ranks.world_size > 1 or code == DeviceFailedError.exit_code:
        # The launcher ends every rank when the first one exits, so the rank that shows the failure needs time
        # to finish. `_exit` skips the process group's destructor, which would wait for peers, and CUDA's,
        # which abort after a device failure with an exit code of their own.
        if not first:
            time.sleep(3 if watchdog is None else LONGEST_END)  # the watchdog exits with the job's code
            if reports_own_exit(ranks.local_rank == 0):
                print(
                    f"{_format_rank(ranks)}: ends with {code}: so does another rank",
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
