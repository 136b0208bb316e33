"""The split of a job's work over its ranks: precision, ZeRO stage and the degrees of parallelism."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.loading import ConfigFile, get_dotted
from pipeline.errors import ConfigError

# JSON key -> attribute of Split. The product of these degrees must divide the number of ranks.
DEGREES = {
    "tensor_parallel.autotp_size": "tensor_parallel",
    "pipeline.stages": "pipeline_stages",
    "sequence_parallel_size": "sequence_parallel",
}

CPU_INFO = Path("/proc/cpuinfo")
# Linux's names of the CPU instructions that multiply in bf16 and fp16, on x86 and on ARM.
BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
FP16_FLAGS = {"amx_fp16", "asimdhp"}  # not avx512_fp16: its products take as long as those in fp32
FP8_CAPABILITY = 8.9  # compute capability of NVIDIA's GPUs from Ada and Hopper on


@dataclass(frozen=True)
class Device:
    """The device of the ranks, and the half precisions in which it is faster than in fp32.

    "auto" chooses among these precisions. A CPU can compute in the other ones, too, if the settings ask for
    it; a GPU cannot.
    """

    kind: str
    """`cpu` or `cuda`."""
    bf16: bool
    """Whether the device is faster in bf16 than in fp32."""
    fp16: bool
    """Whether the device is faster in fp16 than in fp32."""
    fp8: bool = True
    """Whether linear layers can multiply in fp8; a CPU emulates it."""

    @classmethod
    def cpu(cls) -> Device:
        """Return the CPU of this machine, with the precisions that /proc/cpuinfo shows."""
        try:
            words = set(CPU_INFO.read_text().split())
        except OSError:
            words = set()
        flags = words & BF16_FLAGS
        if "GenuineIntel" in words:
            # On Intel CPUs without AMX, products in bf16 take twice as long as in fp32.
            flags -= {"avx512_bf16"}
        return cls("cpu", bool(flags), bool(words & FP16_FLAGS))

    @classmethod
    def probe(cls) -> Device:
        """Return a GPU if its driver is loaded, else the CPU. It takes up to 5 s and does not load torch.

        A run uses torch's answer instead (distributed/accelerator.py).
        """
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
        has_driver = any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/kfd"))
        may_have_gpu = has_driver or Path("/dev/dxg").exists()  # WSL2 passes GPUs through dxg
        if is_hidden or not may_have_gpu or os.environ.get("DS_ACCELERATOR") == "cpu":
            return cls.cpu()
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            output = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
            capability = min(float(line) for line in output.split())
            return cls("cuda", bf16=capability >= 8.0, fp16=True, fp8=capability >= FP8_CAPABILITY)
        except (OSError, subprocess.SubprocessError, ValueError):
            return cls("cuda", bf16=True, fp16=True) if has_driver else cls.cpu()


@dataclass(frozen=True)
class Split:
    """The split of one job. The number of ranks is tensor x pipeline x sequence x data parallelism."""

    world_size: int
    """Number of ranks of the job."""
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    parallel: str
    """`deepspeed`; for plain PyTorch `single`, `dp` or `ddp`."""
    zero_stage: int = 0
    """ZeRO stage, 0 to 3; 0 for plain PyTorch."""
    tensor_parallel: int = 1
    """Number of ranks that share each matrix."""
    pipeline_stages: int = 1
    """Number of stages into which the model's blocks are divided."""
    sequence_parallel: int = 1
    """Number of ranks that share each sequence."""

    @property
    def dp_world_size(self) -> int:
        """Number of ranks, or of groups of ranks, that read different samples."""
        return self.world_size // (self.tensor_parallel * self.pipeline_stages * self.sequence_parallel)

    @property
    def cuts_matrices(self) -> bool:
        """Return whether the optimizer of a rank steps parts of parameters, not whole matrices.

        DeepSpeed's bf16 optimizer, which pipeline stages use, shards its states like ZeRO 1.
        """
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
        ConfigError: The product of the degrees does not divide the number of ranks.
    """
    degrees = {name: get_dotted(file.tree, key) or 1 for key, name in DEGREES.items()}
    stage = get_dotted(file.tree, "zero_optimization.stage") or 0
    needed = math.prod(degrees.values())
    if world_size % needed:
        divided = {key: degrees[name] for key, name in DEGREES.items() if degrees[name] > 1}
        product = " x ".join(f"{key} {degree}" for key, degree in divided.items())
        next_multiple = -(-world_size // needed) * needed
        raise ConfigError(
            f"{file.location_of(next(iter(divided)))}: {product} needs a multiple of {needed} ranks, "
            f"and this job has {world_size}; start {next_multiple} ranks, or lower {' or '.join(divided)}"
        )
    return Split(world_size, precision, "deepspeed", stage, **degrees)
