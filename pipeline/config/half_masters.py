"""Master weights and optimizer states in half precision, which the JSON's bf16 and fp16 sections ask for.

Answers for where they cannot stand: DeepSpeed passes over them there in silence, or ends on an assertion.
"""

from __future__ import annotations

from pipeline.config.loading import ConfigFile, Tree, get_dotted
from pipeline.errors import ConfigError

MASTERS = {name: f"{name}.{name}_master_weights_and_grads" for name in ("bf16", "fp16")}
STATES = "bf16.bf16_optimizer_states"


def has_half_states(filled: Tree) -> bool:
    """Whether what the optimizer keeps of each parameter is bf16 as well."""
    return bool(get_dotted(filled, STATES))


def has_half_masters(filled: Tree) -> bool:
    """Whether there are no fp32 weights."""
    return any(get_dotted(filled, key) for key in MASTERS.values())


def refuse_half_masters(file: ConfigFile, filled: Tree, kind: str, precision: str) -> None:
    """Holds them to the rest of a file that is filled in, and was checked (deepspeed_conflicts.py) before.

    Args:
        kind: Of optimizer.
        precision: What the run computes in.

    Raises:
        ConfigError: they cannot stand beside it.
    """
    for name, key in MASTERS.items():
        if not get_dotted(filled, key):
            continue
        if wrong := _wrong(filled, name, kind, precision):
            raise ConfigError(f"{file.at(key)}: {wrong}")


def _wrong(filled: Tree, name: str, kind: str, precision: str) -> str | None:
    if precision != name:
        return f"this run computes in {precision}; set {name}.enabled: true, or drop the key"
    if (get_dotted(filled, "pipeline.stages") or 1) > 1:
        return "pipeline stages keep their masters in fp32; drop it, or take ZeRO without stages"
    stage = get_dotted(filled, "zero_optimization.stage")
    if name == "bf16" and stage == 1 and get_dotted(filled, "data_types.grad_accum_dtype") == "fp32":
        return (
            "ZeRO 1 that sums gradients in fp32 keeps its masters in fp32; set zero_optimization.stage 2, or "
            "drop data_types.grad_accum_dtype"
        )
    device = get_dotted(filled, "zero_optimization.offload_optimizer.device")
    if device == "nvme":
        return "what is swapped to a disk is fp32; set zero_optimization.offload_optimizer.device: cpu"
    if device != "cpu" and not has_half_states(filled):
        more = f"{STATES}: true beside it, or " if name == "bf16" else ""
        return (
            "DeepSpeed steps it with fp32 states in host memory alone; set "
            f"{more}zero_optimization.offload_optimizer.device: cpu"
        )
    if device == "cpu" and kind != "adamw":
        return "in host memory it is stepped by DeepSpeed's CPU Adam alone; set optimizer.kind: adamw"
    ratio = get_dotted(filled, "zero_optimization.offload_optimizer.ratio")
    if device == "cpu" and ratio not in (None, 1):
        key = "zero_optimization.offload_optimizer.ratio"
        return f"the part that stays on the device has fp32 states; drop {key}"
    return None
