"""Runs one rank of the doctor's all-reduce, and makes rows of the table from the measurements of all ranks.

The probe of each machine starts `python -m pipeline.distributed.doctor.all_reduce` once for each rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from pipeline.distributed.doctor.node import StepReporter, reserve_standard_streams, serve
from pipeline.distributed.doctor.rows import CheckRow
from pipeline.errors import summarize_error
from pipeline.files import MIB

if TYPE_CHECKING:
    import torch

RANK_MODULE = "pipeline.distributed.doctor.all_reduce"
"""Module that the process of each rank runs."""
RANK_TIMEOUT = 240.0
"""Seconds from the start of a rank's process to the end of its all-reduce."""
STEPS = ("starting", "loading torch", "joining", "the first all-reduce", "transfers", "the large all-reduce")
"""Steps of a rank, in order; `joining` is the creation of the process group."""
TRANSFER_BYTES = {"cpu": 16 * MIB, "cuda": 256 * MIB}
"""Type of device -> bytes of one transfer, and of the large all-reduce on each rank."""
NUM_REPEATS = 3
"""Number of measurements of each speed. The fastest counts, since the first one also opens the connection."""
SLOW_LINK_SHARE = 1 / 3
"""Share of the usual speed below which a link counts as slow."""
Rounds = list[list[list[int]]]
"""Rounds of transfers, each a list of sender and receiver. The transfers of a round run at the same time."""


@dataclass
class RankMeasurements:
    """Measurements of a rank, up to the step that it reached. Speeds are in bytes per second."""

    rank: int
    step: str = STEPS[0]
    """Last step that the rank began, one of STEPS."""
    problem: str = ""
    """Reason of a failure; empty if the rank finished."""
    links: list[list[float]] = field(default_factory=list)
    """Sender, receiver and speed of each transfer that this rank received."""
    bandwidth: float = 0.0
    """Bus bandwidth of the large all-reduce: 2 (n - 1) / n x size / time, for n ranks."""
    size: int = 0
    """Bytes of the large all-reduce on each rank; 0 if the rank did not reach it."""


def plan_ring_transfers(num_hosts: int) -> Rounds:
    """Return transfers from each host to the next, as a ring. Sender and receiver are indices of hosts.

    No host takes part in two transfers of a round, so these do not slow each other down. An odd number of
    hosts needs a third round.

    Args:
        num_hosts: Number of hosts; fewer than two have no transfers.
    """
    if num_hosts < 2:
        return []
    rounds: Rounds = [[], [], []]
    for host in range(num_hosts):
        is_last_of_odd = host == num_hosts - 1 and num_hosts % 2 == 1
        round_index = 2 if is_last_of_odd else host % 2
        rounds[round_index].append([host, (host + 1) % num_hosts])
    return [transfers for transfers in rounds if transfers]


def measure_rank(arguments: Mapping[str, Any], report_step: StepReporter) -> dict[str, Any]:
    """Run one rank of the all-reduce.

    Args:
        arguments: Arguments of `_measure` except for `measurements` and `begin_step`.
        report_step: Called with each step as it begins.

    Returns:
        Fields of the rank's RankMeasurements. An error is not raised, but is the field `problem`.
    """
    measurements = RankMeasurements(arguments["rank"])

    def begin_step(step: str) -> None:
        measurements.step = step
        report_step(step)

    try:
        _measure(**arguments, measurements=measurements, begin_step=begin_step)
    except Exception as error:  # gloo, NCCL and the store raise various types
        measurements.problem = summarize_error(error, 300)
    return asdict(measurements)


def _measure(
    *,
    rank: int,
    world_size: int,
    gpu: int | None,
    address: str,
    port: int,
    rounds: Rounds,
    measurements: RankMeasurements,
    begin_step: StepReporter,
) -> None:
    """Join the process group, check a sum, and measure transfers and a large all-reduce.

    Args:
        rank: Number of this rank.
        world_size: Number of ranks.
        gpu: Index of this rank's GPU; `None` to compute on the CPU.
        address: Address of the store, which rank 0 hosts.
        port: Port of the store.
        rounds: Transfers to measure.
        measurements: Measurements, filled as they are made.
        begin_step: Called with each step as it begins.

    Raises:
        ValueError: The sum over all ranks is wrong.
    """
    begin_step("loading torch")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    begin_step("joining")
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=RANK_TIMEOUT)
    store = TCPStore(address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    begin_step("the first all-reduce")
    numbers = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    expected = world_size * (world_size + 1) / 2
    if numbers.ne(expected).any().item():
        raise ValueError(f"the sum over all ranks is {numbers[0].item():g}, expected {expected:g}")
    begin_step("transfers")
    measurements.links = _transfer(rank, rounds, device)
    begin_step("the large all-reduce")
    measurements.size = TRANSFER_BYTES[device.type]
    values = torch.ones(measurements.size // 4, device=device)  # fp32, 4 bytes each
    seconds = []
    for _ in range(NUM_REPEATS):
        dist.barrier()
        started = _read_clock(device)
        dist.all_reduce(values)
        seconds.append(_read_clock(device) - started)
    measurements.bandwidth = 2 * (world_size - 1) / world_size * measurements.size / min(seconds)
    dist.barrier()
    dist.destroy_process_group()


def _transfer(rank: int, rounds: Rounds, device: torch.device) -> list[list[float]]:
    """Take part in the transfers, and return sender, receiver and speed of those that this rank received.

    The receiver requests each transfer and starts its clock then, so that a sender that comes late does not
    look like a slow link.
    """
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(TRANSFER_BYTES[device.type], dtype=torch.uint8, device=device)
    request = torch.zeros(1, device=device)
    received: list[list[float]] = []
    for transfers in rounds:
        for source, target in transfers:
            if rank == source:
                for _ in range(NUM_REPEATS):
                    dist.recv(request, target)
                    dist.send(buffer, target)
            elif rank == target:
                seconds = []
                for _ in range(NUM_REPEATS):
                    started = _read_clock(device)
                    dist.send(request, source)
                    dist.recv(buffer, source)
                    seconds.append(_read_clock(device) - started)
                received.append([source, target, len(buffer) / min(seconds)])
        dist.barrier()
    return received


def _read_clock(device: torch.device) -> float:
    """Return the host's time in seconds, after synchronizing with the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check_all_reduce(
    rank_hosts: Sequence[str], results: Sequence[RankMeasurements], problem: str, has_gpus: bool
) -> list[CheckRow]:
    """Return the row of the all-reduce and, if it succeeded between hosts, the row of the links.

    Args:
        rank_hosts: Host of each rank.
        results: Measurements of all ranks; not used if there is a problem.
        problem: Reason why measurements are missing; empty if none is missing.
        has_gpus: Whether the ranks compute on GPUs.
    """
    variable = "NCCL_DEBUG=INFO" if has_gpus else "TORCH_CPP_LOG_LEVEL=INFO"
    fix = f"check the rows above; for details run this command again with {variable} in front"
    if problem:
        return [CheckRow("all-reduce", "fail", problem, fix)]
    failed = [result for result in results if result.problem]
    if failed:
        # The other ranks wait for the rank that is furthest behind, so that rank's problem is the cause.
        first = min(failed, key=lambda result: STEPS.index(result.step))
        behind = [result for result in failed if result.step == first.step]
        hosts = tuple(dict.fromkeys(rank_hosts[result.rank] for result in behind))
        return [CheckRow("all-reduce", "fail", f"stopped at {first.step}: {first.problem}", fix, hosts)]
    size = min(result.size for result in results)
    text = f"{size / MIB:.0f} MiB over {len(results)} rank{'s' * (len(results) > 1)}"
    if len(results) > 1:
        slowest = min(result.bandwidth for result in results)
        text += f", {_format_speed(slowest)} per rank"
    return [CheckRow("all-reduce", "ok", text), *_check_links(rank_hosts, results)]


def _check_links(rank_hosts: Sequence[str], results: Sequence[RankMeasurements]) -> list[CheckRow]:
    """Compare the speeds of the links between hosts, and name a slow link or a slow host."""
    speeds = {
        (rank_hosts[int(source)], rank_hosts[int(target)]): speed
        for result in results
        for source, target, speed in result.links
    }
    if not speeds:
        return []
    # The median of two speeds would be their mean. So compare the slower of two links with the faster one.
    usual = median(speeds.values()) if len(speeds) > 2 else max(speeds.values())
    slow_links = {link for link, speed in speeds.items() if speed < SLOW_LINK_SHARE * usual}
    (source, target), lowest = min(speeds.items(), key=lambda item: item[1])
    text = f"slowest {source} -> {target} {_format_speed(lowest)}; usual {_format_speed(usual)}"
    if not slow_links:
        return [CheckRow("links", "ok", text)]
    # Every host has two links of the ring. If both are slow, the host is the cause.
    slow_hosts = [host for host in (source, target) if sum(host in link for link in slow_links) > 1]
    hosts = tuple(slow_hosts or (source, target))
    fix = f"on {', '.join(hosts)} look for other processes (top) and link errors (ip -s link; ethtool)"
    if len(slow_hosts) == 1:
        text = f"{slow_hosts[0]} is slow: {text}"
    return [CheckRow("links", "warning", text, fix, hosts)]


def _format_speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e9:.3g} Gbit/s"


if __name__ == "__main__":
    serve(*reserve_standard_streams(), {"reduce": measure_rank})
