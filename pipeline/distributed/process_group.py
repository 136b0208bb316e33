"""Creates and closes the job's process group, lets ranks agree on small values, and assigns CPU cores.

One process without DeepSpeed needs no process group. `Job` then behaves as a job of one rank.
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
    """Wait for all ranks at MASTER_ADDR:MASTER_PORT; return the job's store and the process of each rank.

    The processes are in the order of the ranks. The store contains nothing from earlier attempts of the job.

    Raises:
        LaunchError: Not every rank joined in time, or this rank did not reach the master.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    own_name = f"rank {ranks.rank} on {platform.node()}"
    is_served_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = ranks.is_main_process and not is_served_by_launcher
    connect = partial(
        TCPStore,
        port=port,
        world_size=ranks.world_size,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    try:
        store = connect("localhost", is_master=True) if is_server else None
        # Wait for the port before torch does: torch prints a stack trace for each failed attempt, or nothing.
        wait = TimedWait(timeout.total_seconds())
        wait_for_port(
            host, port, f"{own_name} does not reach the master", wait, print_progress=ranks.local_rank == 0
        )
        store = store or connect(host, is_master=False)
        # No environment variable identifies the attempt: torchrun counts failures on each machine separately,
        # and does not count changes of membership. So each process announces itself with a random token, and
        # rank 0 answers each token with its own, which identifies the attempt.
        token = secrets.token_hex(8)
        store.set(f"pipeline/arrived/{ranks.rank}", token)
        if ranks.is_main_process:
            _answer_arrivals(store, 1, attempt=token)
        attempt = store.get(_format_answer_key(token)).decode()
        job_store = PrefixStore(f"pipeline/{attempt}", store)
        own_process = [platform.node(), os.getpid(), machine_id()]
        job_store.set(f"pipeline/process/{ranks.rank}", json.dumps(own_process))
        job_store.compare_set(FAILURE_KEY, "", NO_FAILURE)
        if ranks.is_main_process:
            _wait_for_all(store, job_store, ranks.world_size, token, TimedWait(timeout.total_seconds()))
        # `multi_get` waits until every rank has registered.
        values = job_store.multi_get([f"pipeline/process/{rank}" for rank in range(ranks.world_size)])
        return job_store, [RankProcess(rank, *json.loads(value)) for rank, value in enumerate(values)]
    except DistError as error:
        reason = str(error).partition("\n")[0]
        if is_server:
            problem = "cannot serve as the master"
            script = LAUNCH / "multi_gpu.sh"
            advice = f"if another job uses the port, give a free one with --master_port, or use {script}"
        else:
            problem = "did not complete the rendezvous at the master"
            advice = "see the output of rank 0 and of the launcher"
        raise LaunchError(f"{own_name} {problem}, {host}:{port}: {reason}; {advice}") from None


def _wait_for_all(store: Store, job_store: Store, world_size: int, attempt: str, wait: TimedWait) -> None:
    """Wait until all ranks have registered, and print which are missing. Rank 0 calls it.

    Args:
        store: Store that all attempts of the job may share. Ranks announce themselves in it.
        job_store: Store of this attempt. Ranks register in it.
        world_size: Number of ranks to wait for.
        attempt: Token that identifies this attempt.
        wait: Limits the wait and prints progress.

    Raises:
        LaunchError: Ranks are missing at the limit.
    """
    while True:
        joined = read_by_rank(job_store, "process", range(world_size))
        if len(joined) >= world_size:
            return
        _answer_arrivals(store, world_size, attempt)
        ranks_by_host: dict[str, list[int]] = {}
        for rank, process in joined.items():
            ranks_by_host.setdefault(json.loads(process)[0], []).append(rank)
        present = ", ".join(f"{format_ranks(ranks)} on {host}" for host, ranks in ranks_by_host.items())
        missing = [rank for rank in range(world_size) if rank not in joined]
        verb = "have" if len(missing) > 1 else "has"
        wait(
            f"{format_ranks(missing)} of {world_size} {verb} not joined (joined: {present})",
            "check that each missing rank was started and reaches this machine, for example with "
            f"{DOCTOR_COMMAND}",
        )


def _answer_arrivals(store: Store, world_size: int, attempt: str) -> None:
    """Send the token of this attempt to each rank that has announced itself. Rank 0 calls this repeatedly.

    A store of torchrun outlives attempts, so some ranks may have announced themselves in an earlier attempt.
    Nothing reads the answers to these.
    """
    for token in read_by_rank(store, "arrived", range(world_size)).values():
        store.compare_set(_format_answer_key(token.decode()), "", attempt)


def _format_answer_key(token: str) -> str:
    """Return the store's key for the answer to a rank's token."""
    return f"pipeline/answer/{token}"


NUMA_NODES_FOLDER = Path("/sys/devices/system/node")
PCI_DEVICES_FOLDER = Path("/sys/bus/pci/devices")
CPUS_FOLDER = Path("/sys/devices/system/cpu")
OPENMP_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables with which a user chooses the CPUs of OpenMP's threads."""


def allowed_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may run on. Each hyper-thread has its own number."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def count_cores() -> int:
    """Return the number of physical cores that this process may use."""
    cpu_to_core = map_cpus_to_cores()
    return len({cpu_to_core.get(cpu, cpu) for cpu in allowed_cpus()})


def assign_cores(
    store: Store, rank_processes: Sequence[RankProcess], rank: int, bind_to_cores: bool | None
) -> None:
    """Set this rank's number of CPU threads, and bind it to its share of the cores. Collective.

    Slurm and mpirun may give each task its own cores. So the ranks first exchange which cores each may use.

    Args:
        store: Store of the job.
        rank_processes: Processes of all ranks, in the order of the ranks.
        rank: Rank of this process.
        bind_to_cores: Whether to bind the rank to its share of the cores. `None` binds only if ranks share
            cores and no OpenMP variable binds the threads.
    """
    sharers = find_core_sharers(store, rank_processes, rank)
    torch.set_num_threads(choose_num_threads(count_cores(), len(sharers), os.environ))
    if bind_to_cores is None:
        is_bound_by_user = any(os.environ.get(name) for name in OPENMP_BINDING_VARIABLES)
        bind_to_cores = len(sharers) > 1 and not is_bound_by_user
    if bind_to_cores:
        bind_cores(sharers.index(rank), len(sharers))


def find_core_sharers(store: Store, rank_processes: Sequence[RankProcess], rank: int) -> list[int]:
    """Return the ranks of this machine with the same allowed cores as this one, including it. Collective.

    If Slurm or mpirun gave this rank its own cores, the list has only this rank, and its cores are not
    divided.
    """
    store.set(f"pipeline/cpus/{rank}", json.dumps(sorted(allowed_cpus())))
    own_machine = rank_processes[rank].machine
    local_ranks = [process.rank for process in rank_processes if process.machine == own_machine]
    values = store.multi_get([f"pipeline/cpus/{other}" for other in local_ranks])
    cpus_by_rank = dict(zip(local_ranks, values, strict=True))
    return [other for other in local_ranks if cpus_by_rank[other] == cpus_by_rank[rank]]


def bind_cores(index: int, count: int) -> None:
    """Divide the allowed cores among the ranks that share them, and bind this process's threads to its part.

    If there are fewer cores than ranks, a rank without a core of its own is not bound.

    Args:
        index: Position of this rank among the ranks that share the cores, from 0. If this machine has as many
            GPUs as these ranks, this is also the index of the rank's GPU.
        count: Number of ranks that share the cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    nodes = {node: cpus & allowed for node, cpus in read_numa_nodes().items()}
    nodes = {node: cpus for node, cpus in nodes.items() if cpus}
    own_cpus = choose_cores(
        allowed,
        nodes,
        gpu_nodes=find_gpu_numa_nodes(count),
        index=index,
        count=count,
        cpu_to_core=map_cpus_to_cores(),
    )
    if not own_cpus:
        return
    for task in Path("/proc/self/task").iterdir():  # threads that start later inherit the binding
        with suppress(OSError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(task.name), own_cpus)


def choose_cores(
    allowed: set[int],
    nodes: Mapping[int, set[int]],
    gpu_nodes: Sequence[int | None],
    index: int,
    count: int,
    cpu_to_core: Mapping[int, int],
) -> set[int]:
    """Return the CPUs of one rank: all hyper-threads of its cores. Empty if no core is left for the rank.

    Ranks whose GPUs belong to the same NUMA node divide that node's cores. If the node of any GPU is unknown,
    all ranks divide all cores, node by node.

    Args:
        allowed: CPUs that this process may run on.
        nodes: NUMA node -> its CPUs.
        gpu_nodes: NUMA node of each rank's GPU. `None` if it is unknown; empty if not every rank has a GPU.
        index: Position of this rank among the ranks that share the cores.
        count: Number of these ranks.
        cpu_to_core: Result of `map_cpus_to_cores`.
    """
    node_of_cpu = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    if count == len(gpu_nodes) and all(node in nodes for node in gpu_nodes):
        own_node = gpu_nodes[index]
        neighbours = [other for other in range(count) if gpu_nodes[other] == own_node]
        allowed = {cpu for cpu in allowed if node_of_cpu.get(cpu) == own_node}
        index = neighbours.index(index)
        count = len(neighbours)
    # Cores are never split: two ranks on the hyper-threads of one core would slow each other down.
    cores: dict[int, set[int]] = {}
    for cpu in sorted(allowed, key=lambda cpu: (node_of_cpu.get(cpu, len(nodes)), cpu)):
        cores.setdefault(cpu_to_core.get(cpu, cpu), set()).add(cpu)
    all_cores = list(cores.values())
    start = index * len(all_cores) // count
    end = (index + 1) * len(all_cores) // count
    return set().union(*all_cores[start:end])


def map_cpus_to_cores() -> dict[int, int]:
    """Return CPU -> lowest CPU of the same core, which identifies the core. Empty if the system has no list.

    Hyper-threads of one core are CPUs with different numbers.
    """
    return {
        int(path.parts[-3].removeprefix("cpu")): min(parse_cpu_list(path.read_text()))
        for path in CPUS_FOLDER.glob("cpu[0-9]*/topology/thread_siblings_list")
    }


def read_numa_nodes() -> dict[int, set[int]]:
    """Return NUMA node -> its CPUs. Empty if the system has no list."""
    return {
        int(path.parent.name.removeprefix("node")): parse_cpu_list(path.read_text())
        for path in NUMA_NODES_FOLDER.glob("node[0-9]*/cpulist")
    }


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers in one of the kernel's CPU lists: {0, 1, 2, 3, 8} for `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def find_gpu_numa_nodes(count: int) -> list[int | None]:
    """Return the NUMA node of each of the first `count` GPUs that are visible; `None` for an unknown node.

    The list is empty if fewer GPUs are visible.
    """
    if not torch.cuda.is_available() or torch.cuda.device_count() < count:
        return []
    nodes: list[int | None] = []
    for index in range(count):
        properties: Any = torch.cuda.get_device_properties(index)
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        )
        try:
            node = int((PCI_DEVICES_FOLDER / address / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        nodes.append(node if node >= 0 else None)  # the kernel writes -1 for an unknown node
    return nodes


T = TypeVar("T")


@dataclass
class Job:
    """Holds this process's rank and device, and the process group that it belongs to.

    Methods marked "Collective" must be called by all ranks, in the same order.
    """

    ranks: Ranks
    device: torch.device
    store: distributed_c10d.Store | None = field(default=None, repr=False)
    """Store that all ranks share; `None` without a process group."""
    rank_processes: list[RankProcess] = field(default_factory=list, repr=False)
    """Processes of all ranks, in the order of the ranks; empty without a process group."""
    progress: Progress = field(default_factory=Progress, repr=False)
    """Record of what the training thread is doing. The watchdog reads it."""
    watchdog: Watchdog | None = field(default=None, repr=False)
    """Watchdog of this rank; `None` before `start_watchdog`, after `close`, and with one rank."""

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
        """Call `function` on rank 0, and return its result on every rank. Collective.

        Args:
            function: Runs on rank 0 only. Its result must be picklable.

        Raises:
            PipelineError: The function raised it. Every rank raises the same error. Any other exception of
                the function is raised on rank 0 alone, while the other ranks wait.
        """
        outcome: Any = None
        if self.ranks.is_main_process:
            try:
                outcome = function()
            except PipelineError as error:
                outcome = error
        outcome = self.broadcast_object(outcome)
        if isinstance(outcome, PipelineError):
            raise outcome
        result: T = outcome
        return result

    def gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank. Collective."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, value)
        return values

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks in place, and return it. Collective.

        The sum is element by element. On CUDA the host does not wait for it.
        """
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start `all_reduce_sum`, and return a function that waits for the sum and returns it. Collective.

        Do not use the tensor before this function has returned. On CUDA it makes the current stream wait, not
        the host.
        """
        if not self.is_distributed:
            return lambda: tensor
        work = dist.all_reduce(tensor, async_op=True)

        def wait_for_sum() -> torch.Tensor:
            work.wait()
            return tensor

        return wait_for_sum

    def barrier(self) -> None:
        """Wait until every rank has reached this call. Collective."""
        if self.is_distributed:
            dist.barrier()

    def start_watchdog(self, limits: DistributedConfig) -> None:
        """Start the watchdog, which ends the job if it hangs or loses a rank. Not collective.

        Does nothing for a job of one rank.

        Args:
            limits: Section `distributed` of the recipe, with the watchdog's time limits.
        """
        if self.store is not None and self.ranks.world_size > 1:
            self.watchdog = Watchdog(self.store, self.rank_processes, self.ranks.rank, self.progress, limits)
            self.watchdog.start()

    def claim_failure(self, code: int) -> bool:
        """Claim the job's failure for this rank, and return whether this rank is the first to fail.

        The first rank to fail prints its error. The other ranks end because of that failure.

        Args:
            code: Exit code of the job.
        """
        if self.store is None:
            return True
        own_failure = Failure(self.ranks.rank, "raised", code)
        try:
            return claim_failure(self.store, own_failure) == own_failure
        except RuntimeError:  # the store ended with the rank that serves it, which therefore failed first
            return False

    def wait_for_other_ranks_to_exit(self, seconds: float = 3.0) -> None:
        """Wait on rank 0 until the other ranks have learned of a failure, because the store ends with rank 0.

        Args:
            seconds: Limit of the wait.
        """
        if self.store is None or self.watchdog is None or not self.ranks.is_main_process:
            return
        began = time.monotonic()
        with suppress(RuntimeError):  # a store that the launcher serves ends with the launcher
            while time.monotonic() - began < seconds:
                if self.store.add("pipeline/left", 0) >= self.ranks.world_size - 1:
                    return
                time.sleep(0.05)

    def close(self) -> None:
        """Stop the watchdog and destroy the process group.

        If a process exits without this call, it can abort although its run has finished.
        """
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
    """Bind this process to its device, set its CPU threads, and join the process group.

    It is collective if `distributed`. Without a process group the process may use all allowed cores.

    Args:
        ranks: Rank and world size of this process.
        distributed: Whether to make a process group.
        timeout: Timeout of the rendezvous, of this process group, and of groups made later without a timeout.
        bind_to_cores: Whether to bind the rank to its share of the cores; `None` decides by itself (see
            `assign_cores`).

    Raises:
        LaunchError: The environment of the launcher is wrong, this machine has more ranks than GPUs, two
            ranks share a GPU, or some ranks did not join in time.
    """
    device = find_device(ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not distributed:
        torch.set_num_threads(choose_num_threads(count_cores(), 1, os.environ))
        return Job(ranks, device)
    complete_launcher_environment(ranks)
    # Name the backend of each device type, so that the group can reduce CPU tensors as well as CUDA ones.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank_processes = rendezvous(ranks, timeout)
    if device.type == "cuda":
        check_own_devices(store, rank_processes, ranks.rank, device_id(device))
    assign_cores(store, rank_processes, ranks.rank, bind_to_cores)
    # DeepSpeed, DDP and device meshes make groups without a timeout, and so with torch's default timeouts.
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    # The flight recorder tells the watchdog in which collective a rank waits. It costs some microseconds for
    # each collective; on a CPU the cost grows with the buffer. It must be enabled before the group is made.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000" if device.type == "cuda" else "256")
    dist.init_process_group(
        backend,
        store=distributed_c10d.PrefixStore("default_pg", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return Job(ranks, device, store, rank_processes)


def allow_tf32(allowed: bool) -> None:
    """Set whether a GPU may compute fp32 matrix products and convolutions in TF32. No effect on a CPU."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def describe_device(device: torch.device) -> Device:
    """Return the device's type, and whether the device has instructions for bf16, fp16 and fp8."""
    if device.type == "cuda":
        # fp8 needs AMD's MI300 (9.4; MI200 is 9.0), or NVIDIA's compute capability 8.9.
        minimum_for_fp8 = (9, 4) if torch.version.hip else (8, 9)
        return Device(
            "cuda",
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            fp16=True,
            fp8=torch.cuda.get_device_capability(device) >= minimum_for_fp8,
        )
    return Device.cpu()
