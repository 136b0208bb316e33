"""What this trainer says about DeepSpeed's keys; deepspeed_schema.json lists the keys themselves."""

from __future__ import annotations

from typing import Any

# This trainer's own sections, and those of DeepSpeed's of which only some keys are passed on.
SECTIONS = {
    "compile": {"enabled"},
    "pipeline": {"partition", "stages"},
    "tensor_parallel": {"autotp_size", "partition_config", "preset_model", "tp_overlap_comm"},
    "tf32": {"enabled"},
    "torch": {"bucket_cap_mb", "find_unused_parameters", "parallel"},
}

# Sections that DeepSpeed does not get.
OWN = {"compile", "tf32", "torch"}

OWN_MEANINGS = {
    "compile.enabled": "`true`: have torch.compile fuse what a model's repeated blocks do, and the loss of "
    'logits where a model needs them, `false`: not, `"auto"`: on a GPU, where the split allows it. Default: '
    '`"auto"`. DeepSpeed\'s section of this name has no such key.',
    "tf32.enabled": '`true` or `"auto"`: let a GPU multiply fp32 matrices in TF32 (10 bits of mantissa): '
    "faster, and no longer fp32's digits. A CPU has none. Default: `false`. No key of DeepSpeed's.",
    "torch": "Plain PyTorch in place of DeepSpeed: the keys `parallel`, `bucket_cap_mb` and "
    "`find_unused_parameters` as in the recipe's `engine`. Beside it only `bf16`, `tf32`, `compile` and what "
    "is the recipe's. No key of DeepSpeed's.",
}

# What may stand beside a `torch` section; everything else speaks to DeepSpeed.
WITH_TORCH = {
    "bf16", "compile", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
    "tf32", "torch", "train_batch_size", "train_micro_batch_size_per_gpu",
}  # fmt: skip

# What DeepSpeed 0.19 no longer has, and what to use instead.
REMOVED = {
    "amp": "use bf16 or fp16",
    "compression_training": "compress after training, with the exported weights",
    "cpu_offload": "use zero_optimization.offload_optimizer: {device: cpu}",
    "curriculum_learning": "drop it; docs/extending.md shows a curriculum over data.sources",
    "eigenvalue": "drop it",
    "elasticity": "any checkpoint starts on other ranks; set global_batch_size in the recipe",
    "fp32_allreduce": "use communication_data_type: fp32",
    "graph_harvesting": "use compile",
    "nebula": "set checkpoint.every in the recipe",
    "progressive_layer_drop": "drop it",
    "quantize_training": "quantise after training, with the exported weights",
    "sparse_attention": "use model.attention in the recipe",
    "sparse_gradients": "an nn.Embedding(sparse=True) needs no setting",
    "zero_optimization.cpu_offload_params": "use zero_optimization.offload_param: {device: cpu}",
    "zero_optimization.mics_hierarchical_params_gather": "use zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "use zero_quantized_gradients alone",
}

# What DeepSpeed has and this trainer does itself, or does not wire up.
NOT_HERE = {
    "autotuning": "benchmarks/throughput.py compares settings",
    "checkpoint": "this trainer writes checkpoints itself, which any split reads; set the recipe's "
    "section checkpoint",
    "compile.deepcompile": "it was never shown to give the same curve here; compile: {enabled: true} "
    "compiles the blocks, which ZeRO 3 then gathers one by one",
    "comet": "metrics.jsonl holds every number",
    "csv_monitor": "metrics.jsonl holds every number, a row a line",
    "data_efficiency": "the recipe's data section decides what is read, and in what order",
    "dataloader_drop_last": "the recipe's data section decides what is read, and in what order",
    "datastates_ckpt": "this trainer writes checkpoints itself; set checkpoint.every in the recipe",
    "dump_state": "--dry-run prints what is filled in, and the section wandb keeps it",
    "expert_parallel": "this trainer does not split experts yet",
    "gradient_allreduce_op": "every token counts once, which needs DeepSpeed's mean over ranks",
    "hybrid_engine": "it serves RLHF generation, which this trainer does not do",
    "memory_breakdown": "every row of metrics.jsonl has the peak of memory",
    "managed_gradient_accumulation": "set batch.gradient_accumulation_steps in the recipe",
    "pipeline.activation_checkpoint_interval": "set model.activation_checkpointing in the recipe",
    "tensorboard": "set log.tensorboard in the recipe",
    "torch_autocast": "use bf16 or fp16",
    "wandb": "set the wandb section of the recipe",
    "weight_quantization": "it serves inference; quantise after training, with the exported weights",
    "zero_optimization.legacy_stage1": "DeepSpeed has one stage 1; drop it",
    "zero_optimization.offload_optimizer.super_offload": "DeepSpeed keeps its moments where no checkpoint "
    "sees them; use offload_optimizer: {device: cpu} without it",
    "zero_optimization.zenflow": "DeepSpeed saves nothing of the updates it puts off, so no run could go on; "
    "use offload_optimizer: {device: cpu} without it",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights would be held in 8 bits, which "
    "a checkpoint does not keep; use zero_quantized_weights, which quantises what is sent",
}

# Sections of DeepSpeed's that are on where they stand, whatever is in them.
ON_IF_THERE = {"zero_optimization.zenflow"}

# What many files have, and nothing here reads: taken, with a line.
IGNORED = {
    "activation_checkpointing": "no model here calls DeepSpeed's; to recompute, set "
    "model.activation_checkpointing in the recipe",
    "steps_per_print": "the recipe's log.every says which steps are told",
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeed does not read it",
    "zero_optimization.elastic_checkpoint": "a checkpoint here starts on any number of ranks",
    "zero_optimization.load_from_fp32_weights": "a checkpoint here always has the fp32 weights",
    "zero_optimization.pipeline_loading_checkpoint": "it is for DeepSpeed's own checkpoints",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "a checkpoint here always has "
    "whole tensors, and the command export writes them in 16 bits",
}

# Names that DeepSpeed still takes, besides those its models declare.
OTHER_NAMES = {"aio.thread_count": "intra_op_parallelism", "bfloat16": "bf16"}

_COMPILE = 'write "compile": {"enabled": true}'
# What other trainers call things in this file, and what to write here.
ALIASES = dict.fromkeys(("compile.backend", "compile.disable", "compile.kwargs"), _COMPILE)
ALIASES["fp16.opt_level"] = "only apex read it; drop it"

_POSITIVE: dict[str, Any] = {"type": "integer", "exclusiveMinimum": 0}
_DTYPE: dict[str, Any] = {"type": "string", "enum": ["fp32", "fp16", "bf16"]}
_ANY_CASE: dict[str, Any] = {"type": "string", "anyCase": True}

# Limits that DeepSpeed does not check itself, and fails on later or silently: added to the schema.
LIMITS: dict[str, dict[str, Any]] = {
    "activation_checkpointing.number_checkpoints": _POSITIVE,
    "aio.block_size": _POSITIVE,
    "aio.intra_op_parallelism": _POSITIVE,
    "aio.queue_depth": _POSITIVE,
    "communication_data_type": _DTYPE | _ANY_CASE,
    "compile": {"type": "object"},
    "compile.enabled": {"type": "boolean"},
    "data_types.buffer_dtype": _DTYPE,
    "data_types.grad_accum_dtype": _DTYPE,
    "data_types.keep_in_fp32_modules": {"type": "array", "items": "string"},
    "data_types.param_dtype": _DTYPE,
    "flops_profiler.module_depth": {"minimum": -1},
    "flops_profiler.output_file": {"type": "string"},
    "flops_profiler.profile_step": _POSITIVE,
    "flops_profiler.recompute_fwd_factor": {"minimum": 0},
    "flops_profiler.top_modules": _POSITIVE,
    "fp16.hysteresis": _POSITIVE,
    "fp16.initial_scale_power": {"minimum": 0, "maximum": 127},
    "fp16.loss_scale": {"minimum": 0},
    "fp16.loss_scale_window": _POSITIVE,
    "fp16.min_loss_scale": _POSITIVE,
    "gradient_predivide_factor": {"exclusiveMinimum": 0},
    "log_level": {"enum": ["debug", "info", "warning", "error", "critical"]} | _ANY_CASE,
    # What stages are made alike in; `uniform`: in blocks, `time`: measured at the start.
    "pipeline.partition": {"enum": ["parameters", "uniform", "time"]},
    "pipeline.stages": {"type": "integer", "default": 1},
    "seq_parallel_communication_data_type": _DTYPE,
    "sequence_parallel_size": {"type": "integer"},
    "steps_per_print": _POSITIVE,
    "tf32": {"type": "object"},
    "tf32.enabled": {"type": "boolean"},
    "torch": {"type": "object"},
    "torch.bucket_cap_mb": {"type": "number", "exclusiveMinimum": 0},
    "torch.find_unused_parameters": {"type": "boolean"},
    "torch.parallel": {"type": "string", "enum": ["auto", "single", "dp", "ddp"]},
    "vocabulary_size": _POSITIVE,
    "zero_optimization.allgather_bucket_size": {"exclusiveMinimum": 0, "multipleOf": 2},
    "zero_optimization.leaf_module.classes": {"type": ["string", "array"]},
    "zero_optimization.leaf_module.name_suffixes": {"type": ["string", "array"]},
    "zero_optimization.leaf_module.names": {"type": ["string", "array"]},
    "zero_optimization.offload_optimizer.buffer_count": _POSITIVE,
    "zero_optimization.offload_param.buffer_count": _POSITIVE,
    "zero_optimization.offload_param.buffer_size": _POSITIVE,
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

# Values of optimizer and scheduler parameters that say what this trainer does anyway; others are refused,
# since nothing here would read them.
AS_BUILT: dict[str, tuple[Any, ...]] = {
    "optimizer.legacy_fusion": (False,),
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.amsgrad": (False,),
    "optimizer.params.bias_correction": (True,),
    "optimizer.params.dampening": (0,),
    "optimizer.params.nesterov": (False,),
    "optimizer.params.torch_adam": (True, False),
    "scheduler.params.last_batch_iteration": (-1,),
}

# Of the schedule's warm-up; a line says where it is another one here.
OF_WARM_UP = {f"scheduler.params.warmup_{name}" for name in ("min_lr", "min_ratio", "type")}

# DeepSpeed's optimizer, in any case -> the recipe's.
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adafactor": "adafactor"}

# DeepSpeed's schedule -> the recipe's shape after warm-up.
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
