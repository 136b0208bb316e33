"""How a job's ranks share the work: the degrees that a configuration names, and what they multiply to."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.loading import ConfigFile, get_dotted
from pipeline.errors import ConfigError

# JSON key -> the degree's name in messages. Their product divides the number of ranks.
DEGREES = {
    "tensor_parallel.autotp_size": "tensor_parallel",
    "pipeline.stages": "pipeline_stages",
    "sequence_parallel_size": "sequence_parallel",
}

# What Linux calls the instructions, on x86 and on ARM.
CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
FP16_FLAGS = {"amx_fp16", "asimdhp"}  # not avx512_fp16, whose products take as long as fp32's
FP8_CAPABILITY = 8.9  # of NVIDIA's GPUs: Ada, Hopper and newer


@dataclass(frozen=True)
class Device:
    """What the ranks compute on, and the half precisions in which that is faster than in fp32.

    `auto` chooses among those. A CPU computes in the others too if it is asked to; a GPU does not.
    """

    kind: str
    """`cpu` or `cuda`."""
    bf16: bool
    fp16: bool
    fp8: bool = True
    """Whether linear layers can multiply in fp8; a CPU emulates it."""

    @classmethod
    def cpu(cls) -> Device:
        """Return this machine's CPU, by what Linux says of it."""
        try:
            words = set(CPU_INFO.read_text().split())
        except OSError:
            words = set()
        flags = words & BF16_FLAGS
        if "GenuineIntel" in words:
            flags -= {"avx512_bf16"}  # products in it take twice as long as fp32's there
        return cls("cpu", bool(flags), bool(words & FP16_FLAGS))

    @classmethod
    def probe(cls) -> Device:
        """Return a GPU if the drivers say so, else the CPU. distributed.accelerator decides with torch."""
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
        is_native = any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/kfd"))
        is_there = is_native or Path("/dev/dxg").exists()  # Windows gives Linux any maker's GPU by it
        if hidden or not is_there or os.environ.get("DS_ACCELERATOR") == "cpu":
            return cls.cpu()
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
            capability = min(float(line) for line in answer.split())
            return cls("cuda", bf16=capability >= 8.0, fp16=True, fp8=capability >= FP8_CAPABILITY)
        except (OSError, subprocess.SubprocessError, ValueError):
            return cls("cuda", bf16=True, fp16=True) if is_native else cls.cpu()


@dataclass(frozen=True)
class Split:
    """One job's split. tensor x pipeline x sequence x data = ranks."""

    world_size: int
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    parallel: str
    """`deepspeed`; of plain PyTorch `single`, `dp` or `ddp`."""
    zero_stage: int = 0
    tensor_parallel: int = 1
    pipeline_stages: int = 1
    sequence_parallel: int = 1

    @property
    def dp_world_size(self) -> int:
        """Ranks, or groups of ranks, that see different samples."""
        return self.world_size // (self.tensor_parallel * self.pipeline_stages * self.sequence_parallel)

    @property
    def cuts_matrices(self) -> bool:
        """Whether an optimizer is given stretches of parameters."""
        staged_in_bf16 = self.pipeline_stages > 1 and self.precision == "bf16"
        return self.zero_stage > 0 or self.tensor_parallel > 1 or staged_in_bf16

    def __str__(self) -> str:
        if self.parallel != "deepspeed":
            names = {"single": "one process", "dp": "nn.DataParallel", "ddp": "DistributedDataParallel"}
            return f"plain PyTorch, {names[self.parallel]}, {self.precision}"
        parts = [f"DeepSpeed, ZeRO stage {self.zero_stage}, {self.precision}"]
        for name in DEGREES.values():
            if (degree := getattr(self, name)) > 1:
                parts.append(f"{name} {degree}")
        if len(parts) > 1:
            parts.append(f"data-parallel {self.dp_world_size}")
        return ", ".join(parts)


def read_deepspeed_split(file: ConfigFile, world_size: int, precision: str) -> Split:
    """Return the split that a DeepSpeed JSON asks for on this many ranks.

    Raises:
        ConfigError: The product of the degrees does not divide the ranks.
    """
    degrees = {name: get_dotted(file.tree, key) or 1 for key, name in DEGREES.items()}
    stage = get_dotted(file.tree, "zero_optimization.stage") or 0
    needed = math.prod(degrees.values())
    if world_size % needed:
        cut = {key: degrees[name] for key, name in DEGREES.items() if degrees[name] > 1}
        asked = " x ".join(f"{key} {degree}" for key, degree in cut.items())
        raise ConfigError(
            f"{file.location_of(next(iter(cut)))}: {asked} needs a multiple of {needed} ranks, "
            f"and this job has {world_size}; start {-(-world_size // needed) * needed}, or lower the degree"
        )
    return Split(world_size, precision, "deepspeed", stage, **degrees)
