"""accelerate's YAML (`accelerate config`): how the work is split, and nothing of what is trained."""

from __future__ import annotations

from typing import Any

from pipeline.cli.import_configs.mapping import Draft, Section, Tool, keys, number, reasons, text, whole

SPLITS = {
    "NO": "ddp",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "MULTI_XPU": "ddp",
    "MULTI_NPU": "ddp",
    "DEEPSPEED": "",
    "FSDP": "",
}
CUTS = {
    "FULL_SHARD": 3,
    "HYBRID_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "HYBRID_SHARD_ZERO2": 2,
    "NO_SHARD": 0,
    "1": 3,
    "2": 2,
    "3": 0,
}
"""FSDP's strategies -> ZeRO's stages."""


def settle(draft: Draft) -> None:
    """Make the DeepSpeed JSON: the stage, what is offloaded, and the precision."""
    draft.has_recipe = False
    kind = draft.given("distributed_type", text) or "NO"
    if kind not in SPLITS:
        raise draft.top.refused("distributed_type", f"{kind} is not built here; {', '.join(SPLITS)} are")
    if kind == "DEEPSPEED":
        zero = _deepspeed(draft)
    elif kind == "FSDP":
        zero = _fsdp(draft)
    else:
        zero = {"stage": 0}
    if (count := draft.given("num_processes", whole)) is not None:
        draft.gpus = count
    precision = draft.given("mixed_precision") or "no"
    if precision not in ("no", False, "fp16", "bf16"):
        raise draft.top.refused(
            "mixed_precision", f"{precision}: no, fp16 or bf16; fp8 is model.fp8 of the recipe"
        )
    draft.json |= {"bf16": precision == "bf16", "fp16": precision == "fp16", "split": "ddp"}
    draft.json.setdefault("theirs", {"zero_optimization": zero})


def _deepspeed(draft: Draft) -> dict[str, Any]:
    [section] = draft.top.sections("deepspeed_config") or [Section(draft.file, {})]
    if (file := section.given("deepspeed_config_file", text)) is not None:
        if draft.found(file) is None:
            raise section.refused(
                "deepspeed_config_file", f"{file} is not here; it is for --deepspeed as it is"
            )
        draft.json["theirs"] = file
        return {}
    stage = section.given("zero_stage", whole)
    zero: dict[str, Any] = {"stage": 2 if stage is None else stage}
    for theirs, ours in (("offload_optimizer_device", "optimizer"), ("offload_param_device", "param")):
        device = section.given(theirs)
        if device not in (None, "none", False):
            zero[f"offload_{ours}"] = {"device": device}
            if device == "nvme":
                path = section.given(f"offload_{ours}_nvme_path", text)
                zero[f"offload_{ours}"]["nvme_path"] = path or "/local_nvme"
    for theirs, ours in (("gradient_accumulation_steps", "batch.gradient_accumulation_steps"),):
        if section.given(theirs, whole) not in (None, 1):
            section.drop(theirs, f"set {ours} in the recipe")
    if section.given("gradient_clipping", number) is not None:
        section.drop("gradient_clipping", "set optimizer.max_grad_norm in the recipe")
    for key in ("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"):
        section.given(key)  # models are built cut, and checkpoints are whole, whatever these say
    return zero


def _fsdp(draft: Draft) -> dict[str, Any]:
    [section] = draft.top.sections("fsdp_config") or [Section(draft.file, {})]
    given, reshards = (section.given(f"fsdp_{key}") for key in ("sharding_strategy", "reshard_after_forward"))
    if given is None:
        given = (
            reshards if isinstance(reshards, str) else "SHARD_GRAD_OP" if reshards is False else "FULL_SHARD"
        )
    if str(given) not in CUTS:
        raise section.refused("fsdp_sharding_strategy", f"{given}: {', '.join(CUTS)} are known")
    if str(given).startswith("HYBRID"):
        section.drop(
            "fsdp_sharding_strategy", "cut over all ranks; zero_hpz_partition_size keeps a node's copy"
        )
    zero: dict[str, Any] = {"stage": CUTS[str(given)]}
    if section.given("fsdp_offload_params") is True:
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    if section.given("fsdp_activation_checkpointing") is True:
        section.drop(
            "fsdp_activation_checkpointing", "set model.activation_checkpointing: full in the recipe"
        )
    return zero


TOOL = Tool(
    title="accelerate",
    keys=keys("""
JSON: zero_optimization: distributed_type deepspeed_config fsdp_config
JSON: bf16.enabled: mixed_precision
JSON: train_batch_size: num_processes
"""),
    without=reasons("""
the launcher's arguments say it (docs/multi_node.md): compute_environment debug gpu_ids machine_rank
  main_process_ip main_process_port num_machines rdzv_backend same_network main_training_function use_cpu
  enable_cpu_affinity commands command_file
not built here: downcast_bf16 dynamo_config fp8_config ipex_config megatron_lm_config mpirun_config tpu_env
  tpu_name tpu_use_cluster tpu_use_sudo tpu_zone parallelism_config tp_config
"""),
    marks="compute_environment distributed_type mixed_precision num_processes num_machines",
    defaults={},
    settle=settle,
)
