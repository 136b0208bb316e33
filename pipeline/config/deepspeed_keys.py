"""DeepSpeed's configuration keys, as of 0.19: those it reads, those it dropped, those another file owns.

DeepSpeed accepts an unknown top-level key in silence, so the names must be known here. A test holds these
tables against the installed DeepSpeed.
"""

TOP_LEVEL = {
    "aio", "bf16", "checkpoint", "comms_logger", "communication_data_type", "data_types",
    "disable_allgather", "disable_python_gc", "dump_state", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "log_level",
    "memory_breakdown", "optimizer", "pipeline", "prescale_gradients", "scheduler",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print", "tensor_parallel",
    "timers", "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism",
    "vocabulary_size", "wall_clock_breakdown", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip

SECTIONS = {
    "torch": {"bucket_cap_mb", "find_unused_parameters", "parallel"},
    "compile": {"enabled"},
    "tf32": {"enabled"},
    "tensor_parallel": {"autotp_size", "partition_config", "preset_model", "tp_overlap_comm"},
    "pipeline": {"partition", "stages"},
    "zero_optimization": {
        "allgather_bucket_size", "allgather_partitions", "compute_grad_norm",
        "contiguous_gradients", "elastic_checkpoint", "enable_sanity_checks", "ignore_unused_parameters",
        "leaf_module", "legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings",
        "memory_efficient_linear", "offload_optimizer", "offload_param", "overlap_comm",
        "override_module_apply", "parameter_alignment", "pipeline_loading_checkpoint",
        "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory", "stage", "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params", "sub_group_size",
        "use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size",
        "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_quantized_weights",
    },
    "fp16": {
        "auto_cast", "consecutive_hysteresis", "enabled", "fp16_master_weights_and_grads", "hysteresis",
        "initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale",
    },
    "bf16": {
        "bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow", "enabled",
        "immediate_grad_update",
    },
    "zero_optimization.offload_optimizer": {
        "buffer_count", "cpuadam_cores_perc", "device", "fast_init", "nvme_path", "pin_memory",
        "pipeline_read", "pipeline_write", "ratio", "super_offload",
    },
    "zero_optimization.offload_param": {
        "buffer_count", "buffer_size", "device", "max_in_cpu", "nvme_path", "pin_memory",
    },
}  # fmt: skip

# This trainer's own, beside DeepSpeed's: `torch` asks for plain PyTorch in place of DeepSpeed.
OWN = {"compile", "tf32", "torch"}

# pipeline.partition: what stages are made alike in; `uniform`: in blocks, `time`: measured at the start.
PARTITIONS = ("parameters", "uniform", "time")

# What may stand beside a `torch` section; everything else speaks to DeepSpeed.
WITH_TORCH = {
    "bf16", "compile", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
    "tf32", "torch", "train_batch_size", "train_micro_batch_size_per_gpu",
}  # fmt: skip

# What DeepSpeed 0.19 no longer has, and what to use instead.
REMOVED = {
    "amp": "use bf16 or fp16",
    "bfloat16": "the section is called bf16",
    "compression_training": "compress after training, with the exported weights",
    "cpu_offload": "use zero_optimization.offload_optimizer: {device: cpu}",
    "curriculum_learning": "order the data in the recipe",
    "eigenvalue": "drop it",
    "elasticity": "any checkpoint starts on other ranks; set global_batch_size in the recipe",
    "fp32_allreduce": "use communication_data_type: fp32",
    "graph_harvesting": "use compile",
    "nebula": "set checkpoint.every in the recipe",
    "progressive_layer_drop": "drop it",
    "quantize_training": "quantise after training, with the exported weights",
    "sparse_attention": "use model.attention in the recipe",
    "sparse_gradients": "an nn.Embedding(sparse=True) needs no setting",
    "zero_optimization.cpu_offload": "use zero_optimization.offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "use zero_optimization.offload_param: {device: cpu}",
    "zero_optimization.cpu_offload_params": "use zero_optimization.offload_param: {device: cpu}",
    "zero_optimization.cpu_offload_use_pin_memory": "use offload_optimizer: {pin_memory: true}",
    "zero_optimization.mics_hierarchical_params_gather": "use zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "use zero_quantized_gradients alone",
}

# What DeepSpeed has and this trainer does itself, or does not wire up.
NOT_HERE = {
    "activation_checkpointing": "set model.activation_checkpointing in the recipe",
    "autotuning": "benchmarks/throughput.py compares settings",
    "compile.deepcompile": "torch.compile is what there is here: compile: {enabled: true}",
    "comet": "metrics.jsonl holds every number",
    "csv_monitor": "metrics.jsonl holds every number",
    "data_efficiency": "the recipe's data section decides what is read, and in what order",
    "dataloader_drop_last": "the recipe's data section decides what is read, and in what order",
    "datastates_ckpt": "this trainer writes checkpoints itself; set checkpoint.every in the recipe",
    "expert_parallel": "this trainer does not split experts yet",
    "gradient_allreduce_op": "every token counts once, which needs DeepSpeed's mean over ranks",
    "hybrid_engine": "it serves RLHF generation, which this trainer does not do",
    "managed_gradient_accumulation": "set batch.gradient_accumulation_steps in the recipe",
    "pipeline.activation_checkpoint_interval": "set model.activation_checkpointing in the recipe",
    "tensorboard": "set log.tensorboard in the recipe",
    "torch_autocast": "use bf16 or fp16",
    "wandb": "set the wandb section of the recipe",
}

# JSON key -> the recipe's key for the same number.
RECIPE_OWNS = {
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "gradient_clipping": "optimizer.max_grad_norm",
    "optimizer.params.lr": "optimizer.learning_rate",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "scheduler.params.warmup_num_steps": "schedule.warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_max_lr": "optimizer.learning_rate",
    "scheduler.params.cos_min_ratio": "schedule.min_learning_rate_ratio",
}

# Values of optimizer and scheduler parameters that say what this trainer does anyway; others are refused,
# since nothing here would read them.
AS_BUILT = {
    "optimizer.legacy_fusion": (False,),
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.amsgrad": (False,),
    "optimizer.params.bias_correction": (True,),
    "optimizer.params.torch_adam": (True, False),
    "scheduler.params.last_batch_iteration": (-1,),
    "scheduler.params.warmup_min_lr": (0,),
    "scheduler.params.warmup_min_ratio": (0,),
    "scheduler.params.warmup_type": ("linear",),
}

# DeepSpeed's schedule -> the recipe's shape after warm-up.
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
