"""LLaMA-Factory's YAML (`llamafactory-cli train FILE`): hparams/*.py of August 2026."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.foreign_configs.llama_factory_data import put_data
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
    settle_adapter,
    settle_bits,
    settle_recomputing,
    settle_reports,
    settle_terms,
)
from pipeline.foreign_configs.sources import held_out
from pipeline.foreign_configs.training_arguments import DEFAULTS, KEYS, WITHOUT, settle_arguments

LOSSES = {
    "sigmoid": ("dpo", "sigmoid"),
    "hinge": ("dpo", "hinge"),
    "ipo": ("dpo", "ipo"),
    "kto_pair": ("kto", None),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
}
TERMS = {
    "pref_beta": "beta",
    "pref_ftx": "sft_weight",
    "simpo_gamma": "gamma",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
}


def attention(value: Any) -> str:
    """The recipe's word; flash attention is torch's own here."""
    return "eager" if value in ("disabled", False) else "auto"


OWN = keys("""
adapter.weights: adapter_name_or_path
model.activation_checkpointing: disable_gradient_checkpointing
data.kind, objective.kind: stage
adapter.kind, model.freeze: finetuning_type
model.freeze: freeze_trainable_layers
adapter.rank: lora_rank
adapter.alpha: lora_alpha
adapter.dropout: lora_dropout
adapter.targets: lora_target
adapter.modules_to_save: additional_target
adapter.kind: use_rslora use_dora
objective.kind, objective.loss_type: pref_loss
data.paths, data.sources: dataset
data.paths: dataset_dir
data.eval_sets: eval_dataset
data.eval_fraction: val_size
data.sources: max_samples streaming interleave_probs mix_strategy
data.chat_template: template default_system enable_thinking
data.sequence_length: cutoff_len
data.learn_from: train_on_prompt mask_history
data.packing: packing neat_packing
JSON: bf16.enabled: pure_bf16
""") | {
    "flash_attn": Key("model.attention", attention),
    "resize_vocab": Key("model.grow_vocabulary", flag),
    **{key: Key(f"objective.{name}") for key, name in TERMS.items()},
    "preprocessing_num_workers": Key("data.prepare_workers", whole),
    "quantization_bit": Key("adapter.quantize"),
}

OWN_WITHOUT = reasons("""
of quantization there is one kind: double_quantization quantization_device_map quantization_method
  quantization_type
the last n layers are trained with freeze_trainable_layers, whole: freeze_extra_modules
  freeze_trainable_modules use_llama_pro
adapter.init has uniform and gaussian: pissa_convert pissa_init pissa_iter
one adapter is trained; merge others into the model first: adapter_folder create_new_adapter
  loraplus_lr_embedding
the reference is the model that the run starts from: ref_model ref_model_adapters ref_model_quantization_bit
no term of this objective: asft_alpha eaft_alpha ld_alpha pref_bco_weight use_asft_loss use_dft_loss
  use_eaft_loss
no rollouts here: ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model
  reward_model_adapters reward_model_quantization_bit reward_model_type
the optimizer is AdamW, SGD or Adafactor (Muon: optimizer.groups): apollo_rank apollo_scale badam_mode
  badam_switch_interval galore_layerwise galore_rank galore_scale galore_target galore_update_interval
  use_adam_mini use_apollo use_badam use_galore use_muon
orthogonal finetuning is not built here: module_dropout oft_block_size oft_rank oft_target
the import writes no thoughts anew and no tool calls: preserve_thinking tool_format
data are prepared once and kept by content: buffer_size data_shared_file_system overwrite_cache
  preprocessing_batch_size tokenized_path
text alone is read: freeze_language_model freeze_multi_modal_projector freeze_vision_tower image_max_pixels
  image_min_pixels media_dir video_fps video_max_pixels video_min_pixels
kernels are chosen here: low_cpu_mem_usage mixture_of_depths shift_attn split_special_tokens
  upcast_layernorm upcast_lmhead_output use_fast_tokenizer use_unsloth use_v1_kernels
model.extra takes fields of the model's config: moe_aux_loss_coef rope_scaling
tokens of its own are a matter of the tokenizer's folder: add_special_tokens add_tokens init_special_tokens
  new_special_tokens_config
set it in the environment: cache_dir hf_hub_token model_revision ms_hub_token om_hub_token swanlab_project
  swanlab_run_name use_swanlab
write model.architecture in place of model.pretrained: train_from_scratch
model.fp8: fp8 fp8_backend fp8_enable_fsdp_float8_all_gather
it serves generation (the command generate): eval_num_beams infer_backend infer_dtype max_new_tokens
  num_beams temperature top_k top_p use_kv_cache
the launcher starts the ranks: master_addr master_port placement_strategy ray_init_kwargs ray_num_workers
  ray_run_name ray_storage_path resources_per_worker
evaluation.py takes the whole held-out split: eval_on_each_dataset ignore_pad_token_for_loss
""")


def settle(draft: Draft) -> None:
    """Take data, objective and adapter, by stage and finetuning_type."""
    stage = draft.given("stage", text)
    if stage in ("dpo", "kto"):
        _objective(draft, stage)
    elif stage == "rm":
        draft.put("objective.kind", "reward")
    elif stage not in ("sft", "pt"):
        raise draft.top.refused("stage", f"{stage}: this version has no objective for it")
    kind = {"pt": "text", "sft": "chat"}.get(stage, "preference")
    put_data(draft, kind)
    settle_arguments(draft, held_out(draft, "val_size", draft.given("val_size", number)), _bf16(draft))
    settle_reports(draft)
    settle_recomputing(draft, not draft.given("disable_gradient_checkpointing", flag))
    how = draft.given("finetuning_type", text)
    if how == "lora":
        _adapter(draft)
    elif how == "freeze":
        _freeze(draft, draft.given("freeze_trainable_layers", whole))
    elif how != "full":
        raise draft.top.refused("finetuning_type", f"{how} is not built here; lora, freeze and full are")


def _bf16(draft: Draft) -> bool:
    return bool(draft.given("pure_bf16", flag))


def _adapter(draft: Draft) -> None:
    settle_bits(draft, "quantization_bit", draft.given("quantization_bit", whole))
    wanted, alpha = draft.given("lora_target", names), draft.given("lora_alpha", number)
    paths = draft.given("adapter_name_or_path", names) or [None]
    if len(paths) > 1:
        draft.drop("adapter_name_or_path", "the first is trained on; merge the others into the model first")
    settle_adapter(
        draft,
        rank="lora_rank",
        alpha=alpha or 2 * draft.given("lora_rank", whole),
        targets=None if "all" in wanted else wanted,
        weights=paths[0],
        to_save="additional_target",
        told_of_alpha="" if alpha else "LLaMA-Factory's default: 2 x rank",
    )


def _objective(draft: Draft, stage: str) -> None:
    given = draft.given("pref_loss", text) if stage == "dpo" else "kto_pair"
    if given not in LOSSES:
        raise draft.top.refused("pref_loss", f"{given} is not built here; {', '.join(LOSSES)} are")
    kind, loss = LOSSES[given]
    settle_terms(draft, kind, TERMS, {})
    if loss is not None:
        draft.put("objective.loss_type", loss)
    if loss in ("hinge", "ipo") and draft.recipe.pop("objective.label_smoothing", None):
        draft.drop("dpo_label_smoothing", f"the loss {loss} has none, there and here")
    if stage == "dpo" and kind == "kto":
        draft.remarks["objective.kind"] = "pairs, each answer by itself"


def _freeze(draft: Draft, count: int) -> None:
    model = Path(draft.recipe.get("model.pretrained", "")) / "config.json"
    try:
        layers = int(json.loads(model.read_text())["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        draft.put(
            "model.freeze", ["model.embed_tokens.*"], "fill in: and the first layers, model.layers.[0-9].*"
        )
        draft.fill_in.append(
            f"model.freeze: all but {count} layers; the model's config.json, which says how many, is not here"
        )
        return
    kept = range(layers - count, layers) if count > 0 else range(-count)
    frozen = [f"model.layers.{number}.*" for number in range(layers) if number not in kept]
    draft.put(
        "model.freeze", ["model.embed_tokens.*", "model.norm.*", *frozen], f"{abs(count)} layers are trained"
    )


TOOL = Tool(
    title="LLaMA-Factory",
    keys=KEYS | OWN,
    without=WITHOUT | OWN_WITHOUT,
    marks="stage finetuning_type lora_target lora_rank cutoff_len template dataset_dir",
    defaults=DEFAULTS
    | {
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "pref_loss": "sigmoid",
        "pref_beta": 0.1,
        "simpo_gamma": 0.5,
        "cutoff_len": 2048,
        "dataset_dir": "data",
    },
    settle=settle,
)
