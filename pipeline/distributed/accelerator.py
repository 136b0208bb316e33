"""Chooses the device of this process, also for DeepSpeed, without creating a CUDA context.

As in torch, `cuda` means an NVIDIA GPU (also under WSL2) or an AMD GPU. A CUDA build of torch computes on the
CPU if there is no GPU, or if CUDA_VISIBLE_DEVICES="" hides all of them. DeepSpeed assumes a GPU for every
CUDA build, so this module asks torch and sets DS_ACCELERATOR.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch.distributed.distributed_c10d import Store

from pipeline.config.command_lines import format_pipeline_command
from pipeline.distributed.diagnosis import RankProcess, format_ranks
from pipeline.distributed.machine import TorchBuild, explain_idle_gpu
from pipeline.distributed.ranks import Ranks, check_accelerator_variable
from pipeline.errors import LaunchError

log = logging.getLogger(__name__)


def choose_accelerator(*, warn: bool = False) -> str:
    """Return `cuda` or `cpu`: DS_ACCELERATOR if it is set, else `cuda` if torch can use a GPU.

    Sets DS_ACCELERATOR to the result. Call it before DeepSpeed is imported, because DeepSpeed reads the
    variable. Also sets PYTORCH_NVML_BASED_CUDA_CHECK: torch then looks for GPUs with the driver's management
    library (NVML) instead of CUDA, so the process may still fork.

    Args:
        warn: Whether to log a warning if the machine has a GPU that torch cannot use.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if "DS_ACCELERATOR" not in os.environ:
        has_gpu = torch.cuda.is_available()
        if warn and not has_gpu:
            build = TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)
            reason = explain_idle_gpu(build, os.environ)
            if reason is not None:
                log.warning("computing on the CPU although this machine has a GPU: %s", reason)
        os.environ["DS_ACCELERATOR"] = "cuda" if has_gpu else "cpu"
    return os.environ["DS_ACCELERATOR"]


def configure_allocator(environment: MutableMapping[str, str]) -> None:
    """Make the CUDA allocator use expandable segments, unless the user has configured the allocator.

    Allocations of changing sizes do not fragment expandable segments. Call it before the first allocation on
    the device, because torch reads the variable then.

    Args:
        environment: Environment of the process. PYTORCH_ALLOC_CONF is set in it.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def find_device(ranks: Ranks) -> torch.device:
    """Return this rank's device, and prepare the environment for it.

    Sets DS_ACCELERATOR and, for a GPU, the options of the CUDA allocator.

    Raises:
        LaunchError: DS_ACCELERATOR is neither cpu nor cuda, no GPU is visible although it is cuda, or this
            machine has more ranks than visible GPUs.
    """
    check_accelerator_variable(os.environ)
    if choose_accelerator(warn=ranks.is_main_process) == "cpu":
        return torch.device("cpu")
    configure_allocator(os.environ)
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", device_index(ranks, num_visible, os.environ))


def device_index(ranks: Ranks, num_visible: int, environment: Mapping[str, str]) -> int:
    """Return the index of the rank's GPU among the visible ones: its local rank, or 0 if it sees only one.

    A scheduler may let each task see only its own GPU (srun --gpus-per-task=1). `check_own_devices` finds
    ranks that see the same GPU.

    Args:
        ranks: Rank and world size of this process.
        num_visible: Number of GPUs that this process sees.
        environment: Environment of the process, for the error message.

    Raises:
        LaunchError: No GPU is visible, or there are several but fewer than ranks on this machine.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    variable = "CUDA_VISIBLE_DEVICES is unset" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
    if num_visible == 0:
        doctor = format_pipeline_command("doctor")
        raise LaunchError(
            f"DS_ACCELERATOR=cuda, but torch {torch.__version__} sees no GPU ({variable}); unset "
            f"DS_ACCELERATOR to compute on the CPU, or find the cause with {doctor}"
        )
    if num_visible > 1 and ranks.local_rank >= num_visible:
        raise LaunchError(
            f"local rank {ranks.local_rank} has no GPU: {ranks.local_world_size} ranks were started on this "
            f"machine and {num_visible} GPUs are visible ({variable}); start as many ranks as GPUs"
        )
    return ranks.local_rank if num_visible > 1 else 0


def device_id(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in all processes of its machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_own_devices(
    store: Store, rank_processes: Sequence[RankProcess], rank: int, own_device: str
) -> None:
    """Check that no two ranks of a machine share a GPU. Collective: waits until all ranks have sent theirs.

    Args:
        store: Store of the job, through which the ranks exchange their devices.
        rank_processes: Processes of all ranks, in the order of the ranks.
        rank: Rank of this process.
        own_device: Device of this rank, from `device_id`.

    Raises:
        LaunchError: Ranks of one machine have the same device. Every rank raises the same error.
    """
    keys = [f"device/{process.rank}" for process in rank_processes]
    store.set(keys[rank], own_device)
    users: dict[tuple[str, str], list[RankProcess]] = {}
    for process, value in zip(rank_processes, store.multi_get(keys), strict=True):
        users.setdefault((process.machine, value.decode()), []).append(process)
    for (_, device), sharers in users.items():
        if len(sharers) > 1:
            ranks = format_ranks([process.rank for process in sharers])
            raise LaunchError(
                f"{ranks} on {sharers[0].host} share one GPU ({device}), but each rank needs its own; start "
                "as many ranks as GPUs, or use srun --gpus-per-task=1"
            )
