"""A rank that does nothing but steps of one collective, and to which something happens in the sixth.

RANK=0 ... python -m distributed.watched FAULT RANK_IT_HAPPENS_TO FOLDER
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import torch
import torch.distributed as dist

from pipeline.config.schema import DistributedConfig
from pipeline.distributed.process_group import Job, start_job
from pipeline.distributed.ranks import read_ranks

HANG_SECONDS = 3.0


def something_happens(fault: str) -> None:
    if fault == "sleep":
        time.sleep(600)
    if fault == "no more files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
        return
    if fault == "another collective":
        dist.broadcast(torch.ones(1), 0)
    if fault == "kill":
        time.sleep(1)  # until the others have heard of its memory
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


def steps(job: Job, fault: str, victim: int) -> None:
    for step in range(1000):
        job.progress.start_activity("step", step)
        if step == 5 and job.ranks.rank == victim:
            something_happens(fault)
        job.all_reduce_sum(torch.ones(3))
        time.sleep(0.04 if fault == "no more files" else 0.01)  # longer than a rank may be silent


def main(fault: str, victim: str, folder: str) -> None:
    job = start_job(read_ranks(os.environ), distributed=True, timeout=timedelta(minutes=10))
    job.start_watchdog(DistributedConfig(timeout_seconds=600, hang_seconds=HANG_SECONDS))
    assert job.watchdog is not None
    job.watchdog.set_run_dir(Path(folder))
    try:
        steps(job, fault, int(victim))
        job.close()
    except RuntimeError as error:
        job.watchdog.exit_if_peer_failed(error)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
