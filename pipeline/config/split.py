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
BF16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "bf16": "Arm's bf16"}  # the fastest first
FP8_CAPABILITY = 8.9  # of NVIDIA's GPUs: Ada, Hopper and newer
FP16_FLAGS = {"amx_fp16", "asimdhp"}  # not avx512_fp16, whose products take as long as fp32's


@dataclass(frozen=True)
class Device:
    """What the ranks compute on, and in which half precisions that is faster than in fp32.

    `auto` chooses among those. A CPU computes in the others too when told to; a GPU does not.
    """

    kind: str
    """`cpu` or `cuda`."""
    bf16: bool
    fp16: bool
    bf16_by: str = ""
    """What a CPU has for bf16, in words."""
    fp8: bool = True
    """Whether linear layers can multiply in fp8; a CPU emulates it."""

    @classmethod
    def cpu(cls) -> Device:
        """This machine's, by what Linux says of it."""
        try:
            words = set(CPU_INFO.read_text().split())
        except OSError:
            words = set()
        bf16_by = next((name for flag, name in BF16_FLAGS.items() if flag in words), "")
        if bf16_by == BF16_FLAGS["avx512_bf16"] and "GenuineIntel" in words:
            bf16_by = ""  # products in it take twice as long as fp32's there
        return cls("cpu", bool(bf16_by), bool(words & FP16_FLAGS), bf16_by)

    @classmethod
    def probe(cls) -> Device:
        """Without torch: by the drivers' word on a GPU, else a CPU; distributed.accelerator decides."""
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

    def is_slow_in(self, precision: str) -> bool:
        """Whether it is a CPU that is as fast in fp32, or faster."""
        has = {"fp32": True, "bf16": self.bf16, "fp16": self.fp16}
        return self.kind == "cpu" and not has[precision]


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


def deepspeed_split(file: ConfigFile, world_size: int, precision: str) -> Split:
    """The split a DeepSpeed JSON asks for on this many ranks.

    Raises:
        ConfigError: a degree is no positive number, or their product does not divide the ranks.
    """
    degrees: dict[str, int] = {}
    for key, name in DEGREES.items():
        degree = get_dotted(file.tree, key)
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise ConfigError(f"{file.at(key)}: expected a positive number of ranks, given {degree!r}")
        degrees[name] = degree or 1
    stage = get_dotted(file.tree, "zero_optimization.stage") or 0
    needed = math.prod(degrees.values())
    if world_size % needed:
        cut = {key: degrees[name] for key, name in DEGREES.items() if degrees[name] > 1}
        asked = " x ".join(f"{key} {degree}" for key, degree in cut.items())
        raise ConfigError(
            f"{file.place(next(iter(cut)))}: {asked} needs a multiple of {needed} ranks, and this job has "
            f"{world_size}; start {-(-world_size // needed) * needed}, or lower the degree"
        )
    return Split(world_size, precision, "deepspeed", stage, **degrees)
