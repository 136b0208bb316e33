"""The job's process group: started, used for small agreements between ranks, and closed. Assigns cores.

One process without DeepSpeed needs none; `Job` then answers for a world of one.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, distributed_c10d

from pipeline.config.schema import DistributedConfig
from pipeline.config.shipped import LAUNCH
from pipeline.config.split import Device
from pipeline.distributed.accelerator import check_own_devices, device_id, find_device
from pipeline.distributed.diagnosis import RankProcess, format_ranks
from pipeline.distributed.machine import machine_id
from pipeline.distributed.progress import Progress
from pipeline.distributed.ranks import Ranks, choose_num_threads, complete_launcher_environment
from pipeline.distributed.waiting import DOCTOR_COMMAND, TimedWait, wait_for_port
from pipeline.distributed.watchdog import (
    FAILURE_KEY,
    NO_FAILURE,
    Failure,
    Watchdog,
    claim_failure,
    read_by_rank,
)
from pipeline.errors import LaunchError, PipelineError


def rendezvous(ranks: Ranks, timeout: timedelta) -> tuple[Store, list[RankProcess]]:
    """Meet all ranks where MASTER_ADDR and MASTER_PORT say. Returns the job's store, and all ranks in order.

    The store holds nothing of an earlier attempt of the job.

    Raises:
        LaunchError: Not every rank was there in time, or this one did not reach the master.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = f"rank {ranks.rank} on {platform.node()}"
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = ranks.is_main_process and not by_launcher
    connect = partial(
        TCPStore,
        port=port,
        world_size=ranks.world_size,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    try:
        store = connect("localhost", is_master=True) if serves else None
        # Before torch does: its own wait prints a stack for each attempt, or nothing.
        wait = TimedWait(timeout.total_seconds())
        wait_for_port(
            host, port, f"{own} does not reach the master", wait, print_progress=ranks.local_rank == 0
        )
        store = store or connect(host, is_master=False)
        # No number in the environment tells one attempt from the next: torchrun counts failures, each machine
        # its own, and not the changes of membership. So each process announces itself with a random token,
        # and rank 0 answers it with its own, the attempt's.
        token = secrets.token_hex(8)
        store.set(f"pipeline/arrived/{ranks.rank}", token)
        if ranks.is_main_process:
            _answer_arrivals(store, 1, attempt=token)
        own_store = PrefixStore(f"pipeline/{store.get(_answer_to(token)).decode()}", store)
        process = [platform.node(), os.getpid(), machine_id()]
        own_store.set(f"pipeline/process/{ranks.rank}", json.dumps(process))
        own_store.compare_set(FAILURE_KEY, "", NO_FAILURE)
        if ranks.is_main_process:
            _wait_for_all(store, own_store, ranks.world_size, token, TimedWait(timeout.total_seconds()))
        # Waits until each has registered.
        values = own_store.multi_get([f"pipeline/process/{rank}" for rank in range(ranks.world_size)])
        return own_store, [RankProcess(rank, *json.loads(value)) for rank, value in enumerate(values)]
    except DistError as error:
        what = "cannot serve as the master" if serves else "did not meet all ranks at the master"
        script = LAUNCH / "multi_gpu.sh"
        hint = f"; if another job has the port: --master_port, or {script}, which takes a free one"
        reason = str(error).partition(chr(10))[0] + hint * serves
        raise LaunchError(f"{own} {what}, {host}:{port}: {reason}") from None


def _wait_for_all(store: Store, own_store: Store, world_size: int, attempt: str, wait: TimedWait) -> None:
    while len(there := read_by_rank(own_store, "process", range(world_size))) < world_size:
        _answer_arrivals(store, world_size, attempt)
        hosts: dict[str, list[int]] = {}
        for rank, process in there.items():
            hosts.setdefault(json.loads(process)[0], []).append(rank)
        here = ", ".join(f"{format_ranks(ranks)} on {host}" for host, ranks in hosts.items())
        missing = [rank for rank in range(world_size) if rank not in there]
        verb = "are" if len(missing) > 1 else "is"
        wait(
            f"{format_ranks(missing)} of {world_size} {verb} not there ({here}: there)",
            f"did each start, and does it reach this machine? {DOCTOR_COMMAND}",
        )


def _answer_arrivals(store: Store, world_size: int, attempt: str) -> None:
    """Tell the ranks that have arrived which attempt of the job they belong to. Rank 0 calls it repeatedly.

    In a store that outlives attempts (torchrun's) some may be of an earlier one: that answer is never read.
    """
    for token in read_by_rank(store, "arrived", range(world_size)).values():
        store.compare_set(_answer_to(token.decode()), "", attempt)


def _answer_to(token: str) -> str:
    return f"pipeline/answer/{token}"


NUMA_NODES_FOLDER = Path("/sys/devices/system/node")
PCI_DEVICES_FOLDER = Path("/sys/bus/pci/devices")
CPUS_FOLDER = Path("/sys/devices/system/cpu")
# OpenMP's own words for where its threads compute.
OPENMP_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def allowed_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may run on, each hyper-thread by itself."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def count_cores() -> int:
    """Return how many cores this process may use."""
    leaders = map_cpus_to_cores()
    return len({leaders.get(cpu, cpu) for cpu in allowed_cpus()})


def assign_cores(store: Store, everyone: Sequence[RankProcess], rank: int, bound: bool | None) -> None:
    """Give this rank its threads, and its cores. Collective.

    Slurm and mpirun give each task its own cores, so the ranks first exchange which cores each may use.

    Args:
        store: The job's store.
        everyone: All ranks, in order.
        rank: This rank.
        bound: Whether to bind the rank to its part of the cores. `None` binds only if ranks share cores and
            no OpenMP variable places the threads.
    """
    beside = find_core_sharers(store, everyone, rank)
    torch.set_num_threads(choose_num_threads(count_cores(), len(beside), os.environ))
    if bound is None:
        bound = len(beside) > 1 and not any(os.environ.get(name) for name in OPENMP_BINDING_VARIABLES)
    if bound:
        bind_cores(beside.index(rank), len(beside))


def find_core_sharers(store: Store, everyone: Sequence[RankProcess], rank: int) -> list[int]:
    """Return the ranks that may run on the same cores as this one, itself among them. Collective.

    Slurm and mpirun give each task cores of its own: those are not to be divided again.
    """
    store.set(f"pipeline/cpus/{rank}", json.dumps(sorted(allowed_cpus())))
    here = [each.rank for each in everyone if each.machine == everyone[rank].machine]
    allowed = dict(zip(here, store.multi_get([f"pipeline/cpus/{other}" for other in here]), strict=True))
    return [other for other in here if allowed[other] == allowed[rank]]


def bind_cores(index: int, count: int) -> None:
    """Bind every thread of this process to part `index` of `count`. Does nothing with fewer cores than parts.

    Args:
        index: Also the index of this process's GPU, if there is one for each part.
        count: Number of parts, one for each rank that shares the cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    nodes = {number: cores & allowed for number, cores in read_numa_nodes().items() if cores & allowed}
    mine = choose_cores(
        allowed, nodes, near=find_gpu_numa_nodes(count), index=index, count=count, leaders=map_cpus_to_cores()
    )
    if not mine:
        return
    for task in Path("/proc/self/task").iterdir():  # threads that are made later inherit it
        with suppress(OSError):  # ended meanwhile
            os.sched_setaffinity(int(task.name), mine)


def choose_cores(
    allowed: set[int],
    nodes: Mapping[int, set[int]],
    near: Sequence[int | None],
    index: int,
    count: int,
    leaders: Mapping[int, int],
) -> set[int]:
    """Return the cores of one rank; empty if there are fewer cores than ranks.

    Ranks whose GPUs belong to one NUMA node divide that node's cores. If the node of a GPU is not known, all
    ranks divide all cores, node by node.

    Args:
        allowed: Cores that this process may run on.
        nodes: NUMA node -> its cores.
        near: Node of each rank's GPU; None if there is no GPU, or it is not known.
        index: This rank's position among the ranks that share the cores.
        count: Number of these ranks.
        leaders: See map_cpus_to_cores.
    """
    node_of = {cpu: number for number, cpus in nodes.items() for cpu in cpus}
    if count == len(near) and all(node in nodes for node in near):
        neighbours = [rank for rank in range(count) if near[rank] == near[index]]
        allowed = {cpu for cpu in allowed if node_of.get(cpu) == near[index]}
        index, count = neighbours.index(index), len(neighbours)
    # Whole cores: two ranks on the threads of one would slow each other down.
    cores: dict[int, set[int]] = {}
    for cpu in sorted(allowed, key=lambda cpu: (node_of.get(cpu, len(nodes)), cpu)):
        cores.setdefault(leaders.get(cpu, cpu), set()).add(cpu)
    whole = list(cores.values())
    return set().union(*whole[index * len(whole) // count : (index + 1) * len(whole) // count])


def map_cpus_to_cores() -> dict[int, int]:
    """Return the number of each CPU -> the lowest one of its core; empty if the system does not say."""
    return {
        int(path.parts[-3].removeprefix("cpu")): min(parse_cpu_list(path.read_text()))
        for path in CPUS_FOLDER.glob("cpu[0-9]*/topology/thread_siblings_list")
    }


def read_numa_nodes() -> dict[int, set[int]]:
    """Return NUMA node -> its cores; empty if the system does not say."""
    return {
        int(path.parent.name.removeprefix("node")): parse_cpu_list(path.read_text())
        for path in NUMA_NODES_FOLDER.glob("node[0-9]*/cpulist")
    }


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers of a list: {0, 1, 2, 3, 8} of `0-3,8`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def find_gpu_numa_nodes(count: int) -> list[int | None]:
    """Return the NUMA node of each of this machine's first GPUs; None if the system does not say."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < count:
        return []
    found: list[int | None] = []
    for index in range(count):
        p: Any = torch.cuda.get_device_properties(index)
        address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        try:
            node = int((PCI_DEVICES_FOLDER / address / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        found.append(node if node >= 0 else None)
    return found


T = TypeVar("T")


@dataclass
class Job:
    """This rank, its device, and the group it belongs to."""

    ranks: Ranks
    device: torch.device
    store: distributed_c10d.Store | None = field(default=None, repr=False)
    rank_processes: list[RankProcess] = field(default_factory=list, repr=False)
    """All ranks, in order; empty without a group."""
    progress: Progress = field(default_factory=Progress, repr=False)
    """Record in which the training thread notes what it does."""
    watchdog: Watchdog | None = field(default=None, repr=False)

    @property
    def is_distributed(self) -> bool:
        """Return whether the job has a process group."""
        return self.store is not None

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective."""
        if not self.is_distributed:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def run_on_main_rank(self, function: Callable[[], T]) -> T:
        """Call it on rank 0; return its result, or raise its PipelineError, on every rank. Collective."""
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
        """Return every rank's value on every rank. Collective."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, value)
        return values

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, element by element and in place. Collective; no host sync on CUDA."""
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin all_reduce_sum and return what waits for the sum. Collective."""
        if not self.is_distributed:
            return lambda: tensor
        work = dist.all_reduce(tensor, async_op=True)

        def arrived() -> torch.Tensor:
            work.wait()
            return tensor

        return arrived

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self.is_distributed:
            dist.barrier()

    def start_watchdog(self, limits: DistributedConfig) -> None:
        """Start the watchdog, which ends a job that hangs or loses a rank. Not collective."""
        if self.store is not None and self.ranks.world_size > 1:
            self.watchdog = Watchdog(self.store, self.rank_processes, self.ranks.rank, self.progress, limits)
            self.watchdog.start()

    def claim_failure(self, code: int) -> bool:
        """Return True on the first rank that fails: its error is shown, and the others end because of it.

        Args:
            code: Exit code of the job.
        """
        if self.store is None:
            return True
        own = Failure(self.ranks.rank, "raised", code)
        try:
            return claim_failure(self.store, own) == own
        except RuntimeError:  # the store died with its rank, which therefore failed first
            return False

    def wait_for_other_ranks_to_exit(self, seconds: float = 3.0) -> None:
        """Give the other ranks the time to know of a failure, before the store ends with rank 0."""
        if self.store is None or self.watchdog is None or not self.ranks.is_main_process:
            return
        began = time.monotonic()
        with suppress(RuntimeError):  # the launcher's own store is gone with it
            while time.monotonic() - began < seconds:
                if self.store.add("pipeline/left", 0) >= self.ranks.world_size - 1:
                    return
                time.sleep(0.05)

    def close(self) -> None:
        """Stop the watchdog and destroy the process group; without this a finished run can abort at exit."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = None


def start_job(
    ranks: Ranks,
    *,
    distributed: bool,
    timeout: timedelta = timedelta(minutes=30),
    bind_to_cores: bool | None = False,
) -> Job:
    """Bind this process to its device and join the process group.

    Args:
        ranks: This process's place in the job.
        distributed: Whether to make a process group.
        timeout: Timeout of every process group: this one, and those that others make later.
        bind_to_cores: See assign_cores.

    Raises:
        LaunchError: There are more ranks on this machine than GPUs, or two with one; or not all ranks came.
    """
    device = find_device(ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not distributed:
        torch.set_num_threads(choose_num_threads(count_cores(), 1, os.environ))
        return Job(ranks, device)
    complete_launcher_environment(ranks)
    # The backend is named per device so that CPU tensors can be reduced beside CUDA ones.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, everyone = rendezvous(ranks, timeout)
    if device.type == "cuda":
        check_own_devices(store, everyone, ranks.rank, device_id(device))
    assign_cores(store, everyone, ranks.rank, bind_to_cores)
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
    """Let a GPU multiply fp32 matrices, and convolve, in TF32, or forbid it. No effect on a CPU."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def describe_device(device: torch.device) -> Device:
    """Return the formats shorter than fp32 that this device has instructions for."""
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
