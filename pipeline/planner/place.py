"""Place that a run is planned for: GPUs by name or memory, or this machine's processors.

The history of runs at a place corrects its forecasts."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.config.schema import RunConfig, cache_folder
from pipeline.config.settings import Resolved
from pipeline.config.split import Device
from pipeline.distributed.machine import memory_now
from pipeline.errors import ConfigError
from pipeline.files import CONFIGURATION_LIMIT, GIB, MIB, read_plain, replace_file
from pipeline.planner.hardware import COMPILED, EAGER, Gpu, Rates, find_gpu, network_rate, rates_of, this_cpu
from pipeline.planner.model import Model

FILE = "plans.jsonl"
MOST_LINES = 400
RECENT = 5
"""Runs of a kind that count."""
OFFLOADED = ("offload_optimizer", "offload_param")
LIMITS = (0.5, 2.0)
"""Of a correction: what lies beyond was another kind of run."""


@dataclass(frozen=True)
class Kind:
    """Runs whose plans are wrong by the same factor."""

    device: str
    """`H100 SXM 80GB`, `2 CPU cores`."""
    family: str
    split: str
    """Offload named, too."""
    compiled: bool
    size: int = 0
    """Of the model, and"""
    rows: int = 0
    """of what a rank computes at a time: each the power of two that is next."""

    @classmethod
    def of(cls, device: str, model: Model, config: RunConfig, resolved: Resolved) -> Kind:
        """Of a run."""
        family = model.dimensions.family if model.dimensions is not None else model.name
        zero = (resolved.deepspeed or {}).get("zero_optimization", {})
        where = (f"{name} on {zero[name]['device']}" for name in OFFLOADED if zero.get(name))
        split = ", ".join((str(resolved.split), *where))
        size = model.numel.bit_length()
        rows = resolved.plan.micro_batch_size * (config.data.tokens_per_row or 1)
        return cls(
            device=device,
            family=family,
            split=split,
            compiled=resolved.compile,
            size=size,
            rows=rows.bit_length(),
        )


@dataclass(frozen=True)
class Measured:
    """One run, over what was expected of it."""

    kind: Kind
    memory: float | None
    """Peak over what was expected; None: either is not known."""
    speed: float | None
    """Tokens a second over what was expected."""
    flops: float | None
    """Model FLOPs a second of a rank."""


@dataclass(frozen=True)
class Correction:
    """Factors on what the formulas say."""

    memory: float = 1.0
    speed: float = 1.0
    runs: int = 0
    """That it comes of."""


class History:
    """Of one user on one machine."""

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._known: list[Measured] | None = None

    def correction(self, kind: Kind) -> Correction:
        """By the newest runs of this kind; without one there is none."""
        found = [each for each in self._runs() if each.kind == kind][-RECENT:]
        memory, speed = (_mean(getattr(each, name) for each in found) for name in ("memory", "speed"))
        return Correction(memory or 1.0, speed or 1.0, len(found))

    def flops(self, device: str) -> float | None:
        """A second of a rank, that runs on this device reached; None: none did yet."""
        found = [each.flops for each in self._runs() if each.kind.device == device and each.flops]
        return max(found[-RECENT:], default=None)

    def add(self, measured: Measured) -> None:
        """Nothing is said where it cannot be written: a plan is right enough without."""
        self._known = None
        lines = [json.dumps(asdict(each)) for each in [*self._read(), measured]][-MOST_LINES:]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, "\n".join(lines) + "\n")

    def _runs(self) -> list[Measured]:
        """Read once: a search asks for hundreds of corrections."""
        if self._known is None:
            self._known = list(self._read())
        return self._known

    def _read(self) -> Iterator[Measured]:
        with suppress(OSError):
            for line in read_plain(self._path, CONFIGURATION_LIMIT).splitlines():
                with suppress(ValueError, TypeError, KeyError):
                    found = json.loads(line)
                    numbers = [found[name] for name in ("memory", "speed", "flops")]
                    if all(each is None or 0 < float(each) < math.inf for each in numbers):
                        yield Measured(Kind(**found["kind"]), *numbers)


def history_of(config: RunConfig) -> History:
    """Beside what the recipe's runs keep between starts."""
    return History(cache_folder(config))


def _mean(ratios: Iterable[float | None]) -> float | None:
    """Geometric, within the limits."""
    found = [math.log(min(max(each, LIMITS[0]), LIMITS[1])) for each in ratios if each is not None]
    return math.exp(sum(found) / len(found)) if found else None


# Cards that stand for others of the same memory, by what they are sold with.
STAND_INS = {24: "rtx 4090", 32: "rtx 5090", 40: "a100 40", 48: "l40s", 80: "h100", 141: "h200", 180: "b200"}
FP8 = re.compile(r"^(H\d|GH|GB|B\d|L4|RTX (4|50|6000 Ada|PRO)|MI3)")


@dataclass(frozen=True)
class Place:
    """Devices, machines, and what connects them."""

    gpu: Gpu
    device: Device
    per_node: int
    """GPUs of a machine, or ranks where there is none."""
    nodes: int
    network: float
    """Bytes a second between machines of one GPU."""
    host_memory: int | None = None
    """Bytes of one machine; None: without a limit."""
    remark: str = ""
    """What of it is taken from another card."""

    @property
    def ranks(self) -> int:
        """In all."""
        return self.per_node * self.nodes

    @property
    def memory(self) -> int:
        """Bytes that a rank has."""
        return self.gpu.memory

    @property
    def watts(self) -> float | None:
        """Of one device; None: not known."""
        return self.gpu.watts or None

    def rates(self, resolved: Resolved) -> Rates | None:
        """For a run of that precision, compiled or not; None: nothing is known of this device."""
        kernels = COMPILED if resolved.compile else EAGER
        return rates_of(
            self.gpu,
            self.network,
            per_node=self.per_node,
            kernels=kernels,
            precision=resolved.split.precision,
            tf32=resolved.tf32,
        )

    def with_gpus(self, count: int) -> Place:
        """The same machines, with so many GPUs in all."""
        per_node = min(count, self.per_node)
        return replace(self, per_node=per_node, nodes=-(-count // per_node))

    def __str__(self) -> str:
        machines = f" on {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.ranks} x {self.gpu.name}, {self.memory / GIB:.1f} GiB{machines}{self.remark}"


def place_of(
    name: str | None,
    memory_gib: float | None,
    per_node: int,
    nodes: int,
    network: str | None,
    host_memory_gib: float | None,
    history: History | None = None,
) -> Place:
    """What the command line asks for; without a name and a memory, what this machine has.

    Raises:
        ConfigError: no such GPU, or a number that cannot be.
    """
    host = None if host_memory_gib is None else int(_positive("--host-memory", host_memory_gib) * GIB)
    if name is None and memory_gib is None:
        return here(per_node, nodes, network, host, history)
    gpu, remark = find_gpu(name) if name is not None else None, ""
    if memory_gib is not None:
        size = int(_positive("--gpu-memory", memory_gib) * GIB)
        if gpu is None:
            like = min(STAND_INS, key=lambda sold: abs(sold - memory_gib))
            gpu = find_gpu(STAND_INS[like])
            remark = f" (times as of {gpu.name})"
            # A card that is sold as one of 80 GB has less.
            gpu = gpu if memory_gib == like else replace(gpu, memory=size)
        else:
            gpu = replace(gpu, memory=size)
    assert gpu is not None
    return Place(
        gpu=gpu,
        device=_device(gpu),
        per_node=per_node,
        nodes=nodes,
        network=network_rate(network, gpu, per_node),
        host_memory=host,
        remark=remark,
    )


def here(
    per_node: int,
    nodes: int = 1,
    network: str | None = None,
    host: int | None = None,
    history: History | None = None,
) -> Place:
    """This machine's GPUs, or its processors, shared among the ranks.

    Args:
        history: What processors reach is known from runs alone.
    """
    device, limit = Device.probe(), host or memory_now().limit
    if device.kind == "cuda" and (gpu := _own_gpu()) is not None:
        return Place(
            gpu=gpu,
            device=device,
            per_node=per_node,
            nodes=nodes,
            network=network_rate(network, gpu, per_node),
            host_memory=limit,
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = this_cpu(max(1, cores // per_node), limit // per_node)
    if history is not None:
        cpu = replace(cpu, measured_flops=history.flops(cpu.name))
    return Place(cpu, Device.cpu(), per_node, nodes, network_rate(network, cpu, per_node))


def on_gpus(name: str, memory: int, device: Device, per_node: int, nodes: int) -> Place:
    """GPUs that a job has, as torch tells of them."""
    gpu = known_gpu(name, memory)
    return Place(
        gpu=gpu,
        device=device,
        per_node=per_node,
        nodes=nodes,
        network=network_rate(None, gpu, per_node),
        host_memory=memory_now().limit,
    )


def _own_gpu() -> Gpu | None:
    """By the driver's word, which needs no torch."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        name, mebibytes = answer.splitlines()[0].rsplit(",", 1)
        return known_gpu(name.strip(), int(float(mebibytes) * MIB))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def known_gpu(name: str, memory: int) -> Gpu:
    """A card that is there: of one that is not in the list only the memory is known."""
    try:
        return replace(find_gpu(name), memory=memory)
    except ConfigError:
        return Gpu(name, memory)


def _device(gpu: Gpu) -> Device:
    return Device("cuda", bf16=gpu.peak("bf16") is not None, fp16=True, fp8=FP8.match(gpu.name) is not None)


def _positive(option: str, value: float) -> float:
    if not 0 < value < 1e6:
        raise ConfigError(f"{option} {value:g}: expected GiB above 0")
    return value
