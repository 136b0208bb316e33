"""accelerate's YAML (`accelerate config`): how the work is split, and nothing of what is trained."""

from __future__ import annotations

from pipeline.cli.import_configs.conversions import rows, text, whole
from pipeline.cli.import_configs.mapping import Draft, Tool


def settle(draft: Draft) -> None:
    """Make the DeepSpeed JSON: the stage, what is offloaded, and the precision."""
    draft.has_recipe = False
    kind = draft.given("distributed_type", text)
    stages = {"DEEPSPEED": draft.given("deepspeed_config.zero_stage", whole), "FSDP": 3}
    if kind not in (*stages, "NO", "MULTI_GPU", "MULTI_CPU"):
        raise draft.refused(
            "distributed_type", f"{kind} is not built here; {', '.join(stages)}, MULTI_GPU are"
        )
    draft.base = draft.given("deepspeed_config.deepspeed_config_file", text) or {"zero_optimization": {}}
    if isinstance(draft.base, dict):
        draft.json["zero_optimization.stage"] = stages.get(kind, 0)
    precision = draft.given("mixed_precision") or "no"
    if precision not in ("no", "fp16", "bf16"):
        raise draft.refused(
            "mixed_precision", f"{precision}: no, fp16 or bf16; fp8 is model.fp8 of the recipe"
        )
    draft.json |= {f"{name}.enabled": precision == name for name in ("bf16", "fp16")}
    draft.gpus = draft.given("num_processes", whole) or draft.gpus


TOOL = Tool(
    title="accelerate",
    rows=rows("""
JSON: zero_optimization.stage: distributed_type deepspeed_config.zero_stage
JSON: zero_optimization: deepspeed_config.deepspeed_config_file
JSON: zero_optimization.offload_optimizer as device: deepspeed_config.offload_optimizer_device
JSON: zero_optimization.offload_param as device: deepspeed_config.offload_param_device
JSON: bf16.enabled: mixed_precision
JSON: train_batch_size: num_processes
"""),
    rule=settle,
    defaults={"distributed_type": "NO", "deepspeed_config.zero_stage": 2},
)
