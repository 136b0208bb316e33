"""DeepSpeed's native ops that a split needs: the engine builds them, the doctor checks what they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NativeOp:
    """One extension that DeepSpeed compiles at its first use."""

    label: str
    builder: str
    """Name of the builder class in deepspeed.ops.op_builder."""
    folders: tuple[str, ...]
    """Folders below torch's extensions directory, in the order they are built."""
    duration: str
    needs_nvcc: bool = False


CPU_ADAM = NativeOp("DeepSpeed's CPU Adam", "CPUAdamBuilder", ("cpu_adam",), "one or two minutes")
ASYNC_IO = NativeOp(
    "DeepSpeed's async_io", "AsyncIOBuilder", ("pin_memory", "async_io"), "three to five minutes"
)
QUANTIZER = NativeOp(
    "DeepSpeed's quantiser (ZeRO++)",
    "QuantizerBuilder",
    ("quantizer",),
    "one or two minutes",
    needs_nvcc=True,
)


def needed_ops(config: Mapping[str, Any]) -> list[NativeOp]:
    """Return the native ops that a DeepSpeed JSON needs, in the order in which they are built."""
    zero = config.get("zero_optimization", {})
    optimizer = zero.get("offload_optimizer", {}).get("device", "none")
    parameters = zero.get("offload_param", {}).get("device", "none")
    ops = []
    if optimizer in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
        ops.append(CPU_ADAM)
    if "nvme" in (optimizer, parameters):
        ops.append(ASYNC_IO)
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        ops.append(QUANTIZER)
    return ops
