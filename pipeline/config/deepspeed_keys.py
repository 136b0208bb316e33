"""This trainer's rules for the keys of a DeepSpeed JSON. deepspeed_schema.json lists the keys themselves."""

from __future__ import annotations

from typing import Any

# Section -> keys that this trainer reads. A section of DeepSpeed that is absent here is read completely.
READ_KEYS = {
    "compile": {"enabled"},
    "pipeline": {"partition", "stages"},
    "tensor_parallel": {"autotp_size", "partition_config", "preset_model", "tp_overlap_comm"},
    "tf32": {"enabled"},
    "torch": {"bucket_cap_mb", "find_unused_parameters", "parallel"},
}

# This trainer's own sections, which are not passed to DeepSpeed.
OWN_SECTIONS = {"compile", "tf32", "torch"}

# Keys that are allowed beside a `torch` section. All others are for DeepSpeed.
ALLOWED_BESIDE_TORCH = {
    "bf16", "compile", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
    "tf32", "torch", "train_batch_size", "train_micro_batch_size_per_gpu",
}  # fmt: skip

# Advice -> keys, separated by spaces, that DeepSpeed no longer has or that this trainer does not support or
# replaces by a setting of its own.
_INSTEAD = {
    "remove it, and set batch.global_batch_size in the recipe; a checkpoint resumes on any number of ranks": (
        "elasticity"
    ),
    "remove it, and compare settings with benchmarks/throughput.py": "autotuning",
    "use a curriculum over data.sources (docs/how-to/extending.md)": "curriculum_learning",
    "remove it; this trainer does not need it": "eigenvalue progressive_layer_drop sparse_gradients "
    "zero_optimization.legacy_stage1",
    "remove it; every row of metrics.jsonl has the peak memory": "memory_breakdown",
    "remove it; the exact loss needs DeepSpeed's mean over ranks": "gradient_allreduce_op",
    "a checkpoint could not restore frozen weights of 8 bits; use zero_quantized_weights": (
        "zero_optimization.zero_quantized_nontrainable_weights"
    ),
    "remove it; it is for generation in RLHF, which this trainer does not support": "hybrid_engine",
    "remove it; metrics.jsonl has every number, one row a line": "comet csv_monitor",
    "it holds back updates that no checkpoint contains, so a run could not be resumed; use "
    "offload_optimizer: {device: cpu} alone": "zero_optimization.offload_optimizer.super_offload "
    "zero_optimization.zenflow",
    "remove it, and quantize or compress the exported weights after training": (
        "compression_training quantize_training weight_quantization"
    ),
    "set batch.gradient_accumulation_steps in the recipe": "managed_gradient_accumulation",
    "set log.tensorboard in the recipe": "tensorboard",
    "set model.activation_checkpointing in the recipe": "pipeline.activation_checkpoint_interval",
    "set the wandb section of the recipe": "dump_state wandb",
    "remove it; the data section of the recipe decides which samples are read, and in which order": (
        "data_efficiency dataloader_drop_last"
    ),
    "remove it; this trainer does not shard experts": "expert_parallel",
    "remove it, and set checkpoint.every in the recipe; any split reads this trainer's checkpoints": (
        "checkpoint datastates_ckpt nebula"
    ),
    "use bf16 or fp16": "amp torch_autocast",
    "use communication_data_type: fp32": "fp32_allreduce",
    # DeepCompile moves ZeRO's gathering and reduction into graphs of the whole model and removes ZeRO's
    # hooks. But here the loss replaces the output layer from outside, evaluation calls the module between
    # steps, and the gradient norm and the check for non-finite gradients read ZeRO's partitions. DeepCompile
    # exists for CUDA only, so the tests could not compare its curve on a CPU.
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
"""Key that is an error unless it is switched off -> what to use instead."""

# Sections of DeepSpeed that switch their feature on by being present, whatever they contain.
ON_IF_PRESENT = {"zero_optimization.zenflow"}

# Keys that many files have and that have no effect here -> reason. Each is accepted with a note.
IGNORED = {
    "activation_checkpointing": "no model here uses DeepSpeed's; to recompute activations, set "
    "model.activation_checkpointing in the recipe",
    # These logs, timers and profilers would synchronize with the device in every micro-batch.
    "comms_logger": "time/communication_seconds has the time of collectives; profile.start_step traces each",
    "flops_profiler": "perf/mfu is computed from the model's FLOPs; for operators set profile.start_step",
    "steps_per_print": "log.every in the recipe sets the steps between two rows of the log",
    "wall_clock_breakdown": "the time/ columns have the seconds of each phase of a step",
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeed does not read it",
    "zero_optimization.elastic_checkpoint": "checkpoints here can be resumed on any number of ranks",
    "zero_optimization.load_from_fp32_weights": "checkpoints here always have the fp32 weights",
    "zero_optimization.pipeline_loading_checkpoint": "it is for DeepSpeed's own checkpoints",
    **dict.fromkeys(
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        "checkpoints here always have whole tensors, and the command export writes them in 16 bits",
    ),
}

# Name that DeepSpeed accepts although its pydantic models do not declare it -> name in its documentation.
SYNONYMS = {"aio.thread_count": "intra_op_parallelism", "bfloat16": "bf16"}

# Keys whose "auto" the device decides, and keys that do not accept "auto".
DEVICE_DECIDES_AUTO = {"bf16.enabled", "compile.enabled", "fp16.enabled", "tf32.enabled"}
NEVER_AUTO = {
    "pipeline.partition", "pipeline.stages", "sequence_parallel_size", "tensor_parallel.autotp_size",
    "zero_optimization.stage",
}  # fmt: skip

_COMPILE = 'write "compile": {"enabled": true}'
# Key that other trainers write into a DeepSpeed JSON -> advice.
ALIASES = dict.fromkeys(("compile.backend", "compile.disable", "compile.kwargs"), _COMPILE)
ALIASES["fp16.opt_level"] = "it is a setting of apex; remove it"

_POSITIVE: dict[str, Any] = {"type": "integer", "exclusiveMinimum": 0}
_DTYPE: dict[str, Any] = {"type": "string", "enum": ["fp32", "fp16", "bf16"]}
_ANY_CASE: dict[str, Any] = {"type": "string", "anyCase": True}

# Optimizer of DeepSpeed, in lower case -> optimizer of the recipe.
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adafactor": "adafactor"}
# Schedule of DeepSpeed -> schedule of the recipe.
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

# Parameter of the optimizer or schedule -> the only value that this trainer implements.
_FIXED_VALUES: dict[str, Any] = {
    "optimizer.legacy_fusion": False,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.amsgrad": False,
    "optimizer.params.bias_correction": True,
    "optimizer.params.dampening": 0,
    "optimizer.params.nesterov": False,
    "scheduler.params.last_batch_iteration": -1,
}
_FIXED = {
    key: {
        "enum": [value],
        "advice": "remove it: the optimizers and schedules of the recipe have this value only",
    }
    for key, value in _FIXED_VALUES.items()
}
_OPTIMIZER_NUMBERS = ("eps", "lr", "max_grad_norm", "momentum", "weight_decay")
_SCHEDULER_NUMBERS = ("cos_min_ratio", "warmup_max_lr", "warmup_min_lr", "warmup_min_ratio")
_REMOVE_SECTION = "or remove the section, and set {} in the recipe"
# Rules of all keys within `optimizer` and `scheduler`, whose values the recipe owns.
OPTIMIZER_AND_SCHEDULER: dict[str, dict[str, Any]] = {
    **_FIXED,
    **{f"optimizer.params.{name}": {"type": "number"} for name in _OPTIMIZER_NUMBERS},
    **{f"scheduler.params.{name}": {"type": "number"} for name in _SCHEDULER_NUMBERS},
    "optimizer.params": {"type": "object"},
    "optimizer.params.betas": {"type": "array"},
    "optimizer.params.torch_adam": {"type": "boolean"},
    "optimizer.type": {
        "type": "string",
        "enum": [*OPTIMIZERS],
        "anyCase": True,
        "advice": _REMOVE_SECTION.format("optimizer.kind"),
    },
    "scheduler.params": {"type": "object"},
    "scheduler.params.total_num_steps": {"type": "integer"},
    "scheduler.params.warmup_num_steps": {
        "type": "integer",
        "advice": 'for a share of the run write "auto" here, and schedule.warmup in the recipe',
    },
    "scheduler.params.warmup_type": {"type": "string", "enum": ["linear", "log"]},
    "scheduler.type": {
        "type": "string",
        "enum": [*SCHEDULES],
        "advice": _REMOVE_SECTION.format("schedule.kind"),
    },
}

# Keys whose value must be an integer above 0.
_COUNTS = [
    "activation_checkpointing.number_checkpoints", "aio.block_size", "aio.intra_op_parallelism",
    "aio.queue_depth", "fp16.hysteresis",
    "fp16.loss_scale_window", "fp16.min_loss_scale", "gradient_accumulation_steps", "sequence_parallel_size",
    "steps_per_print", "tensor_parallel.autotp_size", "train_batch_size", "train_micro_batch_size_per_gpu",
    "vocabulary_size", "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_param.buffer_count", "zero_optimization.offload_param.buffer_size",
]  # fmt: skip
# Limits that DeepSpeed does not check, as JSON Schema with the further entries `anyCase` and `advice`. A
# value outside of its limits fails later, or has no effect.
LIMITS: dict[str, dict[str, Any]] = {
    **OPTIMIZER_AND_SCHEDULER,
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
    # Quantity that is balanced over the stages: parameters, or (`uniform`) the number of blocks.
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
        "advice": "remove it: the check for non-finite gradients needs the norm",
    },
    "zero_optimization.leaf_module.classes": {"type": ["string", "array"]},
    "zero_optimization.leaf_module.name_suffixes": {"type": ["string", "array"]},
    "zero_optimization.leaf_module.names": {"type": ["string", "array"]},
}

# JSON key -> key of the recipe for the same number, which the recipe owns.
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
"""JSON key -> key of the recipe, for everything that a run adopts from a JSON that states it."""
