"""One rank of the doctor's all-reduce: a process of its own, so that one that hangs can be ended.

It is asked by the probe (session.py): on rank 0 to serve the store, then with a Part. Says where it is as it
goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from pipeline.distributed.doctor.session import answer_all, own_streams, read_questions, say
from pipeline.errors import one_line

if TYPE_CHECKING:
    import torch

MEBIBYTE = 1 << 20
BUDGET = 0.15
"""Seconds that a transfer is meant to take: its size follows from a first, small one."""

TRANSFERS = 4
"""Over each link; the fastest counts: the first makes the connection, and others may use the machine."""

STEPS = ("loading torch", "joining", "the first all-reduce", "transfers", "the large all-reduce", "the end")


class Part(TypedDict):
    """What this rank does in the all-reduce."""

    rank: int
    world_size: int
    device: int | None
    """GPU of this machine; None: the processor."""
    address: str
    port: int
    rounds: list[list[tuple[int, int]]]
    """Transfers (from, to); those of a round run at the same time."""
    seconds: float
    """Limit."""


class Measured(TypedDict, total=False):
    """What is known of a rank, as far as it came. Bytes, bytes a second."""

    rank: int
    step: str
    """What it did last: one of STEPS. The probe adds both."""
    problem: str
    links: list[tuple[int, int, float]]
    """(from, to, speed) of the transfers that it received."""
    bandwidth: float
    """Of the all-reduce, as each rank's link sees it: 2 (n - 1) / n x size / time."""
    size: int


def main() -> None:
    """Serves standard input until it closes; then the process ends, whatever it is doing."""
    questions, answers = own_streams()
    waiting = read_questions(questions)

    def tell(step: str) -> None:
        say(answers, {"step": step})

    import torch
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    stores: list[TCPStore] = []

    def serve(address: str) -> dict[str, int]:
        stores.append(TCPStore(address, 0, is_master=True, wait_for_workers=False))
        return {"port": stores[0].port}

    def take_part(part: Part) -> Measured:
        return _take_part(part, stores[0] if stores else None, tell)

    answer_all(waiting, answers, {"serve": serve, "reduce": take_part})


def _take_part(part: Part, store: Any, tell: Callable[[str], None]) -> Measured:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    measured = Measured()
    try:
        tell("joining")
        limit = timedelta(seconds=part["seconds"])
        if store is None:
            store = TCPStore(part["address"], part["port"], is_master=False, timeout=limit)
        device = torch.device("cpu") if part["device"] is None else torch.device("cuda", part["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=store,
            rank=part["rank"],
            world_size=part["world_size"],
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
        )
        tell("the first all-reduce")
        ones = torch.full((1024,), float(part["rank"] + 1), device=device)
        dist.all_reduce(ones)
        expected = part["world_size"] * (part["world_size"] + 1) / 2
        if ones.ne(expected).any().item():
            raise ValueError(f"the sum over all ranks is {ones[0].item():g}, not {expected:g}")
        tell("transfers")
        measured["links"] = _transfer(part, device)
        tell("the large all-reduce")
        measured["size"], measured["bandwidth"] = _all_reduce(part, measured["links"], device)
        tell("the end")
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # gloo, NCCL and the store each raise their own
        measured["problem"] = one_line(error, 300)
    return measured


def _transfer(part: Part, device: torch.device) -> list[tuple[int, int, float]]:
    """The receiver asks, with the size, and holds the watch: ranks that are late to a round do not count."""
    import torch
    import torch.distributed as dist

    largest = (256 if device.type == "cuda" else 16) * MEBIBYTE
    buffer = torch.zeros(largest, dtype=torch.uint8, device=device)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    found = []
    for pairs in part["rounds"]:
        for source, target in pairs:
            if part["rank"] == source:
                for _ in range(TRANSFERS):
                    dist.recv(size, target)
                    dist.send(buffer[: int(size)], target)
            elif part["rank"] == target:
                amount, best = MEBIBYTE // 16, 0.0
                for _ in range(TRANSFERS):
                    size.fill_(amount)
                    started = _now(device)
                    dist.send(size, source)
                    dist.recv(buffer[:amount], source)
                    speed = amount / (_now(device) - started)
                    best = max(best, speed)
                    amount = int(min(max(speed * BUDGET, MEBIBYTE // 16), largest))
                found.append((source, target, best))
        dist.barrier()
    return found


def _all_reduce(part: Part, links: list[tuple[int, int, float]], device: torch.device) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    largest = (256 if device.type == "cuda" else 16) * MEBIBYTE
    slowest = torch.tensor([min([speed for *_, speed in links], default=1e12)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    size = int(min(max(slowest.item() * BUDGET, MEBIBYTE // 4), largest)) // 4 * 4
    values = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(3):
        dist.barrier()
        started = _now(device)
        dist.all_reduce(values)
        seconds.append(_now(device) - started)
    share = 2 * (part["world_size"] - 1) / part["world_size"]
    return size, share * size / min(seconds)


def _now(device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
