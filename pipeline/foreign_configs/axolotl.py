"""Axolotl's YAML (`axolotl train FILE`): utils/schemas/*.py of July 2026."""

from __future__ import annotations

from typing import Any

from pipeline.errors import ConfigError
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
from pipeline.foreign_configs.sources import (
    Source,
    entries_of,
    find_source,
    held_out,
    put_eval_sets,
    put_preferences,
    put_sources,
    put_template,
)
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
LAYOUTS = ("intel", "argilla", "icr", "prompt_pairs")
TOO_LONG = {"drop": "drop", "truncate": "shorten", "raise": "error"}


def settle(draft: Draft) -> None:
    """Data, objective and adapter; what Axolotl itself asks for is missed here too."""
    rl = draft.given("rl", text)
    rl = "reward" if draft.given("reward_model", flag) else rl
    if rl is not None and rl not in OBJECTIVES:
        raise ConfigError(f"{draft.file.at('rl')}: {rl}: no objective that is read here")
    for key in ("base_model", "learning_rate"):
        if draft.given(key) is None:
            raise ConfigError(f"{draft.file.path}: {key} is missing, which Axolotl has no default of; add it")
    if rl is not None:
        _objective(draft, rl)
    _data(draft, rl is not None)
    has_eval = held_out(draft, "val_set_size")
    settle_arguments(draft, has_eval, "auto", "micro_batch_size", "num_epochs", "lr_scheduler")
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
    bits = settle_bits(draft, {"load_in_4bit": 4, "load_in_8bit": 8})
    if draft.given("adapter"):
        _adapter(draft, bits)


def _adapter(draft: Draft, bits: int | None) -> None:
    if draft.given("adapter") not in ("lora", "qlora"):
        raise ConfigError(
            f"{draft.file.at('adapter')}: {draft.given('adapter')} is not built here; lora and qlora are"
        )
    weights = draft.given("lora_model_dir", text)
    for key in ("lora_r", "lora_alpha"):
        if draft.given(key) is None and weights is None:
            raise ConfigError(f"{draft.file.path}: {key} is missing, which Axolotl has no default of; add it")
    settle_adapter(
        draft,
        rank="lora_r",
        alpha=draft.given("lora_alpha", number),
        targets=None if draft.given("lora_target_linear") else draft.given("lora_target_modules", names),
        weights=weights,
        flags=("peft_use_rslora", "peft_use_dora"),
        bits=bits,
    )


def _objective(draft: Draft, rl: str) -> None:
    kind = OBJECTIVES[rl]
    defaults = {"simpo_gamma": 0.5, "cpo_alpha": 1.0} if kind == "simpo" else {}  # TRL's CPOConfig
    settle_terms(draft, kind, TERMS, {"orpo_alpha": 0.1} | defaults)
    if rl == "ipo":
        draft.put("objective.loss_type", "ipo")


def _data(draft: Draft, judged: bool) -> None:
    entries = entries_of(draft, "datasets")
    streams = entries_of(draft, "pretraining_dataset")
    kinds = {_kind(entry) for entry in entries} | ({"text"} if streams else set())
    if len(kinds) > 1 and not judged:
        raise ConfigError(
            f"{draft.file.at('datasets')}: text (completion) and conversations in one run are not read here"
        )
    kind = "preference" if judged else next(iter(kinds), "chat")
    put_sources(draft, kind, [_source(draft, entry, kind) for entry in entries + streams])
    tests = {
        str(entry.get("path")): _source(draft, entry, kind) for entry in entries_of(draft, "test_datasets")
    }
    put_eval_sets(draft, tests)
    length = draft.given("sequence_len", whole)
    too_long = TOO_LONG.get(draft.given("excess_length_strategy", text) or "drop", "drop")
    packs = bool(draft.given("sample_packing"))
    if kind == "text":
        draft.put("data.sequence_length", length)
        draft.put("data.packing", "concatenate" if packs or streams else "none")
        return
    layouts = {_layout(entry, judged) for entry in entries}
    draft.put("data.layout", layouts.pop() if len(layouts) == 1 else "auto")
    put_template(draft, "chat_template" if draft.given("chat_template") != "jinja" else "chat_template_jinja")
    if judged:
        put_preferences(draft, length)
        draft.put("data.too_long", "error" if too_long == "error" else "drop")
        return
    draft.put("data.sequence_length", length)
    draft.put("data.packing", "best_fit" if packs else "none")
    draft.put("data.too_long", too_long)
    if draft.given("train_on_inputs"):
        draft.put("data.learn_from", "all")
    if any(str(entry.get("type")).startswith("alpaca") for entry in entries):
        draft.remarks["data.layout"] = "written by the chat template here, not in Alpaca's words"


def _kind(entry: dict[str, Any]) -> str:
    return "text" if entry.get("type") in ("completion", "pretrain") else "chat"


def _layout(entry: dict[str, Any], judged: bool) -> str:
    """Of a data set's `type`, as `alpaca`, `chat_template`, `chatml.intel`."""
    said = entry.get("type")
    said = said if isinstance(said, str) else ""
    if judged:
        return next((each for each in LAYOUTS if said.endswith(f".{each}")), "auto")
    if said == "chat_template":
        field = entry.get("field_messages", "messages")
        return {"messages": "messages", "conversations": "sharegpt"}.get(str(field), "auto")
    return said if said in ("sharegpt", "alpaca") else "auto"


def _source(draft: Draft, entry: dict[str, Any], kind: str) -> Source:
    found = find_source(draft, entry["path"], entry.get("data_files"), entry.get("name"), entry.get("split"))
    if kind == "text" and (field := entry.get("field") or entry.get("text_column")) not in (None, "text"):
        found.keys["text_field"] = draft.converted("datasets", text, field)
    for key in sorted(set(entry) & FIELDS):
        if entry[key] not in USUAL:
            draft.fill_in.append(
                f"data: {entry['path']}: {key} {entry[key]}; see docs/data.md for names that are known"
            )
    if isinstance(entry.get("type"), dict):
        draft.fill_in.append(
            f"data: {entry['path']}: a type of its own; see docs/data.md for layouts that are known"
        )
    return found


FIELDS = {"field_messages", "field_chosen", "field_rejected", "message_property_mappings", "roles_to_train"}
USUAL: tuple[Any, ...] = (
    *("messages", "conversations", "chosen", "rejected"),
    {"role": "role", "content": "content"},
    {"role": "from", "content": "value"},
    ["assistant"],
)

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
    },
    settle=settle,
)
