"""One run from start to end on this rank: the order of things, and every way it can end."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.config.data_schema import ChatDataConfig
from pipeline.config.settings import Resolved, Settings
from pipeline.distributed.ranks import Ranks, write_exit_code
from pipeline.distributed.signals import Terminated, ignore_stop_signals, reports_own_exit
from pipeline.durable import replace_text
from pipeline.errors import PipelineError, printable, too_long_a_name
from pipeline.logs import log_to_console, log_to_file

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed then says nothing of a missing GPU
# Where the store's process was killed, torch's C++ prints a stack for every call to it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from pipeline.assemble import assemble
from pipeline.checkpoint.catalog import steps_in
from pipeline.data import DataBundle, prepare_data
from pipeline.data.digest import check_same_data
from pipeline.distributed.open_files import raise_open_files_limit
from pipeline.distributed.process_group import Job, describe_device, start_job
from pipeline.distributed.progress import Limits
from pipeline.distributed.watchdog import LONGEST_END, is_from_peers
from pipeline.parts import Parts, TrainState
from pipeline.run_directory import RunDirectory, open_run_directory
from pipeline.sampling import sample_text
from pipeline.training import train

log = logging.getLogger(__name__)


def run(settings: Settings, ranks: Ranks, deepspeed: dict[str, Any] | None) -> int:
    """Trains as the settings say. Exit code: 0 finished, 2 bad input, 128 + n stopped by signal n, 124 hung
    or lost a rank (see distributed.watchdog).

    Args:
        deepspeed: The configuration on the device that there most likely is, for DeepSpeed's own validation.
    """
    log_to_console(ranks)
    raise_open_files_limit(ranks.world_size, is_told=ranks.is_main_process)
    job: Job | None = None
    waits = settings.config.distributed
    try:
        if deepspeed is not None:
            from pipeline.engine.validation import check_configuration

            check_configuration(deepspeed)
        # Before the process group exists: preparing data may take longer than its timeout.
        data = prepare_data(settings.config.data)
        job = start_job(
            ranks,
            distributed=settings.deepspeed is not None or ranks.world_size > 1,
            timeout=timedelta(seconds=waits.timeout_seconds),
            bound=waits.bind_cores,
        )
        if ranks.world_size > 1:
            job.watch(Limits(waits.timeout_seconds, waits.hang_seconds))
        return _run(settings, job, data)
    except PipelineError as error:
        return _end(job, ranks, f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        return _end(job, ranks, "stopped at once, without a further checkpoint", 130)
    except Terminated as error:
        return _end(job, ranks, "stopped at once, without a further checkpoint", error.exit_code, error)
    except Exception as error:  # a programmer's mistake keeps its traceback
        mistake = too_long_a_name(error) if isinstance(error, OSError) else None
        if mistake is not None:
            return _end(job, ranks, f"error: {mistake}", mistake.exit_code)
        return _end(job, ranks, traceback.format_exc(), 1, error)


def _run(settings: Settings, job: Job, data: DataBundle) -> int:
    config = settings.config
    resolved = settings.resolve(job.ranks.world_size, describe_device(job.device))
    check_same_data(job, data, is_custom=":" in config.data.kind)
    directory, lock = _agree_on_directory(settings, resolved, job, data)
    with ExitStack() as stack:
        if lock is not None:
            stack.callback(lock.release)
        log_to_file(directory.path, job.ranks)
        if job.watchdog is not None:
            job.watchdog.write_to(directory.path)
        prepared = assemble(config, resolved, job, data, directory)
        stack.callback(prepared.loader.close)
        stack.enter_context(prepared.sinks)
        _announce(settings, resolved, prepared, directory)
        try:
            state, signal_number = train(prepared)
        except BaseException:
            if job.ranks.world_size > 1:
                # The launcher's SIGTERM, for a rank that has ended, must not cut off the word on why.
                ignore_stop_signals()
            raise
        job.progress.at("ending")
        if signal_number is not None:
            prepared.sinks.close(128 + signal_number)
        text = None
        if signal_number is None and data.tokenizer is not None and config.sample.max_new_tokens:
            asks = isinstance(config.data, ChatDataConfig)
            text = sample_text(prepared.engine, data.tokenizer, config.sample, config.seed, asks=asks)
    if job.ranks.is_main_process:
        _conclude(directory.path, state, signal_number, text)
    elif reports_own_exit(job.ranks.local_rank == 0):
        how = "finished" if signal_number is None else "stopped"
        print(f"{_place(job.ranks)}: {how} at step {state.global_step}", file=sys.stderr, flush=True)
    job.barrier()
    if job.ranks.world_size > 1:
        ignore_stop_signals()  # the launcher ends all with the first that leaves with a code
    job.close()
    return 0 if signal_number is None else 128 + signal_number


def _place(ranks: Ranks) -> str:
    return f"rank {ranks.rank} on {platform.node()} (pid {os.getpid()})"


def _agree_on_directory(
    settings: Settings, resolved: Resolved, job: Job, data: DataBundle
) -> tuple[RunDirectory, FileLock | None]:
    """Rank 0 chooses; the others are told, or told why not."""
    lock = None
    answer: RunDirectory | PipelineError | None = None
    split = {
        "data": data.fingerprint,
        "global_batch_size": resolved.plan.global_batch_size,
        "deepspeed": resolved.deepspeed,
        "world_size": job.ranks.world_size,
        "tf32": resolved.tf32,
    }
    if job.ranks.is_main_process:
        try:
            answer, lock = open_run_directory(settings.config, split)
        except PipelineError as error:
            answer = error
    answer = job.broadcast_object(answer)
    if isinstance(answer, PipelineError):
        raise answer
    assert answer is not None
    return answer, lock


def _announce(settings: Settings, resolved: Resolved, prepared: Parts, directory: RunDirectory) -> None:
    job, file = prepared.job, settings.split_path
    log.info(
        "%s parameters; %s%s; %d rank%s on %s; %d steps; %s",
        f"{prepared.engine.num_parameters:,}",
        resolved.split,
        f" ({file})" if file is not None else "",
        job.ranks.world_size,
        "s" * (job.ranks.world_size > 1),
        job.device.type,
        prepared.max_steps,
        directory.path,
    )


def _conclude(path: Path, state: TrainState, signal_number: int | None, text: str | None) -> None:
    """Says where everything lies; a finished run is marked, so that the same command starts a new one."""
    if signal_number is None:
        summary = {
            "global_step": state.global_step,
            "skipped_steps": int(state.skipped_steps),
            "sample": text,
        }
        try:
            replace_text(path / "summary.json", json.dumps(summary, indent=2))
        except OSError as error:  # the last checkpoint is whole
            log.warning("summary.json is not written, so that this run looks unfinished: %s", error)
    else:
        # The last save may have been left out for want of time.
        saved = max(steps_in(path / "checkpoints"), default=None)
        goes_on = "starts again" if saved is None else f"goes on from step {saved}"
        print(f"stopped at step {state.global_step}; the same command {goes_on}")
    if text is not None:
        print(f"\nthe model wrote:\n\n{printable(text)}\n")
    print(f"metrics     {path / 'metrics.jsonl'}")
    print(f"checkpoint  {path / 'checkpoints'}")
    print(f"settings    {path / 'recipe.yaml'}", flush=True)


def _end(job: Job | None, ranks: Ranks, message: str, code: int, error: BaseException | None = None) -> int:
    """Shows a failure once for the whole job, keeps it in every rank's log, and leaves without waiting.

    The ranks that fail because another one did would bury its message under their own.
    """
    watchdog = job.watchdog if job is not None else None
    if ranks.world_size > 1:
        ignore_stop_signals()
    logging.getLogger("pipeline.failure").error("%s", message)
    if watchdog is not None and (isinstance(error, Terminated) or (error and is_from_peers(error))):
        watchdog.look_for_lost(error)  # does not return where another rank is to blame
    first = ranks.local_rank == 0 or reports_own_exit(False) if job is None else job.claim_failure(code)
    if first:
        prefix = f"[rank {ranks.rank}] " if ranks.world_size > 1 and code != 2 else ""
        print(prefix + message.rstrip(), file=sys.stderr, flush=True)
    if ranks.world_size > 1:
        # The launcher ends every rank with the first that exits: let the one that speaks finish, and do not
        # wait for peers in the process group's destructor.
        if not first:
            time.sleep(3 if watchdog is None else LONGEST_END)  # the watchdog leaves, with the job's code
            if reports_own_exit(ranks.local_rank == 0):
                print(f"{_place(ranks)}: ends with {code}: so does another rank", file=sys.stderr, flush=True)
        elif job is not None:
            job.wait_for_leavers()
        logging.shutdown()
        sys.stdout.flush()
        write_exit_code(ranks.rank, ranks.world_size, code)
        os._exit(code)
    if job is not None:
        job.close()
    return code
