"""Imports accelerate's YAML (`accelerate config`). It says how the work is split, and not what is trained."""

from __future__ import annotations

from pipeline.cli.import_configs.conversions import parse_table, to_int, to_text
from pipeline.cli.import_configs.mapping import ImportDraft, TrainerTable


def import_accelerate(draft: ImportDraft) -> None:
    """Import ZeRO stage and precision for the DeepSpeed JSON, and the number of GPUs.

    If the file names a DeepSpeed JSON, that JSON is the base and keeps its stage. Devices for offloading are
    already imported, since their rows have a conversion.

    Raises:
        ConfigError: The kind of parallelism or the precision is not supported.
    """
    draft.has_recipe = False
    kind = draft.read_value("distributed_type", to_text)
    stages = {
        "DEEPSPEED": draft.read_value("deepspeed_config.zero_stage", to_int),
        "FSDP": 3,
        "NO": 0,
        "MULTI_GPU": 0,
        "MULTI_CPU": 0,
    }
    if kind not in stages:
        raise draft.make_error(
            "distributed_type", f"{kind} is not supported; expected one of {', '.join(stages)}"
        )
    json_file = draft.read_value("deepspeed_config.deepspeed_config_file", to_text)
    if json_file:
        draft.base = json_file
    else:
        draft.base = {"zero_optimization": {}}
        draft.json["zero_optimization.stage"] = stages[kind]
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
    # Keys of the DeepSpeed JSON [as conversion]: accelerate's keys; see parse_table.
    rows=parse_table("""
JSON: zero_optimization.stage: distributed_type deepspeed_config.zero_stage
JSON: zero_optimization: deepspeed_config.deepspeed_config_file
JSON: zero_optimization.offload_optimizer as device: deepspeed_config.offload_optimizer_device
JSON: zero_optimization.offload_param as device: deepspeed_config.offload_param_device
JSON: bf16.enabled: mixed_precision
JSON: train_batch_size: num_processes
"""),
    import_values=import_accelerate,
    # The import's own defaults for a file that leaves the keys out.
    defaults={"distributed_type": "NO", "deepspeed_config.zero_stage": 2},
)
