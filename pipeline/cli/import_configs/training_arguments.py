"""transformers' TrainingArguments (4.57 and 5): a file of them, and the keys that other tools share."""

from __future__ import annotations

from typing import Any

from pipeline.cli.import_configs.mapping import (
    Draft,
    Key,
    NotTakenError,
    Tool,
    flag,
    keys,
    number,
    optimizer,
    put_sources,
    reasons,
    run_name,
    settle_batch,
    settle_betas,
    settle_cadence,
    settle_length,
    settle_precision,
    settle_recomputing,
    settle_reports,
    settle_resume,
    settle_schedule,
    text,
    whole,
)


def interval(value: Any) -> int:
    """Return the steps between two rows."""
    if 0 < number(value) < 1:
        raise NotTakenError(f"{value} of a run's steps: write log.every in steps or epochs")
    return whole(value)


# Any trainer's, by these names.
COMMON = keys("""
optimizer.betas: adam_beta1 adam_beta2
max_steps: max_steps
schedule.min_learning_rate_ratio, schedule.decay_steps: lr_scheduler_kwargs
schedule.warmup: warmup_steps warmup_ratio
batch.global_batch_size: gradient_accumulation_steps
batch.micro_batch_size: auto_find_batch_size
checkpoint.every: save_steps save_strategy
eval.every: eval_steps eval_strategy
checkpoint.keep_best: load_best_model_at_end metric_for_best_model greater_is_better
checkpoint.resume: resume_from_checkpoint
model.activation_checkpointing: gradient_checkpointing
optimizer.groups: loraplus_lr_ratio
JSON: bf16.enabled: bf16
JSON: fp16.enabled: fp16
JSON: tf32.enabled: tf32
JSON: compile.enabled: torch_compile
JSON: zero_optimization: deepspeed fsdp
""") | {
    "learning_rate": Key("optimizer.learning_rate", number),
    "weight_decay": Key("optimizer.weight_decay", number),
    "adam_epsilon": Key("optimizer.eps", number),
    "max_grad_norm": Key("optimizer.max_grad_norm", number),
    "logging_steps": Key("log.every", interval),
    "save_total_limit": Key("checkpoint.keep_last", whole),
    "seed": Key("seed", whole),
    "output_dir": Key("run_dir", text),
    "trust_remote_code": Key("model.trust_remote_code", flag),
    "neftune_noise_alpha": Key("model.neftune_alpha", number),
}
KEYS = COMMON | {
    "model_name_or_path": Key("model.pretrained", text),
    "per_device_train_batch_size": Key("batch.micro_batch_size"),
    "num_train_epochs": Key("max_epochs"),
    "optim": Key("optimizer.kind", optimizer),
    "lr_scheduler_type": Key("schedule.kind"),
    "report_to": Key("wandb.mode, log.tensorboard"),
    "run_name": Key("name", run_name),
}

WITHOUT = reasons("""
a run's folder has all that it leaves, and an existing one is never overwritten: overwrite_output_dir
  plot_loss save_on_each_node save_only_model save_safetensors
the command says what is done, the launcher where: config ddp_backend do_eval do_predict do_train env
  local_rank no_cuda use_cpu
an evaluation takes micro-batches of the training's size: eval_accumulation_steps eval_batch_size
  per_device_eval_batch_size
this trainer's own blockwise loss keeps no logits either: enable_liger_kernel liger_kernel_config
  use_liger_kernel
the loss is the mean over tokens: average_tokens_across_devices label_smoothing_factor
tokenised rows are read from memory (loader.num_workers): dataloader_num_workers
  dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
the order of samples is drawn from the seed, and every sample counts: data_seed dataloader_drop_last
  disable_shuffling full_determinism group_by_length ignore_data_skip length_column_name
  train_sampling_strategy
not off: samples are always drawn in random order: shuffle_dataset
recomputation needs no choice: gradient_checkpointing_kwargs use_reentrant_gc use_unsloth_gc
distributed.timeout_seconds has a limit of its own: ddp_timeout
the split's file decides, and names unused parameters: accelerator_config ddp_broadcast_buffers
  ddp_bucket_cap_mb ddp_find_unused_parameters fsdp_config parallelism_config
the file that `export` writes can be pushed: hub_model_id hub_private_repo hub_revision hub_strategy
  hub_token push_to_hub
the model decides what it is given: label_names remove_unused_columns
metrics.jsonl has a row each log.every steps, from the first on: disable_tqdm
  include_effective_tokens_per_second include_num_input_tokens_seen include_tkps include_tokens_per_second
  log_level logging_dir logging_first_step logging_nan_inf_filter logging_strategy
every evaluation is of the loss: batch_eval_metrics compute_accuracy eval_delay eval_on_start
  predict_with_generate prediction_loss_only
torch.compile's backend and mode are chosen here: torch_compile_backend torch_compile_mode
the optimizer takes no arguments of another: optim_args optim_target_modules
write early_stopping.patience (the evaluation before the first step counts here): early_stopping_patience
  early_stopping_steps
not done here: bf16_full_eval fp16_full_eval torch_empty_cache_steps
""")

DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "save_steps": 500,
    "seed": 42,
    "optim": "adamw_torch_fused",
}


def settle_arguments(
    draft: Draft,
    has_eval: bool,
    bf16: Any,
    micro: str = "per_device_train_batch_size",
    epochs: str = "num_train_epochs",
    schedule: str = "lr_scheduler_type",
) -> None:
    """All of it that several keys make; after the data section, by whose rows steps are counted.

    Args:
        draft: The recipe.
        has_eval: Whether something is held out.
        bf16: What holds where neither half precision is named.
        micro: Their key of a device's batch.
        epochs: Their key of passes over the data.
        schedule: Their key of the rate's shape.
    """
    settle_batch(draft, micro, "gradient_accumulation_steps")
    settle_length(draft, epochs)
    settle_betas(draft)
    settle_schedule(draft, schedule)
    settle_cadence(draft, has_eval)
    settle_resume(draft)
    settle_precision(draft, bf16)


def settle(draft: Draft) -> None:
    """Take the arguments of transformers' Trainer, whose script names model and data."""
    put_sources(draft, "chat", [])
    settle_arguments(
        draft, draft.given("do_eval") is True or draft.given("eval_strategy") not in (None, "no"), False
    )
    settle_reports(draft)
    settle_recomputing(draft, False)


TOOL = Tool(
    title="transformers' Trainer",
    keys={key: row for key, row in KEYS.items() if key != "model_name_or_path"},
    without={**WITHOUT, "_n_gpu": "--gpus says it", "evaluation_strategy": "named eval_strategy since 4.46"},
    marks="per_device_train_batch_size num_train_epochs per_device_eval_batch_size save_strategy logging_dir",
    defaults=DEFAULTS,
    settle=settle,
)
