"""DeepSpeed's native ops that a split needs.

The engine builds them, and the doctor checks that every machine can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NativeOp:
    """Extension that DeepSpeed compiles at its first use on a machine."""

    label: str
    """Name of the op in messages."""
    builder: str
    """Name of the builder's class in deepspeed.ops.op_builder."""
    folders: tuple[str, ...]
    """Folders below torch's extensions directory, in the order in which they are built."""
    duration: str
    """Usual duration of the build, in words."""
    needs_nvcc: bool = False
    """Whether the build needs nvcc, for CUDA sources."""


CPU_ADAM = NativeOp("DeepSpeed's CPU Adam", "CPUAdamBuilder", ("cpu_adam",), "one or two minutes")
ASYNC_IO = NativeOp(
    "DeepSpeed's async_io", "AsyncIOBuilder", ("pin_memory", "async_io"), "three to five minutes"
)
QUANTIZER = NativeOp(
    "DeepSpeed's quantizer (ZeRO++)",
    "QuantizerBuilder",
    ("quantizer",),
    "one or two minutes",
    needs_nvcc=True,
)


def needed_ops(config: Mapping[str, Any]) -> list[NativeOp]:
    """Return the native ops that a run needs, in the order in which they are built.

    Args:
        config: Content of the DeepSpeed JSON.
    """
    zero = config.get("zero_optimization", {})
    optimizer_device = zero.get("offload_optimizer", {}).get("device", "none")
    parameter_device = zero.get("offload_param", {}).get("device", "none")
    ops = []
    if optimizer_device in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
        ops.append(CPU_ADAM)
    if "nvme" in (optimizer_device, parameter_device):
        ops.append(ASYNC_IO)
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        ops.append(QUANTIZER)
    return ops
