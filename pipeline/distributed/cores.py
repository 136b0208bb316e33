"""The cores that a rank may use: who shares them, and its own part, those next to its GPU first.

A core is a physical one: two threads of its own compute no faster than one. Linux only; elsewhere nothing is
bound.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from pipeline.distributed.diagnosis import RankProcess
from pipeline.distributed.ranks import cpu_threads

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")
CPUS = Path("/sys/devices/system/cpu")
# OpenMP's own words for where its threads compute.
BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def allowed_cpus() -> set[int]:
    """The numbers of those that this process may run on, hyper-threads each by itself."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def count_cores() -> int:
    """How many cores this process may use."""
    leaders = hyper_threads()
    return len({leaders.get(cpu, cpu) for cpu in allowed_cpus()})


def settle_cores(store: Store, everyone: Sequence[RankProcess], rank: int, bound: bool | None) -> None:
    """Gives this rank its threads, and its cores. Collective.

    Args:
        bound: Whether to its part of the cores alone; None: where others share them, and nobody told OpenMP.
    """
    beside = sharers(store, everyone, rank)
    torch.set_num_threads(cpu_threads(count_cores(), len(beside), os.environ))
    if bound is None:
        bound = len(beside) > 1 and not any(os.environ.get(name) for name in BINDINGS)
    if bound:
        bind_cores(beside.index(rank), len(beside))


def sharers(store: Store, everyone: Sequence[RankProcess], rank: int) -> list[int]:
    """The ranks of this machine that may run where this one may, itself among them. Collective.

    Slurm and mpirun give each task cores of its own: those are not to be divided again.
    """
    store.set(f"pipeline/cpus/{rank}", json.dumps(sorted(allowed_cpus())))
    here = [each.rank for each in everyone if each.machine == everyone[rank].machine]
    allowed = dict(zip(here, store.multi_get([f"pipeline/cpus/{other}" for other in here]), strict=True))
    return [other for other in here if allowed[other] == allowed[rank]]


def bind_cores(index: int, count: int) -> None:
    """Binds every thread of this process to part `index` of `count`; with fewer cores than parts, nothing.

    Args:
        index: Also of this process's GPU, where there is one a part.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    nodes = {number: cores & allowed for number, cores in numa_nodes().items() if cores & allowed}
    mine = share(allowed, nodes, gpu_nodes(count), index, count, hyper_threads())
    if not mine:
        return
    for task in Path("/proc/self/task").iterdir():  # threads that are made later inherit it
        with suppress(OSError):  # ended meanwhile
            os.sched_setaffinity(int(task.name), mine)


def share(
    allowed: set[int],
    nodes: Mapping[int, set[int]],
    near: Sequence[int | None],
    index: int,
    count: int,
    leaders: Mapping[int, int],
) -> set[int]:
    """The cores of one rank.

    Args:
        allowed: Of this process before.
        nodes: NUMA node -> its cores.
        near: The node of each rank's GPU; None: no GPU, or not known.
        leaders: See hyper_threads.

    Returns:
        Ranks whose GPUs hang on one node share that node's cores out; where a GPU's node is not known, all
        share all cores out, node by node. Empty: there are fewer cores than ranks.
    """
    known = [node for node in near if node in nodes]
    if count == len(near) == len(known):
        mine = near[index]
        assert mine is not None
        neighbours = [rank for rank, node in enumerate(near) if node == mine]
        return _slice([nodes[mine]], leaders, neighbours.index(index), len(neighbours))
    elsewhere = allowed.difference(*nodes.values())
    return _slice([*(nodes[number] for number in sorted(nodes)), elsewhere], leaders, index, count)


def _slice(nodes: Sequence[set[int]], leaders: Mapping[int, int], index: int, parts: int) -> set[int]:
    """Whole cores: two ranks on the threads of one would slow each other down."""
    cores: dict[int, set[int]] = {}
    for node in nodes:
        for cpu in sorted(node):
            cores.setdefault(leaders.get(cpu, cpu), set()).add(cpu)
    whole = list(cores.values())
    return set().union(*whole[index * len(whole) // parts : (index + 1) * len(whole) // parts])


def hyper_threads() -> dict[int, int]:
    """The number of each -> the lowest one of its core; empty where the system does not say."""
    return {
        int(path.parts[-3].removeprefix("cpu")): min(parse_cores(path.read_text()))
        for path in CPUS.glob("cpu[0-9]*/topology/thread_siblings_list")
    }


def numa_nodes() -> dict[int, set[int]]:
    """NUMA node -> its cores; empty where the system does not say."""
    return {
        int(path.parent.name.removeprefix("node")): parse_cores(path.read_text())
        for path in NODES.glob("node[0-9]*/cpulist")
    }


def parse_cores(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def gpu_nodes(count: int) -> list[int | None]:
    """The NUMA node of each of this machine's first GPUs; None where the system does not say."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < count:
        return []
    found: list[int | None] = []
    for index in range(count):
        p: Any = torch.cuda.get_device_properties(index)
        address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        try:
            node = int((PCI / address / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        found.append(node if node >= 0 else None)
    return found
