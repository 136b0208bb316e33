"""Imports accelerate's YAML (`accelerate config`), which says how the work is split, not what is trained."""

from __future__ import annotations

from pipeline.cli.import_configs.conversions import parse_table, to_int, to_text
from pipeline.cli.import_configs.mapping import ImportDraft, TrainerTable


def import_accelerate(draft: ImportDraft) -> None:
    """Set stage, offloading and precision of the DeepSpeed JSON."""
    draft.has_recipe = False
    kind = draft.read_value("distributed_type", to_text)
    stages = {"DEEPSPEED": draft.read_value("deepspeed_config.zero_stage", to_int), "FSDP": 3}
    if kind not in (*stages, "NO", "MULTI_GPU", "MULTI_CPU"):
        raise draft.make_error(
            "distributed_type",
            f"{kind} is not supported; expected {', '.join(stages)}, NO, MULTI_GPU or MULTI_CPU",
        )
    draft.base = draft.read_value("deepspeed_config.deepspeed_config_file", to_text) or {
        "zero_optimization": {}
    }
    if isinstance(draft.base, dict):
        draft.json["zero_optimization.stage"] = stages.get(kind, 0)
    precision = draft.read_value("mixed_precision") or "no"
    if precision not in ("no", "fp16", "bf16"):
        raise draft.make_error(
            "mixed_precision",
            f"{precision} is not supported; expected no, fp16 or bf16; for fp8 write model.fp8 in the recipe",
        )
    draft.json |= {f"{name}.enabled": precision == name for name in ("bf16", "fp16")}
    draft.gpus = draft.read_value("num_processes", to_int) or draft.gpus


TOOL = TrainerTable(
    title="accelerate",
    rows=parse_table("""
JSON: zero_optimization.stage: distributed_type deepspeed_config.zero_stage
JSON: zero_optimization: deepspeed_config.deepspeed_config_file
JSON: zero_optimization.offload_optimizer as device: deepspeed_config.offload_optimizer_device
JSON: zero_optimization.offload_param as device: deepspeed_config.offload_param_device
JSON: bf16.enabled: mixed_precision
JSON: train_batch_size: num_processes
"""),
    import_values=import_accelerate,
    defaults={"distributed_type": "NO", "deepspeed_config.zero_stage": 2},
)
