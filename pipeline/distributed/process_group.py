"""The job's process group: started, used for small agreements between ranks, and closed.

One process without DeepSpeed needs none; `Job` then answers for a world of one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from pipeline.config.split import Device
from pipeline.distributed.ranks import Ranks, complete_environment, cpu_threads
from pipeline.errors import LaunchError


@dataclass
class Job:
    """This rank, its device, and the group it belongs to."""

    ranks: Ranks
    device: torch.device
    store: distributed_c10d.Store | None = field(default=None, repr=False)

    @property
    def is_distributed(self) -> bool:
        return self.store is not None

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank. Collective."""
        if not self.is_distributed:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over all ranks, in place. Collective; no host sync on CUDA."""
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Waits for every rank. Collective."""
        if self.is_distributed:
            dist.barrier()

    def claim_failure(self) -> bool:
        """True on the first rank that fails: the one whose error is shown. The others end because of it."""
        if self.store is None:
            return True
        try:
            return self.store.add("pipeline/failures", 1) == 1
        except RuntimeError:  # the store died with its rank, which therefore failed first
            return False

    def close(self) -> None:
        """Leaves the group. Without this a finished run was seen to abort at exit."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = None


def start_job(ranks: Ranks, *, distributed: bool, timeout: timedelta = timedelta(minutes=30)) -> Job:
    """Binds this process to its device and joins the process group.

    Raises:
        LaunchError: more ranks on this machine than visible GPUs.
    """
    torch.set_num_threads(cpu_threads(ranks, os.environ))
    device = _bind_device(ranks)
    if not distributed:
        return Job(ranks, device)
    complete_environment(ranks)
    # The backend is named per device so that CPU tensors can be reduced beside CUDA ones.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=distributed_c10d.PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return Job(ranks, device, store)


def _bind_device(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if ranks.local_rank >= visible:
        raise LaunchError(
            f"local rank {ranks.local_rank} has no GPU: {ranks.local_world_size} ranks were started on this "
            f"machine and {visible} GPUs are visible (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); start as many ranks as GPUs"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def allow_tf32(allowed: bool) -> None:
    """Whether a GPU may multiply fp32 matrices, and convolve, in TF32. No effect on a CPU."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def describe_device(device: torch.device) -> Device:
    """Which half precisions this device has instructions for."""
    if device.type == "cuda":
        return Device("cuda", bf16=torch.cuda.is_bf16_supported(including_emulation=False), fp16=True)
    return Device.cpu()
