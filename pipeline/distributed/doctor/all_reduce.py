"""One rank of the doctor's all-reduce, a process of its own, and what its measurements say.

It runs as `python -m pipeline.distributed.doctor.all_reduce`, started by the probe of its machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from pipeline.distributed.doctor.node import Tell, own_streams, serve
from pipeline.distributed.doctor.rows import CheckRow
from pipeline.errors import summarize_error
from pipeline.files import MIB

if TYPE_CHECKING:
    import torch

MODULE = "pipeline.distributed.doctor.all_reduce"
LIMIT = 240.0
"""Seconds for the all-reduce and what leads to it."""
STEPS = ("starting", "loading torch", "joining", "the first all-reduce", "transfers", "the large all-reduce")
"""Steps of a rank, in order."""
SIZES = {"cpu": 16 * MIB, "cuda": 256 * MIB}
"""Bytes of a transfer and of the large all-reduce."""
TRIES = 3
"""Measurements of each, of which the fastest counts: the first one makes the connection."""
SLOW = 1 / 3
"""Share of the usual speed below which a link is slow."""


Rounds = list[list[list[int]]]
"""Transfers, each from one rank to another; those of a round run at the same time."""


@dataclass
class RankMeasurements:
    """Measurements of a rank, as far as it came. Speeds are bytes a second."""

    rank: int
    step: str = STEPS[0]
    """The last step that it began."""
    problem: str = ""
    links: list[list[float]] = field(default_factory=list)
    """Sender, receiver and speed of each transfer that this rank received."""
    bandwidth: float = 0.0
    """Bus bandwidth of the all-reduce: 2 (n - 1) / n x size / time."""
    size: int = 0


def plan_ring_transfers(num_hosts: int) -> Rounds:
    """Return transfers from each host to the next, in rounds in which no host takes part twice."""
    if num_hosts < 2:
        return []
    rounds: Rounds = [[], [], []]
    for host in range(num_hosts):
        is_last_of_odd = host == num_hosts - 1 and num_hosts % 2
        rounds[2 if is_last_of_odd else host % 2].append([host, (host + 1) % num_hosts])
    return [each for each in rounds if each]


def take_part(part: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Do one rank's part, and return what it measured, or what failed.

    Args:
        part: The arguments of `_measure` that say where the ranks meet.
        tell: Called with each step as it begins.
    """
    measured = RankMeasurements(part["rank"])

    def enter(step: str) -> None:
        measured.step = step
        tell(step)

    try:
        _measure(**part, measured=measured, enter=enter)
    except Exception as error:  # gloo, NCCL and the store each raise their own
        measured.problem = summarize_error(error, 300)
    return asdict(measured)


def _measure(
    *,
    rank: int,
    world_size: int,
    gpu: int | None,
    address: str,
    port: int,
    rounds: Rounds,
    measured: RankMeasurements,
    enter: Tell,
) -> None:
    enter("loading torch")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    enter("joining")
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=LIMIT)
    store = TCPStore(address, port, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=limit,
        device_id=device if on_gpu else None,
    )
    enter("the first all-reduce")
    ones = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(ones)
    expected = world_size * (world_size + 1) / 2
    if ones.ne(expected).any().item():
        raise ValueError(f"the sum over all ranks is {ones[0].item():g}, not {expected:g}")
    enter("transfers")
    measured.links = _transfer(rank, rounds, device)
    enter("the large all-reduce")
    measured.size = SIZES[device.type]
    values = torch.ones(measured.size // 4, device=device)
    seconds = []
    for _ in range(TRIES):
        dist.barrier()
        started = _now(device)
        dist.all_reduce(values)
        seconds.append(_now(device) - started)
    measured.bandwidth = 2 * (world_size - 1) / world_size * measured.size / min(seconds)
    dist.barrier()
    dist.destroy_process_group()


def _transfer(rank: int, rounds: Rounds, device: torch.device) -> list[list[float]]:
    """Return the speeds of what this rank received. It asks for each: a late sender does not count."""
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(SIZES[device.type], dtype=torch.uint8, device=device)
    request = torch.zeros(1, device=device)
    found: list[list[float]] = []
    for pairs in rounds:
        for source, target in pairs:
            if rank == source:
                for _ in range(TRIES):
                    dist.recv(request, target)
                    dist.send(buffer, target)
            elif rank == target:
                seconds = []
                for _ in range(TRIES):
                    started = _now(device)
                    dist.send(request, source)
                    dist.recv(buffer, source)
                    seconds.append(_now(device) - started)
                found.append([source, target, len(buffer) / min(seconds)])
        dist.barrier()
    return found


def _now(device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check_all_reduce(
    places: Sequence[str], results: Sequence[RankMeasurements], problem: str, has_gpus: bool
) -> list[CheckRow]:
    """Return the rows of the all-reduce and of the links.

    Args:
        places: Host of each rank.
        results: Measurements of the ranks.
        problem: Reason why there are no results; empty if there are.
        has_gpus: Whether the ranks compute on GPUs.
    """
    more = "NCCL_DEBUG=INFO" if has_gpus else "TORCH_CPP_LOG_LEVEL=INFO"
    fix = f"look at the rows above; {more} in front of this command shows more"
    if problem:
        return [CheckRow("all-reduce", "fail", problem, fix)]
    wrong = [each for each in results if each.problem]
    if wrong:
        # The others wait for the one that is furthest behind.
        first = min(wrong, key=lambda each: STEPS.index(each.step))
        behind = [each for each in wrong if each.step == first.step]
        hosts = tuple(dict.fromkeys(places[each.rank] for each in behind))
        return [CheckRow("all-reduce", "fail", f"stopped at {first.step}: {first.problem}", fix, hosts)]
    ranks = f"{len(results)} rank{'s' * (len(results) > 1)}"
    slowest = min(each.bandwidth for each in results)
    over = f", {_speed(slowest)} a rank" if len(results) > 1 else ""
    found = f"{min(each.size for each in results) / MIB:.0f} MiB over {ranks}{over}"
    return [CheckRow("all-reduce", "ok", found), *_check_links(places, results)]


def _check_links(places: Sequence[str], results: Sequence[RankMeasurements]) -> list[CheckRow]:
    speeds = {
        (places[int(source)], places[int(target)]): speed
        for each in results
        for source, target, speed in each.links
    }
    if not speeds:
        return []
    # Of two links the faster is what the slower is compared with.
    usual = median(speeds.values()) if len(speeds) > 2 else max(speeds.values())
    slow = {pair for pair, speed in speeds.items() if speed < SLOW * usual}
    (source, target), least = min(speeds.items(), key=lambda item: item[1])
    found = f"slowest {source} -> {target} {_speed(least)}; usual {_speed(usual)}"
    if not slow:
        return [CheckRow("links", "ok", found)]
    # If all links of a host are slow, the host is.
    guilty = [host for host in (source, target) if len({pair for pair in slow if host in pair}) > 1]
    hosts = tuple(guilty or (source, target))
    fix = f"on {', '.join(hosts)}: what else runs (top), the link's speed and errors (ip -s link; ethtool)"
    if len(guilty) == 1:
        found = f"{guilty[0]} is slow: {found}"
    return [CheckRow("links", "warning", found, fix, hosts)]


def _speed(bytes_a_second: float) -> str:
    return f"{bytes_a_second * 8 / 1e9:.3g} Gbit/s"


if __name__ == "__main__":
    serve(*own_streams(), {"reduce": take_part})
