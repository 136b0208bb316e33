"""Binds a rank to its share of the machine's cores, those next to its GPU first. Linux only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def bind_cores(local_rank: int, local_world_size: int) -> None:
    """Binds every thread of this process; does nothing with fewer cores than ranks, or without Linux."""
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    nodes = {number: cores & allowed for number, cores in numa_nodes().items() if cores & allowed}
    mine = share(allowed, nodes, gpu_nodes(local_world_size), local_rank, local_world_size)
    if not mine:
        return
    for task in Path("/proc/self/task").iterdir():  # threads that are made later inherit it
        with suppress(OSError):  # ended meanwhile
            os.sched_setaffinity(int(task.name), mine)


def share(
    allowed: set[int],
    nodes: Mapping[int, set[int]],
    near: Sequence[int | None],
    local_rank: int,
    local_world_size: int,
) -> set[int]:
    """The cores of one rank.

    Args:
        allowed: Of this process before.
        nodes: NUMA node -> its cores.
        near: The node of each local rank's GPU; None: no GPU, or not known.

    Returns:
        Ranks whose GPUs hang on one node share that node's cores out; where a GPU's node is not known, all
        share all cores out, node by node. Empty: there are fewer cores than ranks.
    """
    known = [node for node in near if node in nodes]
    if local_world_size == len(near) == len(known):
        mine = near[local_rank]
        assert mine is not None
        neighbours = [rank for rank, node in enumerate(near) if node == mine]
        return _slice(sorted(nodes[mine]), neighbours.index(local_rank), len(neighbours))
    ordered = [core for number in sorted(nodes) for core in sorted(nodes[number])]
    ordered += sorted(allowed - set(ordered))
    return _slice(ordered, local_rank, local_world_size)


def _slice(cores: list[int], index: int, parts: int) -> set[int]:
    return set(cores[index * len(cores) // parts : (index + 1) * len(cores) // parts])


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
