"""Chooses the device of this process, for DeepSpeed too, without creating a CUDA context.

`cuda` covers NVIDIA GPUs, also under WSL2, and AMD GPUs, as in torch. A CUDA build of torch computes on the
CPU if there is no GPU, or if CUDA_VISIBLE_DEVICES="" hides all of them. DeepSpeed would take any CUDA build
for a GPU, so this module asks torch and sets DS_ACCELERATOR.
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


def choose_accelerator(*, tells: bool = False) -> str:
    """Return `cuda` or `cpu`: DS_ACCELERATOR if the user has set it, else what torch sees. Sets the variable.

    Call it before DeepSpeed is imported, which goes by the variable. torch is made to ask the driver's
    management library, so that a process may still fork.

    Args:
        tells: Whether to warn of a GPU that torch leaves idle.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if "DS_ACCELERATOR" not in os.environ:
        sees_one = torch.cuda.is_available()
        built = TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)
        if tells and not sees_one and (reason := explain_idle_gpu(built, os.environ)) is not None:
            log.warning("computing on the CPU, beside a GPU: %s", reason)
        os.environ["DS_ACCELERATOR"] = "cuda" if sees_one else "cpu"
    return os.environ["DS_ACCELERATOR"]


def choose_allocation(environment: MutableMapping[str, str]) -> None:
    """Make the CUDA allocator use expandable segments, unless the user has configured it.

    Blocks of changing sizes do not fragment expandable segments.

    Call it before the first allocation on the device, when torch reads the variable.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def find_device(ranks: Ranks) -> torch.device:
    """Return this rank's device.

    Raises:
        LaunchError: See check_accelerator_variable and device_index.
    """
    check_accelerator_variable(os.environ)
    if choose_accelerator(tells=ranks.is_main_process) == "cpu":
        return torch.device("cpu")
    choose_allocation(os.environ)
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", device_index(ranks, visible, os.environ))


def device_index(ranks: Ranks, visible: int, environment: Mapping[str, str]) -> int:
    """Return the rank's device among those it sees: that of its local rank, or the only one.

    A scheduler may show each task a GPU of its own (srun --gpus-per-task=1): see check_own_devices.

    Raises:
        LaunchError: There is none, or there are fewer than ranks on this machine.
    """
    shown = f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES', 'unset')}"
    if visible == 0:
        raise LaunchError(
            f"DS_ACCELERATOR=cuda, and torch {torch.__version__} sees no GPU ({shown}); unset it, or see "
            f"what is said of driver and torch: {format_pipeline_command('doctor')}"
        )
    if visible > 1 and ranks.local_rank >= visible:
        raise LaunchError(
            f"local rank {ranks.local_rank} has no GPU: {ranks.local_world_size} ranks were started on this "
            f"machine and {visible} GPUs are visible ({shown}); start as many ranks as GPUs"
        )
    return ranks.local_rank if visible > 1 else 0


def device_id(device: torch.device) -> str:
    """Return the name of a GPU that all processes of its machine agree on."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_own_devices(store: Store, everyone: Sequence[RankProcess], rank: int, own: str) -> None:
    """Check that no two ranks of a machine share a GPU. Collective: waits until all ranks have sent theirs.

    Args:
        store: The job's store, through which the ranks exchange their devices.
        everyone: All ranks, in order.
        rank: This rank.
        own: This rank's device, by `device_id`.

    Raises:
        LaunchError: Ranks of one machine have the same device; raised on every rank alike.
    """
    keys = [f"device/{each.rank}" for each in everyone]
    store.set(keys[rank], own)
    holders: dict[tuple[str, str], list[RankProcess]] = {}
    for each, value in zip(everyone, store.multi_get(keys), strict=True):
        holders.setdefault((each.machine, value.decode()), []).append(each)
    for (_, device), sharing in holders.items():
        if len(sharing) > 1:
            ranks = format_ranks([each.rank for each in sharing])
            raise LaunchError(
                f"{ranks} on {sharing[0].host} have one GPU between them ({device}); give each its own: as "
                "many ranks as GPUs, or srun --gpus-per-task=1"
            )
