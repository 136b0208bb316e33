"""Imports TRL's YAML (`trl sft --config FILE`).

Keys and defaults are those of TRL's trainer/*_config.py and scripts/utils.py in July 2026. The file does not
name its trainer, so the command does (`--from trl-dpo`). TRL chooses the layout of the data by the fields of
the rows; the import does not read rows, and asks.
"""

from __future__ import annotations

from pipeline.cli.import_configs import training_arguments as common
from pipeline.cli.import_configs.conversions import parse_table, to_bool, to_int, to_text
from pipeline.cli.import_configs.mapping import (
    DATASET_FIELDS,
    ImportDraft,
    TrainerTable,
    find_source,
    put_sources,
)
from pipeline.config.recipe import FILL_IN

TRAINERS = ("sft", "dpo", "kto", "reward", "orpo", "cpo")
DEFAULT_LEARNING_RATES = {"sft": 2e-5, "reward": 1e-4}  # 1e-6 for the other trainers
SINGLE_DATASET_KEYS = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
# Recipe keys [as conversion]: TRL's keys; see parse_table.
TRL_ROWS = parse_table("""
model.attention as attention: attn_implementation
adapter.kind: use_peft
adapter.quantize as 4 bits: load_in_4bit
data.paths, data.sources: dataset_name dataset_config dataset_train_split dataset_streaming
  datasets.*.path datasets.*.name datasets.*.split datasets.*.data_files datasets.*.revision
data.eval_fraction: test_split_size
data.kind, data.text_field: dataset_text_field
data.sequence_length: max_length
data.packing: packing
data.learn_from: assistant_only_loss completion_only_loss
data.chat_template as text: chat_template_path
data.prepare_workers as integer: dataset_num_proc
objective.kind, objective.loss_type: loss_type
objective.beta as number: beta
objective.gamma as number: simpo_gamma
objective.sft_weight as number: rpo_alpha cpo_alpha
objective.desirable_weight as number: desirable_weight
objective.undesirable_weight as number: undesirable_weight
objective.center_weight as number: center_rewards_coefficient
""")


def import_trl(draft: ImportDraft) -> None:
    """Import data, objective and adapter, by trainer."""
    trainer = draft.trainer
    if draft.get_stated("learning_rate") is None:
        draft.put(
            "optimizer.learning_rate",
            DEFAULT_LEARNING_RATES.get(trainer, 1e-6),
            f"TRL's default for {trainer}",
        )
    if trainer != "sft":
        _put_objective(draft)
    elif draft.read_value("loss_type") not in (None, "nll", "chunked_nll"):
        draft.leave_open("loss_type", "not imported: the loss of sft is the mean cross entropy of the tokens")
    _put_data(draft)
    held_out = common.put_held_out(draft, "test_split_size")
    common.put_arguments(draft, held_out)
    if draft.read_value("use_peft", to_bool):
        common.put_adapter(draft)
        common.ask_for_targets(draft)


def _put_objective(draft: ImportDraft) -> None:
    """Put kind, loss and defaults of a preference objective."""
    losses = draft.read_value("loss_type")
    loss = losses[0] if isinstance(losses, list) and len(losses) == 1 else losses
    is_simpo = draft.trainer == "cpo" and loss == "simpo"  # TRL's CPO trainer has SimPO's loss
    kind = "simpo" if is_simpo else draft.trainer
    draft.put("objective.kind", kind)
    if draft.trainer == "cpo":  # TRL's defaults; the import drops gamma if the loss has none
        draft.recipe = {"objective.gamma": 0.5, "objective.sft_weight": 1.0} | draft.recipe
    if kind == "reward":
        draft.put("objective.margin_weight", 0.0)
        draft.left_open["margin"] = (
            "TRL subtracts a row's margin if it has one; to do the same, set objective.margin_weight: 1"
        )
    if kind in ("dpo", "cpo"):
        draft.put("objective.loss_type", loss or "sigmoid")  # the loader refuses unsupported ones


def _put_data(draft: ImportDraft) -> None:
    """Put the sources of the data, and how their rows are read."""
    places = [{name: f"{at}.{name}" for name in DATASET_FIELDS} for at in draft.list_entries("datasets")]
    if not places and draft.get_stated("dataset_name") is not None:
        places = [SINGLE_DATASET_KEYS]
    sources = [find_source(draft, keys) for keys in places]
    if draft.read_value("dataset_streaming", to_bool):
        sources = [source | {"streaming": True} if "dataset" in source else source for source in sources]
    is_sft = draft.trainer == "sft"
    length = draft.read_value("max_length", to_int)
    field = draft.read_value("dataset_text_field", to_text) if is_sft else None
    if field:
        sources = [source | {"text_field": field} for source in sources]
    kind = "chat" if is_sft else "preference"
    put_sources(draft, "text" if field else kind, sources)
    draft.put("data.sequence_length", length)
    draft.put("data.packing", "best_fit" if draft.read_value("packing", to_bool) else "none")
    if field:
        draft.left_open["dataset_text_field"] = common.BEGIN_TOKEN_ADVICE
        return
    draft.put("data.append_eos", False)
    if is_sft:
        draft.put("data.too_long", "drop", "TRL truncates longer rows; here they are left out")
        _put_layout(draft)
    else:
        common.put_preferences(draft, length)
        draft.put("data.layout", "trl", "strings are plain text, messages are written by the chat template")


def _put_layout(draft: ImportDraft) -> None:
    """Put the layout of rows: messages, unless a key says otherwise. TRL decides by the fields of a row."""
    assistant_only = draft.read_value("assistant_only_loss", to_bool)
    completion_only = draft.read_value("completion_only_loss", to_bool)
    draft.put("data.learn_from", "assistant" if assistant_only or completion_only else "all")
    if assistant_only:
        draft.left_open["assistant_only_loss"] = (
            "for templates without {% generation %} TRL substitutes its own copies, which are not imported"
        )
    # A recipe that states completion_only_loss, even as false, has rows of prompt and completion.
    if completion_only is None:
        draft.put("data.layout", "messages")
        draft.left_open["rows"] = (
            "rows are read as messages, and others are refused; for rows of prompt and completion write "
            "data.layout: prompt_completion and data.learn_from: assistant; for text write data.kind: text"
        )
    else:
        draft.put("data.layout", "prompt_completion")
        advice = (
            "delete the line if prompts are lists of messages; "
            "for strings, which TRL reads as plain text, write a template"
        )
        draft.ask("data.chat_template", f"{FILL_IN}.jinja", advice)


TOOL = TrainerTable(
    title="TRL",
    rows=common.ROWS | common.MODEL_ROWS | TRL_ROWS,
    import_values=import_trl,
    # TRL's defaults where they differ from those of transformers; the learning rate depends on the trainer.
    defaults={key: value for key, value in common.DEFAULTS.items() if key != "learning_rate"}
    | {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "beta": 0.1, "max_length": 1024}
    | {"bf16": True, "gradient_checkpointing": True},
)
