"""The job's process group: started, used for small agreements between ranks, and closed.

One process without DeepSpeed needs none; `Job` then answers for a world of one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipeline.config.schema import DistributedConfig
from pipeline.config.split import Device
from pipeline.distributed.accelerator import check_own_devices, device_id, find_device
from pipeline.distributed.cores import count_cores, settle_cores
from pipeline.distributed.diagnosis import RankProcess
from pipeline.distributed.progress import Progress
from pipeline.distributed.ranks import Ranks, complete_environment, cpu_threads
from pipeline.distributed.rendezvous import rendezvous
from pipeline.distributed.watchdog import Failure, Watchdog, claim
from pipeline.errors import PipelineError

T = TypeVar("T")


@dataclass
class Job:
    """This rank, its device, and the group it belongs to."""

    ranks: Ranks
    device: torch.device
    store: distributed_c10d.Store | None = field(default=None, repr=False)
    everyone: list[RankProcess] = field(default_factory=list, repr=False)
    """All ranks, in order; empty without a group."""
    progress: Progress = field(default_factory=Progress, repr=False)
    """Where the training thread says what it does."""
    watchdog: Watchdog | None = field(default=None, repr=False)

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

    def on_main(self, function: Callable[[], T]) -> T:
        """What rank 0 gets of it, on every rank; a PipelineError that it raises, too. Collective."""
        answer: Any = None
        if self.ranks.is_main_process:
            try:
                answer = function()
            except PipelineError as error:
                answer = error
        answer = self.broadcast_object(answer)
        if isinstance(answer, PipelineError):
            raise answer
        found: T = answer
        return found

    def gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. Collective."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, value)
        return values

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over all ranks, in place. Collective; no host sync on CUDA."""
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As all_reduce_sum, beside what comes next: what it gives waits for the sum. Collective."""
        if not self.is_distributed:
            return lambda: tensor
        work = dist.all_reduce(tensor, async_op=True)

        def arrived() -> torch.Tensor:
            work.wait()
            return tensor

        return arrived

    def barrier(self) -> None:
        """Waits for every rank. Collective."""
        if self.is_distributed:
            dist.barrier()

    def watch(self, limits: DistributedConfig) -> None:
        """Has a watchdog end the job where it hangs or loses a rank. Not collective."""
        if self.store is not None and self.ranks.world_size > 1:
            self.watchdog = Watchdog(self.store, self.everyone, self.ranks.rank, self.progress, limits)
            self.watchdog.start()

    def claim_failure(self, code: int) -> bool:
        """True on the first rank that fails: the one whose error is shown. The others end because of it.

        Args:
            code: What the job ends with.
        """
        if self.store is None:
            return True
        own = Failure(self.ranks.rank, "raised", code)
        try:
            return claim(self.store, own) == own
        except RuntimeError:  # the store died with its rank, which therefore failed first
            return False

    def wait_for_leavers(self, seconds: float = 3.0) -> None:
        """After a failure: leaves the others, whose store dies with rank 0, the time to know of it."""
        if self.store is None or self.watchdog is None or not self.ranks.is_main_process:
            return
        began = time.monotonic()
        with suppress(RuntimeError):  # the launcher's own store is gone with it
            while time.monotonic() - began < seconds:
                if self.store.add("pipeline/left", 0) >= self.ranks.world_size - 1:
                    return
                time.sleep(0.05)

    def close(self) -> None:
        """Leaves the group. Without this a finished run was seen to abort at exit."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = None


def start_job(
    ranks: Ranks, *, distributed: bool, timeout: timedelta = timedelta(minutes=30), bound: bool | None = False
) -> Job:
    """Binds this process to its device and joins the process group.

    Args:
        timeout: Of every process group: this one, and those that others make later.
        bound: To its share of the cores that it may use; None: where it shares them with other ranks and
            nobody told OpenMP where to compute.

    Raises:
        LaunchError: more ranks on this machine than GPUs, or two with one; not all ranks came.
    """
    device = find_device(ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not distributed:
        torch.set_num_threads(cpu_threads(count_cores(), 1, os.environ))
        return Job(ranks, device)
    complete_environment(ranks)
    # The backend is named per device so that CPU tensors can be reduced beside CUDA ones.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, everyone = rendezvous(ranks, timeout)
    if device.type == "cuda":
        check_own_devices(store, everyone, ranks.rank, device_id(device))
    settle_cores(store, everyone, ranks.rank, bound)
    # Groups that are made without a timeout (DeepSpeed's, DDP's, a device mesh's) take torch's defaults.
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    # The flight recorder knows what a rank waits in. It costs some microseconds a collective; on a CPU more
    # of them the more it keeps. To be switched on before the group is made.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000" if device.type == "cuda" else "256")
    dist.init_process_group(
        backend,
        store=distributed_c10d.PrefixStore("default_pg", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return Job(ranks, device, store, everyone)


def allow_tf32(allowed: bool) -> None:
    """Whether a GPU may multiply fp32 matrices, and convolve, in TF32. No effect on a CPU."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def describe_device(device: torch.device) -> Device:
    """Which formats shorter than fp32 this device has instructions for."""
    if device.type == "cuda":
        # AMD's MI200 is 9.0 and has none, MI300 is 9.4.
        least = (9, 4) if torch.version.hip else (8, 9)
        return Device(
            "cuda",
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            fp16=True,
            fp8=torch.cuda.get_device_capability(device) >= least,
        )
    return Device.cpu()
