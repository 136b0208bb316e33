"""What this trainer says about DeepSpeed's keys; deepspeed_schema.json lists the keys themselves."""

from __future__ import annotations

from typing import Any

# This trainer's own sections, and those of DeepSpeed's of which only some keys are passed on.
READ_KEYS = {
    "compile": {"enabled"},
    "pipeline": {"partition", "stages"},
    "tensor_parallel": {"autotp_size", "partition_config", "preset_model", "tp_overlap_comm"},
    "tf32": {"enabled"},
    "torch": {"bucket_cap_mb", "find_unused_parameters", "parallel"},
}

# Sections that DeepSpeed does not get.
OWN_SECTIONS = {"compile", "tf32", "torch"}

# What may stand beside a `torch` section; everything else speaks to DeepSpeed.
ALLOWED_BESIDE_TORCH = {
    "bf16", "compile", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
    "tf32", "torch", "train_batch_size", "train_micro_batch_size_per_gpu",
}  # fmt: skip

# What to use -> keys that DeepSpeed no longer has, that this trainer does itself, or does not wire up.
_INSTEAD = {
    "any checkpoint starts on other ranks; set batch.global_batch_size in the recipe": "elasticity",
    "benchmarks/throughput.py compares settings": "autotuning",
    "docs/extending.md shows a curriculum over data.sources": "curriculum_learning",
    "drop it; nothing here needs it": "eigenvalue progressive_layer_drop sparse_gradients "
    "zero_optimization.legacy_stage1",
    "every row of metrics.jsonl has the peak of memory": "memory_breakdown",
    "every token counts once, which needs DeepSpeed's mean over ranks": "gradient_allreduce_op",
    "frozen weights would be held in 8 bits, which a checkpoint does not keep; use zero_quantized_weights": (
        "zero_optimization.zero_quantized_nontrainable_weights"
    ),
    "it serves RLHF generation, which this trainer does not do": "hybrid_engine",
    "metrics.jsonl holds every number, a row a line": "comet csv_monitor",
    "no checkpoint sees what it holds back, so no run could go on; use offload_optimizer: {device: cpu} "
    "alone": "zero_optimization.offload_optimizer.super_offload zero_optimization.zenflow",
    "quantise or compress after training, with the exported weights": "compression_training "
    "quantize_training weight_quantization",
    "set batch.gradient_accumulation_steps in the recipe": "managed_gradient_accumulation",
    "set log.tensorboard in the recipe": "tensorboard",
    "set model.activation_checkpointing in the recipe": "pipeline.activation_checkpoint_interval",
    "set the wandb section of the recipe": "dump_state wandb",
    "the recipe's data section decides what is read, and in what order": "data_efficiency "
    "dataloader_drop_last",
    "this trainer does not split experts yet": "expert_parallel",
    "this trainer writes checkpoints itself, which any split reads; set checkpoint.every in the recipe": (
        "checkpoint datastates_ckpt nebula"
    ),
    "use bf16 or fp16": "amp torch_autocast",
    "use communication_data_type: fp32": "fp32_allreduce",
    "use compile: {enabled: true}, which compiles the blocks": "compile.deepcompile graph_harvesting",
    "use model.attention in the recipe": "sparse_attention",
    "use zero_hpz_partition_size": "zero_optimization.mics_hierarchical_params_gather "
    "zero_optimization.mics_shard_size",
    "use zero_optimization.offload_optimizer: {device: cpu}": "cpu_offload zero_optimization.cpu_offload",
    "use zero_optimization.offload_param: {device: cpu}": "zero_optimization.cpu_offload_param "
    "zero_optimization.cpu_offload_params",
    "use zero_quantized_gradients alone": "zero_optimization.zeropp_loco_param",
}
UNSUPPORTED = dict(sorted((key, text) for text, words in _INSTEAD.items() for key in words.split()))
"""Key that is refused unless it is switched off -> what to use instead."""

# Sections of DeepSpeed's that are on where they stand, whatever is in them.
ON_IF_PRESENT = {"zero_optimization.zenflow"}

# What many files have, and nothing here reads: taken, with a line.
IGNORED = {
    "activation_checkpointing": "no model here calls DeepSpeed's; to recompute, set "
    "model.activation_checkpointing in the recipe",
    "comms_logger": "time/communication_seconds has their seconds; profile.start_step traces each collective",
    "flops_profiler": "perf/mfu comes from the model's FLOPs; for operators set profile.start_step",
    "steps_per_print": "the recipe's log.every says which steps are told",
    "wall_clock_breakdown": "the time/ columns say where a step's seconds go",
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeed does not read it",
    "zero_optimization.elastic_checkpoint": "a checkpoint here starts on any number of ranks",
    "zero_optimization.load_from_fp32_weights": "a checkpoint here always has the fp32 weights",
    "zero_optimization.pipeline_loading_checkpoint": "it is for DeepSpeed's own checkpoints",
    **dict.fromkeys(
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        "a checkpoint here always has whole tensors, and the command export writes them in 16 bits",
    ),
}

# Names that DeepSpeed still takes, besides those its models declare.
SYNONYMS = {"aio.thread_count": "intra_op_parallelism", "bfloat16": "bf16"}

# Keys whose "auto" the device decides, and those that have none.
DEVICE_DECIDES_AUTO = {"bf16.enabled", "compile.enabled", "fp16.enabled", "tf32.enabled"}
NEVER_AUTO = {
    "pipeline.partition", "pipeline.stages", "sequence_parallel_size", "tensor_parallel.autotp_size",
    "zero_optimization.stage",
}  # fmt: skip

_COMPILE = 'write "compile": {"enabled": true}'
# What other trainers call things in this file, and what to write here.
ALIASES = dict.fromkeys(("compile.backend", "compile.disable", "compile.kwargs"), _COMPILE)
ALIASES["fp16.opt_level"] = "only apex read it; drop it"

_POSITIVE: dict[str, Any] = {"type": "integer", "exclusiveMinimum": 0}
_DTYPE: dict[str, Any] = {"type": "string", "enum": ["fp32", "fp16", "bf16"]}
_ANY_CASE: dict[str, Any] = {"type": "string", "anyCase": True}

# DeepSpeed's optimizer, in any case -> the recipe's.
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adafactor": "adafactor"}
# DeepSpeed's schedule -> the recipe's shape after warm-up.
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

# Values of parameters that say what is done here anyway.
_AS_BUILT: dict[str, Any] = {
    "optimizer.legacy_fusion": False,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.amsgrad": False,
    "optimizer.params.bias_correction": True,
    "optimizer.params.dampening": 0,
    "optimizer.params.nesterov": False,
    "scheduler.params.last_batch_iteration": -1,
}
_FIXED = {
    key: {"enum": [value], "advice": "drop it: the recipe's optimizer and schedule have no other"}
    for key, value in _AS_BUILT.items()
}
_OF_OPTIMIZER = ("eps", "lr", "max_grad_norm", "momentum", "weight_decay")
_OF_SCHEDULER = ("cos_min_ratio", "warmup_max_lr", "warmup_min_lr", "warmup_min_ratio")
_OTHER = "or drop the section, and set {} in the recipe"
# All that may be below `optimizer` and `scheduler`.
OF_THE_RECIPE: dict[str, dict[str, Any]] = {
    **_FIXED,
    **{f"optimizer.params.{name}": {"type": "number"} for name in _OF_OPTIMIZER},
    **{f"scheduler.params.{name}": {"type": "number"} for name in _OF_SCHEDULER},
    "optimizer.params": {"type": "object"},
    "optimizer.params.betas": {"type": "array"},
    "optimizer.params.torch_adam": {"type": "boolean"},
    "optimizer.type": {
        **{"type": "string", "enum": [*OPTIMIZERS], "anyCase": True},
        "advice": _OTHER.format("optimizer.kind"),
    },
    "scheduler.params": {"type": "object"},
    "scheduler.params.total_num_steps": {"type": "integer"},
    "scheduler.params.warmup_num_steps": {
        "type": "integer",
        "advice": 'for a share of the run write "auto" here, and schedule.warmup in the recipe',
    },
    "scheduler.params.warmup_type": {"type": "string", "enum": ["linear", "log"]},
    "scheduler.type": {
        **{"type": "string", "enum": [*SCHEDULES]},
        "advice": _OTHER.format("schedule.kind"),
    },
}

# Limits that DeepSpeed does not check itself, and fails on later or silently: added to the schema.
_COUNTS = [
    "activation_checkpointing.number_checkpoints", "aio.block_size", "aio.intra_op_parallelism",
    "aio.queue_depth", "fp16.hysteresis",
    "fp16.loss_scale_window", "fp16.min_loss_scale", "gradient_accumulation_steps", "sequence_parallel_size",
    "steps_per_print", "tensor_parallel.autotp_size", "train_batch_size", "train_micro_batch_size_per_gpu",
    "vocabulary_size", "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_param.buffer_count", "zero_optimization.offload_param.buffer_size",
]  # fmt: skip
LIMITS: dict[str, dict[str, Any]] = {
    **OF_THE_RECIPE,
    **dict.fromkeys(_COUNTS, _POSITIVE),
    "communication_data_type": _DTYPE | _ANY_CASE,
    "compile": {"type": "object"},
    "compile.enabled": {"type": "boolean"},
    "data_types.buffer_dtype": _DTYPE,
    "data_types.grad_accum_dtype": _DTYPE,
    "data_types.keep_in_fp32_modules": {"type": "array", "items": "string"},
    "data_types.param_dtype": _DTYPE,
    "fp16.initial_scale_power": {"minimum": 0, "maximum": 127},
    "fp16.loss_scale": {"minimum": 0},
    "gradient_predivide_factor": {"exclusiveMinimum": 0},
    "log_level": {"enum": ["debug", "info", "warning", "error", "critical"]} | _ANY_CASE,
    # What stages are made alike in; `uniform`: in blocks.
    "pipeline.partition": {"enum": ["parameters", "uniform"]},
    "pipeline.stages": _POSITIVE | {"default": 1},
    "seq_parallel_communication_data_type": _DTYPE,
    "tf32": {"type": "object"},
    "tf32.enabled": {"type": "boolean"},
    "torch": {"type": "object"},
    "torch.bucket_cap_mb": {"type": "number", "exclusiveMinimum": 0},
    "torch.find_unused_parameters": {"type": "boolean"},
    "torch.parallel": {"type": "string", "enum": ["auto", "single", "dp", "ddp"]},
    "zero_optimization.allgather_bucket_size": {"exclusiveMinimum": 0, "multipleOf": 2},
    "zero_optimization.compute_grad_norm": {
        "enum": [True],
        "advice": "drop it: without a norm nothing guards against gradients that are not finite",
    },
    "zero_optimization.leaf_module.classes": {"type": ["string", "array"]},
    "zero_optimization.leaf_module.name_suffixes": {"type": ["string", "array"]},
    "zero_optimization.leaf_module.names": {"type": ["string", "array"]},
}

# JSON key -> the recipe's key for the same number.
RECIPE_OWNS = {
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "gradient_clipping": "optimizer.max_grad_norm",
    "scheduler.params.warmup_max_lr": "optimizer.learning_rate",
    "optimizer.params.lr": "optimizer.learning_rate",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.momentum": "optimizer.momentum",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "optimizer.params.max_grad_norm": "optimizer.max_grad_norm",
    "scheduler.params.warmup_num_steps": "schedule.warmup",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.cos_min_ratio": "schedule.min_learning_rate_ratio",
}
ADOPTED = RECIPE_OWNS | {"optimizer.type": "optimizer.kind", "scheduler.type": "schedule.kind"}
"""What a run takes from a JSON that states it -> the recipe's key."""
