"""TRL's YAML (`trl sft --config FILE`): trainer/*_config.py and scripts/utils.py of July 2026.

Such a file does not say which trainer it is for; its keys and its name do, or `--from trl-dpo`.
"""

from __future__ import annotations

import re
from typing import Any

from pipeline.cli.import_configs.mapping import (
    Draft,
    Key,
    Section,
    Source,
    Tool,
    choose,
    column,
    find_source,
    flag,
    held_out,
    keys,
    learned,
    names,
    number,
    numbers,
    of_row,
    put_eval_sets,
    put_preferences,
    put_row_template,
    put_sources,
    reasons,
    refusal,
    rows_of,
    settle_adapter,
    settle_bits,
    settle_recomputing,
    settle_reports,
    settle_terms,
    tell_of_long_rows,
    text,
    whole,
)
from pipeline.cli.import_configs.training_arguments import DEFAULTS, KEYS, WITHOUT, settle_arguments
from pipeline.errors import ConfigError

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
data.sources: dataset_config dataset_train_split dataset_streaming streaming
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
    draft.not_taken["which trainer"] = f"read as TRL's {found}, by name and keys; --from trl-dpo says another"
    return found


def settle(draft: Draft) -> None:
    """Take everything, by trainer."""
    trainer = trainer_of(draft)
    if draft.file.tree.get("learning_rate") is None:
        rate = RATES.get(trainer, 1e-6)
        draft.put("optimizer.learning_rate", rate, f"TRL's default for {trainer}")
    if trainer == "reward":
        settle_terms(draft, "reward", TERMS, {})
    elif trainer != "sft":
        _objective(draft, trainer)
    elif (loss := draft.given("loss_type")) not in (None, "nll", "chunked_nll"):
        draft.drop("loss_type", f"{loss}: the loss is the mean cross entropy of the tokens")
    _data(draft, trainer)
    share = draft.given("test_split_size", number)
    settle_arguments(draft, held_out(draft, "test_split_size", share), bf16=True)
    settle_reports(draft)
    settle_recomputing(draft, True)
    if draft.given("attn_implementation") == "eager":
        draft.put("model.attention", "eager")
    if not draft.given("use_peft", flag):
        return
    settle_bits(draft, "load_in_4bit", 4 if draft.given("load_in_4bit", flag) else None)
    targets = draft.given("lora_target_modules", names)
    settle_adapter(
        draft,
        rank="lora_r",
        alpha=draft.given("lora_alpha", number),
        targets=None if targets and "all-linear" in targets else targets or PEFT_TARGETS,
    )
    if not targets:
        draft.not_taken["lora_target_modules (default)"] = (
            "peft's by the model; q_proj and v_proj are written"
        )


def _objective(draft: Draft, trainer: str) -> None:
    losses = draft.given("loss_type", names) or (["kto"] if trainer == "kto" else ["sigmoid"])
    weights = draft.given("loss_weights", numbers) or [1.0] * len(losses)
    kind = "simpo" if trainer == "cpo" and losses == ["simpo"] else trainer
    settle_terms(draft, kind, TERMS, {"simpo_gamma": 0.5, "cpo_alpha": 1.0} if trainer == "cpo" else {})
    first = losses[0]
    if kind in ("dpo", "cpo"):
        known = {"sigmoid", "hinge", "ipo"} | ({"robust", "sigmoid_norm"} if kind == "dpo" else set())
        if first not in known or set(losses[1:]) - {"sft"} or len(weights) != len(losses):
            raise draft.top.refused("loss_type", f"{', '.join(losses)}: {', '.join(sorted(known))} are built")
        draft.put("objective.loss_type", "sigmoid" if first == "sigmoid_norm" else first)
        if first == "sigmoid_norm":
            draft.put("objective.length_normalised", True)
    ignores = (kind == "dpo" and first != "robust") or first in ("hinge", "ipo")
    if ignores and draft.recipe.pop("objective.label_smoothing", None):
        draft.drop("label_smoothing", f"TRL's {kind} does not read it with the loss {first}")
    if "sft" in losses[1:]:
        both = float(weights[losses.index("sft")]), float(weights[0])
        draft.put("objective.sft_weight", both[0] / both[1], f"{both[0]:g} / {both[1]:g}")


def _data(draft: Draft, trainer: str) -> None:
    kind = "chat" if trainer == "sft" else "preference"
    sources = _sources(draft)
    put_sources(draft, kind, sources)
    evaluates = draft.given("eval_strategy") in ("steps", "epoch")
    split = draft.given("dataset_test_split", text) or "test"
    if evaluates and len(sources) == 1 and "dataset" in sources[0]:
        put_eval_sets(draft, {split: sources[0] | {"split": split}})
    length = draft.given("max_length", whole) or draft.given("max_seq_length", whole) or 1024
    tell_of_long_rows(draft, "max_length")
    draft.put("data.append_eos", False)
    row = next((row for source in sources for row in rows_of(source)), None)
    if kind == "preference":
        put_preferences(draft, length)
        draft.put("data.layout", "trl", "strings are plain text, messages are written by the chat template")
        if trainer == "reward" and "margin" not in (row or {}):
            draft.put(
                "objective.margin_weight", 0.0, "TRL reads the column `margin` alone, and these have none"
            )
    else:
        draft.put("data.sequence_length", length)
        draft.put("data.too_long", "drop")
        packs, strategy = draft.given("packing", flag), draft.given("packing_strategy", text) or "bfd"
        draft.put("data.packing", "best_fit" if packs else "none")
        if packs and strategy != "bfd":
            draft.drop("packing_strategy", f"{strategy}: rows are packed whole, by best fit")
        _supervised(draft, sources, row)
    if (
        template := draft.given("chat_template_path", text)
    ) is not None and "data.chat_template" not in draft.recipe:
        found = draft.found(template)
        if found is None or found.is_dir():
            draft.fill_in.append(f"data.chat_template: the Jinja file of {template}")
        draft.put("data.chat_template", str(found or template))


def _supervised(draft: Draft, sources: list[Source], row: dict[str, Any] | None) -> None:
    """Put how rows are written and what counts, by the form of the rows: TRL decides by it as well."""
    field = draft.given("dataset_text_field", text)
    marked = draft.given("assistant_only_loss", flag)
    completes = draft.given("completion_only_loss", flag)
    is_text = (row is None and field is not None) or (row is not None and not {"prompt", *TURNS} & set(row))
    is_pair = "prompt" in row if row is not None else completes is not None and not is_text
    if is_text:
        said = f"{{{{ {column(field or 'text')} }}}}{{{{ eos_token }}}}"
        put_row_template(draft, of_row("{{ text_start }}" + learned(said)), "text, as TRL writes it")
        draft.put("data.learn_from", "all")
    elif is_pair and not (row is not None and isinstance(row["prompt"], list)):
        refuse = refusal("prompt and completion are no strings; import again where the data are at hand")
        said = "{{ row.prompt }}" + learned("{{ row.completion }}{{ eos_token }}")
        written = choose(
            "row.prompt is string and row.completion is string", "{{ text_start }}" + said, refuse
        )
        put_row_template(draft, of_row(written), "prompt and completion are plain text, as in TRL")
        draft.put("data.learn_from", "all" if completes is False else "assistant")
    elif is_pair:
        if any(_answers(each.get("prompt")) for source in sources for each in rows_of(source)):
            raise draft.top.refused(
                "dataset_name", "prompts with an assistant's turn: TRL learns the completion alone"
            )
        draft.put("data.layout", "prompt_completion")
        draft.put("data.learn_from", "all" if completes is False and not marked else "assistant")
    else:
        layout = "sharegpt" if row is not None and "messages" not in row else "messages"
        if row is None:
            draft.fill_in.append(
                "data.layout: the rows are not at hand; for others than messages, import again where they are"
            )
        draft.put("data.layout", layout)
        draft.put(
            "data.learn_from", "assistant" if marked else "all", "" if marked else "as TRL, of messages"
        )
    if marked:
        draft.not_taken["assistant_only_loss beyond {% generation %}"] = (
            "if the tokenizer's template has no such marks, TRL puts marks of its own into a known one"
        )


TURNS = ("messages", "conversations")


def _answers(prompt: Any) -> bool:
    return isinstance(prompt, list) and any(
        isinstance(turn, dict) and turn.get("role") == "assistant" for turn in prompt
    )


def _sources(draft: Draft) -> list[Source]:
    entries = draft.top.sections("datasets")
    streams = draft.given("dataset_streaming", flag) or draft.given("streaming", flag)
    if not entries and draft.given("dataset_name", text):
        theirs = {
            "path": draft.given("dataset_name"),
            "name": draft.given("dataset_config"),
            "split": draft.given("dataset_train_split"),
        }
        entries = [Section(draft.file, theirs, "dataset_name: ", draft.not_taken)]
    sources = []
    for entry in entries:
        source = find_source(draft, entry)
        if "dataset" in source and streams:
            source["streaming"] = True
        entry.drop("fraction", "it leaves out rows by the numbers of rows; write data.sources.max_documents")
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
