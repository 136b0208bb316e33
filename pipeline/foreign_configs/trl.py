"""TRL's YAML (`trl sft --config FILE`): trainer/*_config.py and scripts/utils.py of July 2026.

Such a file does not say which trainer it is for; its keys and its name do, or `--from trl-dpo`.
"""

from __future__ import annotations

import re

from pipeline.errors import ConfigError
from pipeline.foreign_configs.mapping import (
    Draft,
    Key,
    Tool,
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
from pipeline.foreign_configs.training_arguments import DEFAULTS, KEYS, WITHOUT, settle_arguments

TRAINERS = ("sft", "dpo", "kto", "reward", "orpo", "cpo")
RATES = {"sft": 2e-5, "reward": 1e-4}  # of the others 1e-6
SIGNS = {
    "kto": {"desirable_weight", "undesirable_weight"},
    "cpo": {"cpo_alpha", "simpo_gamma"},
    "reward": {"center_rewards_coefficient"},
    "sft": {
        "assistant_only_loss",
        "completion_only_loss",
        "packing",
        "dataset_text_field",
        "packing_strategy",
    },
    "dpo": {"loss_type", "label_smoothing", "precompute_ref_log_probs", "rpo_alpha", "ld_alpha", "beta"},
}
TERMS = {
    "beta": "beta",
    "simpo_gamma": "gamma",
    "rpo_alpha": "sft_weight",
    "cpo_alpha": "sft_weight",
    "label_smoothing": "label_smoothing",
    "desirable_weight": "desirable_weight",
    "undesirable_weight": "undesirable_weight",
    "center_rewards_coefficient": "center_weight",
}
PEFT_TARGETS = ["q_proj", "v_proj"]

OWN = keys("""
model.attention: attn_implementation
adapter.kind: use_peft use_rslora use_dora
adapter.rank: lora_r
adapter.alpha: lora_alpha
adapter.dropout: lora_dropout
adapter.targets: lora_target_modules
adapter.modules_to_save: lora_modules_to_save
data.paths, data.sources: dataset_name datasets
data.sources: dataset_config dataset_train_split dataset_streaming
data.eval_fraction: test_split_size
data.eval_sets: dataset_test_split
data.kind, data.text_field: dataset_text_field
data.chat_template: chat_template_path
data.sequence_length: max_length max_seq_length
data.packing: packing packing_strategy
data.learn_from: assistant_only_loss completion_only_loss
objective.kind, objective.loss_type: loss_type
objective.sft_weight: loss_weights
""") | {
    "load_in_4bit": Key("adapter.quantize"),
    "dataset_num_proc": Key("data.prepare_workers", whole),
    **{key: Key(f"objective.{name}") for key, name in TERMS.items()},
}

OWN_WITHOUT = reasons("""
eight bits are not built here: load_in_8bit
of quantization there is one kind: bnb_4bit_quant_storage bnb_4bit_quant_type use_bnb_nested_quant
the JSON says in what the model computes: dtype model_init_kwargs torch_dtype
name a folder of that revision as model.pretrained: model_revision
adapters are on linear layers: lora_target_parameters lora_task_type
held out rows are packed as the others: eval_packing
tokens of its own are a matter of the tokenizer's folder: eos_token pad_token
examples are left out where they do not fit, conversations shortened: max_completion_length
  max_prompt_length truncation_mode
rows are padded or packed without a choice: pad_to_multiple_of padding_free
reference log-probabilities are always computed before step 1: precompute_ref_batch_size
  precompute_ref_log_probs
the reference stays what the run began with: ref_model_init_kwargs ref_model_mixup_alpha
  ref_model_sync_steps sync_ref_model
no term of this objective: discopop_tau f_alpha_divergence_coef f_divergence_type
  ld_alpha router_aux_loss_coef use_weighting
dropout is as the model's config has it: disable_dropout
set model.activation_offload: activation_offloading
no such thing here: dataset_kwargs generate_during_eval gradient_checkpointing_use_reentrant
  ignore_bias_buffers is_encoder_decoder
""")


def trainer_of(draft: Draft) -> str:
    """Which of TRL's trainers: as named, by keys that it alone has, by the file's name, else sft.

    Raises:
        ConfigError: it generates while it trains.
    """
    if {"num_generations", "reward_funcs", "max_new_tokens"} & set(draft.file.tree):
        raise ConfigError(
            f"{draft.file.path}: a trainer that generates answers (GRPO, RLOO); none is built here"
        )
    if draft.kind is not None:
        return draft.kind
    named = [word for word in re.split(r"[^a-z]+", draft.file.path.stem.lower()) if word in TRAINERS]
    by_keys = [name for name, keys in SIGNS.items() if keys & set(draft.file.tree)]
    found = next(iter([*named, *by_keys]), "sft")
    draft.remarks["data.kind"] = f"read as TRL's {found}; --from trl-dpo and the like say another"
    return found


def settle(draft: Draft) -> None:
    """Everything, by trainer."""
    trainer = trainer_of(draft)
    if draft.file.tree.get("learning_rate") is None:
        rate = RATES.get(trainer, 1e-6)
        draft.put("optimizer.learning_rate", rate, f"TRL's default for {trainer}")
    if trainer == "reward":
        settle_terms(draft, "reward", TERMS, {})
    elif trainer != "sft":
        _objective(draft, trainer)
    _data(draft, trainer)
    settle_arguments(draft, held_out(draft, "test_split_size"), bf16=True)
    settle_reports(draft)
    settle_recomputing(draft, True)
    if draft.given("attn_implementation") == "eager":
        draft.put("model.attention", "eager")
    bits = settle_bits(draft, {"load_in_4bit": 4, "load_in_8bit": 8})
    if not draft.given("use_peft"):
        return
    targets = draft.given("lora_target_modules", names)
    settle_adapter(
        draft,
        rank="lora_r",
        alpha=draft.given("lora_alpha", number),
        targets=None if targets and "all-linear" in targets else targets or PEFT_TARGETS,
        bits=bits,
    )
    if not targets:
        draft.remarks["adapter.targets"] = "peft's default for most models; left out: all linear layers"


def _objective(draft: Draft, trainer: str) -> None:
    losses = draft.given("loss_type", names) or (["kto"] if trainer == "kto" else ["sigmoid"])
    weights = draft.given("loss_weights") or [1.0] * len(losses)
    kind = "simpo" if trainer == "cpo" and losses == ["simpo"] else trainer
    settle_terms(draft, kind, TERMS, {"simpo_gamma": 0.5, "cpo_alpha": 1.0} if trainer == "cpo" else {})
    first = losses[0]
    if kind in ("dpo", "cpo"):
        known = {"sigmoid", "hinge", "ipo"} | ({"robust", "sigmoid_norm"} if kind == "dpo" else set())
        if first not in known or set(losses[1:]) - {"sft"}:
            raise ConfigError(
                f"{draft.file.at('loss_type')}: {', '.join(losses)}: {', '.join(sorted(known))} are built"
            )
        draft.put("objective.loss_type", "sigmoid" if first == "sigmoid_norm" else first)
        if first == "sigmoid_norm":
            draft.put("objective.length_normalised", True)
    if "sft" in losses[1:]:
        both = float(weights[losses.index("sft")]), float(weights[0])
        draft.put("objective.sft_weight", both[0] / both[1], f"{both[0]:g} / {both[1]:g}")


def _data(draft: Draft, trainer: str) -> None:
    field = draft.given("dataset_text_field", text)
    is_text = trainer == "sft" and field is not None
    kind = "text" if is_text else "chat" if trainer == "sft" else "preference"
    sources = _sources(draft)
    if is_text and field != "text":
        for source in sources:
            source.keys["text_field"] = field
    put_sources(draft, kind, sources)
    evaluates = draft.given("eval_strategy") in ("steps", "epoch")
    if evaluates and len(sources) == 1 and "dataset" in sources[0].keys:
        split = draft.given("dataset_test_split", text) or "test"
        put_eval_sets(draft, {split: Source(sources[0].keys | {"split": split})})
    given = draft.given("max_length", whole) or draft.given("max_seq_length", whole) or 1024
    if kind == "preference":
        put_preferences(draft, given)
        return
    draft.put("data.sequence_length", given)
    packs, strategy = bool(draft.given("packing")), draft.given("packing_strategy") or "bfd"
    if is_text:
        packed = "concatenate" if strategy in ("wrapped", "bfd_split") else "best_fit"
        draft.put("data.packing", packed if packs else "none")
        return
    put_template(draft, "chat_template_path")
    draft.put("data.packing", "best_fit" if packs else "none")
    if not draft.given("assistant_only_loss") and not draft.given("completion_only_loss"):
        told = "TRL's default for messages; assistant: of answers alone, as it has for prompt and completion"
        draft.put("data.learn_from", "all", told)


def _sources(draft: Draft) -> list[Source]:
    entries = entries_of(draft, "datasets")
    if not entries and (name := draft.given("dataset_name", text)):
        entries = [
            {"path": name, "name": draft.given("dataset_config"), "split": draft.given("dataset_train_split")}
        ]
    sources = []
    for entry in entries:
        source = find_source(
            draft, entry["path"], entry.get("data_files"), entry.get("name"), entry.get("split")
        )
        if "dataset" in source.keys and draft.given("dataset_streaming"):
            source.keys["streaming"] = True
        if entry.get("fraction") is not None:
            source.keys["weight"] = float(number(entry["fraction"]))
        sources.append(source)
    return sources


TOOL = Tool(
    title="TRL",
    keys=KEYS | OWN,
    without=WITHOUT | OWN_WITHOUT,
    marks="dataset_name use_peft max_length dataset_train_split dataset_text_field",
    defaults={key: value for key, value in DEFAULTS.items() if key != "learning_rate"}
    | {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "beta": 0.1, "logging_steps": 10},
    settle=settle,
)
