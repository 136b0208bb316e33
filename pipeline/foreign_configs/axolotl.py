"""Axolotl's YAML (`axolotl train FILE`): utils/schemas/*.py of July 2026."""

from __future__ import annotations

from pipeline.errors import ConfigError
from pipeline.foreign_configs.axolotl_data import put_data
from pipeline.foreign_configs.mapping import (
    Draft,
    Key,
    Tool,
    flag,
    keys,
    names,
    number,
    reasons,
    text,
    whole,
)
from pipeline.foreign_configs.settle import (
    optimizer,
    run_name,
    settle_adapter,
    settle_bits,
    settle_recomputing,
    settle_terms,
)
from pipeline.foreign_configs.sources import held_out
from pipeline.foreign_configs.training_arguments import COMMON, DEFAULTS, WITHOUT, settle_arguments

TERMS = {
    "orpo_alpha": "beta",
    "rl_beta": "beta",
    "simpo_gamma": "gamma",
    "cpo_alpha": "sft_weight",
    "dpo_label_smoothing": "label_smoothing",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "center_rewards_coefficient": "center_weight",
}
OWN = keys("""
data.tokenizer: tokenizer_config
adapter.kind: adapter peft_use_dora peft_use_rslora
adapter.weights: lora_model_dir
adapter.rank: lora_r
adapter.alpha: lora_alpha
adapter.dropout: lora_dropout
adapter.targets: lora_target_modules lora_target_linear
adapter.modules_to_save: lora_modules_to_save
objective.kind: rl reward_model
data.paths, data.sources, data.layout: datasets
data.paths, data.sources: pretraining_dataset
data.eval_sets: test_datasets
data.eval_fraction: val_set_size
data.chat_template: chat_template chat_template_jinja
data.sequence_length: sequence_len
data.packing: sample_packing
data.too_long: excess_length_strategy
data.learn_from: train_on_inputs
batch.micro_batch_size: micro_batch_size
max_epochs: num_epochs
schedule.kind: lr_scheduler
schedule.min_learning_rate_ratio: cosine_min_lr_ratio
eval.every: evals_per_epoch
checkpoint.every: saves_per_epoch
checkpoint.resume: auto_resume_from_checkpoints
wandb.mode: wandb_mode
model.attention: attn_implementation eager_attention
JSON: zero_optimization: fsdp_config
""") | {
    "base_model": Key("model.pretrained", text),
    "load_in_4bit": Key("adapter.quantize"),
    **{key: Key(f"objective.{name}") for key, name in TERMS.items()},
    "dataset_num_proc": Key("data.prepare_workers", whole),
    "dataset_processes": Key("data.prepare_workers", whole),
    "optimizer": Key("optimizer.kind", optimizer),
    "use_tensorboard": Key("log.tensorboard", flag),
    "wandb_project": Key("wandb.project", text),
    "wandb_entity": Key("wandb.entity", text),
    "wandb_name": Key("name", run_name),
}

OWN_WITHOUT = reasons("""
eight bits are not built here: gptq load_in_8bit loftq_config
the model's folder says what it is: base_model_config cls_model_config model_type processor_type
  tokenizer_legacy tokenizer_type tokenizer_use_fast type_of_model
tokens of its own are a matter of the tokenizer's folder (model.grow_vocabulary): added_tokens_overrides
  eot_tokens resize_token_embeddings_to_32x special_tokens tokens
attention is torch's flash kernels, whatever the length: flash_attention flash_attn_cross_entropy
  flash_attn_fuse_mlp flex_attention s2_attention sdp_attention xformers_attention
data are prepared once and kept by content: dataset_exact_deduplication dataset_keep_in_memory
  dataset_prepared_path dataset_shard_idx dataset_shard_num push_dataset_to_hub shuffle_merged_datasets
  skip_prepare_dataset
rows are packed best fit, or stand alone: batch_flattening curriculum_sampling eval_sample_packing
  multipack_real_batches pad_to_multiple_of pad_to_sequence_len sample_packing_bin_size
  sample_packing_eff_est sample_packing_group_size sample_packing_sequentially
kernels are chosen here: chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy gc_steps
  liger_cross_entropy liger_fused_linear_cross_entropy liger_glu_activation liger_layer_norm liger_rms_norm
  liger_rope lora_embedding_kernel lora_mlp_kernel lora_o_kernel lora_qkv_kernel low_cpu_mem_usage plugins
  tiled_mlp unsloth_lora_mlp unsloth_lora_o unsloth_lora_qkv
the run logs to W&B what docs/configuration.md says: use_wandb wandb_log_model wandb_run_id wandb_watch
watch says what ends a run: loss_watchdog_patience loss_watchdog_threshold
the launcher and the split's file say it: context_parallel_size ddp deepcompile device_map dp_shard_size
  fsdp_final_state_dict_type fsdp_version sequence_parallel_degree tensor_parallel_size
the rows and the chat template say it: chat_template_kwargs default_system_message
micro_batch_size and gradient_accumulation_steps say it: batch_size
model.freeze names what stays as it is, by shell patterns: unfrozen_parameters
not built here: activation_offloading adam_beta3 dpo_loss_type dpo_loss_weights
  dpo_use_weighting embedding_lr fp8 layer_offloading lora_alpha_pattern lora_rank_pattern
  lora_target_parameters lr_groups peft peft_init_lora_weights peft_layers_to_transform
  peft_trainable_token_indices process_reward_model qat quantization relora trl vllm
reference log-probabilities are computed before step 1: precompute_ref_log_probs
the bf16 of the JSON: bfloat16 float16 float32
no rows are left out by their length below: eval_sequence_len max_prompt_len min_sample_len
it merges, or serves inference: hf_use_auth_token merge_lora merge_method save_first_step strict
""")
OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "reward": "reward"}


def settle(draft: Draft) -> None:
    """Take data, objective and adapter; what Axolotl itself asks for is missed here too."""
    rl = draft.given("rl", text)
    rl = "reward" if draft.given("reward_model", flag) else rl
    if rl is not None and rl not in OBJECTIVES:
        raise draft.top.refused("rl", f"{rl}: no objective that is read here")
    for key in ("base_model", "learning_rate"):
        if draft.given(key) is None:
            raise ConfigError(f"{draft.file.path}: {key} is missing, which Axolotl has no default of; add it")
    if rl is not None:
        _objective(draft, rl)
    put_data(draft, rl)
    has_eval = held_out(draft, "val_set_size", draft.given("val_set_size", number))
    settle_arguments(draft, has_eval, "auto", "micro_batch_size", "num_epochs", "lr_scheduler")
    _warmup(draft)
    settle_recomputing(draft, False)
    draft.put(
        "wandb.mode", draft.given("wandb_mode") or ("auto" if draft.given("wandb_project") else "disabled")
    )
    if draft.given("auto_resume_from_checkpoints"):
        draft.put("checkpoint.resume", "auto")
    if draft.given("eager_attention") or draft.given("attn_implementation") == "eager":
        draft.put("model.attention", "eager")
    if tokenizer := draft.given("tokenizer_config", text):
        draft.put("data.tokenizer", {"pretrained": tokenizer})
    if draft.given("adapter"):
        _adapter(draft)


def _warmup(draft: Draft) -> None:
    """Put the warm-up as Axolotl counts it, where the run's steps are known; else the share stands."""
    total, share = draft.recipe.get("max_steps"), draft.recipe.get("schedule.warmup")
    if not isinstance(share, float):
        return
    is_given = draft.file.tree.get("warmup_ratio") is not None or draft.file.tree.get("warmup_steps")
    if total is not None:
        steps = int(share * total)
        steps = steps if is_given else min(steps, 100)
        draft.put("schedule.warmup", 2 if steps == 1 else steps)
    elif not is_given:
        draft.not_taken["warmup_ratio (default)"] = f"{share:g} of the steps; there they are 100 at the most"


def _adapter(draft: Draft) -> None:
    if draft.given("adapter") not in ("lora", "qlora"):
        raise draft.top.refused("adapter", f"{draft.given('adapter')} is not built here; lora and qlora are")
    weights, alpha = draft.given("lora_model_dir", text), draft.given("lora_alpha", number)
    for key in ("lora_r", "lora_alpha"):
        if draft.given(key) is None and weights is None:
            raise ConfigError(f"{draft.file.path}: {key} is missing, which Axolotl has no default of; add it")
    targets, every = draft.given("lora_target_modules", names), draft.given("lora_target_linear", flag)
    settle_bits(draft, "load_in_4bit", 4 if draft.given("load_in_4bit", flag) else None)
    settle_adapter(
        draft,
        rank="lora_r",
        alpha=alpha,
        targets=None if every else targets,
        weights=weights,
        flags=("peft_use_rslora", "peft_use_dora"),
    )
    if not every and targets is None and weights is None:
        draft.not_taken["lora_target_modules (default)"] = "peft's by the model; here all linear layers"


def _objective(draft: Draft, rl: str) -> None:
    kind = OBJECTIVES[rl]
    defaults = {"simpo_gamma": 0.5, "cpo_alpha": 1.0} if kind == "simpo" else {}  # TRL's CPOConfig
    settle_terms(draft, kind, TERMS, {"orpo_alpha": 0.1} | defaults)
    if kind == "reward":
        draft.put("objective.margin_weight", 0.0, "no margins, as there")
    if rl in ("dpo", "ipo") and draft.recipe.pop("objective.label_smoothing", None):
        draft.drop("dpo_label_smoothing", "TRL's sigmoid and ipo losses have none")
    if rl == "ipo":
        draft.put("objective.loss_type", "ipo")


TOOL = Tool(
    title="Axolotl",
    keys=COMMON | OWN,
    without={key: why for key, why in WITHOUT.items() if key not in OWN} | OWN_WITHOUT,
    marks="base_model micro_batch_size sequence_len lora_r sample_packing num_epochs",
    defaults={
        key: DEFAULTS[key] for key in ("weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "seed")
    }
    | {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1.0,
        "sequence_len": 512,
        "lora_dropout": 0.0,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "save_strategy": "epoch",
        "save_total_limit": 4,
    },
    settle=settle,
)
