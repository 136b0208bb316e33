"""Who this process is, read from the launcher's environment. Imports no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import LaunchError


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0


def read_ranks(environment: Mapping[str, str]) -> Ranks:
    """Reads RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; none of them: one process alone.

    Raises:
        LaunchError: some are set and others are missing, or a value is not a number.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = {name: environment[name] for name in names if name in environment}
    if not given:
        return Ranks(0, 0, 1, 1)
    missing = [name for name in names if name not in given]
    if missing:
        raise LaunchError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}; "
            "start with deepspeed or torchrun, or unset them for one process"
        )
    try:
        rank, local_rank, world_size = (int(given[name]) for name in names)
        # LOCAL_SIZE is the deepspeed launcher's name for it.
        local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size
        local_world_size = int(local)
    except ValueError:
        raise LaunchError(f"the environment's {given} are not all whole numbers") from None
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} is outside a job of WORLD_SIZE={world_size}")
    return Ranks(rank, local_rank, world_size, local_world_size)


def complete_environment(ranks: Ranks) -> None:
    """Sets what torch and DeepSpeed look for when there was no launcher, so that neither asks mpi4py."""
    address = {"MASTER_ADDR": "127.0.0.1"}
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address["MASTER_PORT"] = str(probe.getsockname()[1])
    place = {
        "RANK": ranks.rank,
        "LOCAL_RANK": ranks.local_rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
        # Without it DeepSpeed on a CPU starts a numactl process each time it counts devices: at ZeRO-3
        # fifty times a step.
        "LOCAL_SIZE": ranks.local_world_size,
    }
    for name, value in (address | place).items():
        os.environ.setdefault(name, str(value))


def cpu_threads(ranks: Ranks, environment: Mapping[str, str]) -> int:
    """Threads for this rank: OMP_NUM_THREADS where the user set it, else cores / ranks on this machine.

    Two ranks with every core each run at half the speed of one. torchrun sets OMP_NUM_THREADS=1 by itself;
    that is not the user's word.
    """
    stated = environment.get("OMP_NUM_THREADS", "")
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment and stated == "1"
    if stated.isdigit() and int(stated) > 0 and not by_torchrun:
        return int(stated)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks.local_world_size)
