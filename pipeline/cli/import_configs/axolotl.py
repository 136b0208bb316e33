"""Imports Axolotl's YAML (`axolotl train FILE`).

Keys and defaults are those of Axolotl's utils/schemas/*.py in July 2026. Data sets of plain text, and of
conversations that a chat template writes, are imported. Other types are left to the user.
"""

from __future__ import annotations

from pipeline.cli.import_configs import training_arguments as common
from pipeline.cli.import_configs.conversions import parse_table, to_bool, to_int, to_text
from pipeline.cli.import_configs.mapping import (
    DATASET_FIELDS,
    ImportDraft,
    Source,
    TrainerTable,
    find_source,
    put_sources,
)
from pipeline.config.recipe import FILL_IN
from pipeline.errors import ConfigError

# Value of Axolotl's `rl` -> objective.kind. `reward` stands for `reward_model: true`.
OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "reward": "reward"}
TEMPLATE_TYPES = {
    None: ("chat_template", "chat_template.load"),
    "dpo": ("chat_template", "chat_template.default"),
    "ipo": ("chat_template", "chat_template.default"),
    "reward": ("bradley_terry.chat_template",),
}
"""Value of `rl` -> types of data sets whose rows the chat template writes."""
ROW_FIELDS = ("messages", "tools", "system", "chosen", "rejected")
"""Fields of a row that an entry of `datasets` may rename, by `field_messages` etc."""
AXOLOTL_NAMES = {
    "model_name_or_path": "base_model",
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler",
    "lr_scheduler_kwargs.min_lr_rate": "cosine_min_lr_ratio",
    "optim": "optimizer",
    "run_name": "wandb_name",
    "use_rslora": "peft_use_rslora",
    "use_dora": "peft_use_dora",
}
"""Key of transformers or TRL -> key of Axolotl, if they differ."""
# Recipe keys [as conversion]: Axolotl's keys; see parse_table.
AXOLOTL_ROWS = parse_table("""
data.tokenizer: tokenizer_config
adapter.kind: adapter
adapter.targets: lora_target_linear
adapter.quantize as 4 bits: load_in_4bit
adapter.weights as text: lora_model_dir
objective.kind: rl reward_model
objective.beta as number: rl_beta orpo_alpha
objective.gamma as number: simpo_gamma
objective.sft_weight as number: cpo_alpha
objective.desirable_weight as number: kto_desirable_weight
objective.undesirable_weight as number: kto_undesirable_weight
objective.center_weight as number: center_rewards_coefficient
data.paths, data.sources: datasets.*.path datasets.*.name datasets.*.split datasets.*.data_files
  datasets.*.revision pretraining_dataset.*.path pretraining_dataset.*.name pretraining_dataset.*.split
data.sources: datasets.*.field datasets.*.field_messages datasets.*.field_tools datasets.*.field_system
  datasets.*.field_chosen datasets.*.field_rejected
data.kind, data.layout: datasets.*.type pretraining_dataset.*.type
data.learn_from: train_on_inputs
data.eval_fraction: val_set_size
data.chat_template: chat_template chat_template_jinja
data.sequence_length: sequence_len
data.packing: sample_packing
data.too_long: excess_length_strategy
data.prepare_workers as integer: dataset_num_proc dataset_processes
model.attention as attention: attn_implementation
eval.every: evals_per_epoch
eval.tasks as names: lm_eval_tasks
checkpoint.every: saves_per_epoch
log.tensorboard as boolean: use_tensorboard
wandb.mode: wandb_mode
wandb.project as text: wandb_project
wandb.entity as text: wandb_entity
""")


def import_axolotl(draft: ImportDraft) -> None:
    """Import data, objective, adapter, training arguments and W&B mode.

    Raises:
        ConfigError: A value is not supported, or a key is missing that Axolotl itself requires.
    """
    rl = "reward" if draft.read_value("reward_model", to_bool) else draft.read_value("rl", to_text)
    if rl is not None:
        _put_objective(draft, rl)
    _put_data(draft, rl)
    common.put_arguments(draft, common.put_held_out(draft, "val_set_size"))
    if isinstance(draft.recipe["schedule.warmup"], float):
        draft.left_open["warmup_ratio"] = (
            "steps of warmup are rounded up here; Axolotl rounds down, and its default is at most 100 steps"
        )
    default_mode = "auto" if draft.get_stated("wandb_project") else "disabled"
    draft.put("wandb.mode", draft.read_value("wandb_mode", to_text) or default_mode)
    if tokenizer := draft.read_value("tokenizer_config", to_text):
        draft.put("data.tokenizer", {"pretrained": tokenizer})
    required = ["base_model", "learning_rate"]
    adapter = draft.read_value("adapter", to_text)
    if adapter is not None:
        _put_adapter(draft, adapter)
        if "adapter.weights" not in draft.recipe:
            required += ["lora_r", "lora_alpha"]
    for key in required:
        if draft.get_stated(key) is None:
            raise ConfigError(
                f"{draft.file.path}: {key} is missing; Axolotl has no default for it, so add it"
            )


def _put_adapter(draft: ImportDraft, kind: str) -> None:
    """Put the adapter of Axolotl's kind `lora` or `qlora`, and the layers that get it."""
    if kind not in ("lora", "qlora"):
        raise draft.make_error("adapter", f"{kind} is not supported; expected lora or qlora")
    common.put_adapter(draft)
    if draft.read_value("lora_target_linear", to_bool):
        draft.discard("adapter.targets", "lora_target_linear takes all linear layers")
    else:
        common.ask_for_targets(draft)


def _put_objective(draft: ImportDraft, rl: str) -> None:
    """Put the kind of the objective for a value of `rl`, and values that Axolotl fixes."""
    if rl not in OBJECTIVES:
        raise draft.make_error("rl", f"{rl} is not supported; expected {', '.join(OBJECTIVES)}")
    draft.put("objective.kind", OBJECTIVES[rl])
    if rl == "simpo":  # defaults of TRL's CPOConfig, which Axolotl uses
        draft.recipe = {"objective.gamma": 0.5, "objective.sft_weight": 1.0} | draft.recipe
    elif rl == "reward":
        draft.put("objective.margin_weight", 0.0, "no margins, as in Axolotl")
    elif rl in ("dpo", "ipo"):
        draft.put("objective.loss_type", "ipo" if rl == "ipo" else "sigmoid")


def _put_data(draft: ImportDraft, rl: str | None) -> None:
    """Put the sources of the data, and how their rows are read."""
    pretraining_entries = draft.list_entries("pretraining_dataset")
    entries = draft.list_entries("datasets") + pretraining_entries
    types = {str(draft.read_value(f"{entry}.type") or "pretrain") for entry in entries}
    if rl:
        kind = "preference"
    elif types and types <= {"completion", "pretrain"}:
        kind = "text"
    else:
        kind = "chat"
    put_sources(draft, kind, [_find_source(draft, entry, kind) for entry in entries])
    length = draft.read_value("sequence_len", to_int)
    packs = draft.read_value("sample_packing", to_bool)
    draft.put("data.sequence_length", length)
    if pretraining_entries:
        draft.put("data.packing", "concatenate")
    else:
        draft.put("data.packing", "best_fit" if packs else "none")
    if kind == "text":
        draft.left_open["type"] = common.BEGIN_TOKEN_ADVICE
        return
    if rl:
        common.put_preferences(draft, length)
    _put_row_rules(draft)
    other_types = types - set(TEMPLATE_TYPES.get(rl, ()))
    if other_types:
        names = ", ".join(sorted(other_types))
        what = f"a Jinja file that writes the same text as Axolotl's type {names}"
        if not rl and all(map(_is_sharegpt, other_types)):
            draft.put("data.layout", "sharegpt")
        else:
            what += " (docs/how-to/data.md, Write the text of a row yourself)"
            draft.put("data.layout", "row")
            draft.put("data.learn_from", "assistant", "what the template writes in {% generation %}")
        draft.ask("data.chat_template", f"{FILL_IN}.jinja", what)
    else:
        layout = "messages" if rl else "sharegpt"
        draft.put("data.layout", "icr" if rl == "reward" else layout)
        _put_template(draft)
    if rl in ("dpo", "ipo"):
        draft.left_open["eos_token"] = (
            "if the template ends an answer with another token, Axolotl adds the tokenizer's end token and "
            "counts it in the loss; here it is not added"
        )


def _is_sharegpt(dataset_type: str) -> bool:
    """Return whether rows have ShareGPT's conversations, as with Axolotl's former types `sharegpt...`."""
    return dataset_type.partition(".")[0] == "sharegpt"


def _put_row_rules(draft: ImportDraft) -> None:
    """Put what happens to rows that are too long, and which tokens of a row count in the loss."""
    too_long = draft.read_value("excess_length_strategy", to_text)
    draft.put("data.too_long", "error" if too_long == "raise" else "drop")
    if too_long not in (None, "drop", "raise"):
        draft.leave_open("excess_length_strategy", f"{too_long}: rows that are too long are left out here")
    draft.put("data.append_eos", False)
    draft.put("data.learn_from", "content", "and the end token after it, as in Axolotl")
    if draft.read_value("train_on_inputs", to_bool):
        draft.leave_open(
            "train_on_inputs",
            "in Axolotl the content of every turn counts in the loss, here only the assistant's",
        )


def _put_template(draft: ImportDraft) -> None:
    """Put the chat template: a file, `chatml` or the tokenizer's own; leave others to the user."""
    name = draft.read_value("chat_template", to_text)
    jinja = draft.read_value("chat_template_jinja", to_text)  # a path, or the template itself
    path = draft.find_path(jinja) if jinja and "{" not in jinja else None
    if path is not None and name in (None, "jinja"):
        draft.put("data.chat_template", str(path))
    elif name == "chatml":
        draft.put("data.chat_template", "chatml")
    elif jinja or name not in (None, "tokenizer_default"):
        template = f"Axolotl's template {name} (utils/chat_templates/templates)"
        if name in (None, "jinja", "tokenizer_default"):
            template = "the template of chat_template_jinja"
        draft.ask("data.chat_template", f"{FILL_IN}.jinja", f"a Jinja file with {template}")


def _find_source(draft: ImportDraft, entry: str, kind: str) -> Source:
    """Return the source of an entry of `datasets`, whose dotted key is `entry`, for data of this kind."""
    source = find_source(draft, {name: f"{entry}.{name}" for name in DATASET_FIELDS})
    if kind == "text":
        return source | {"text_field": draft.read_value(f"{entry}.field", to_text) or "text"}
    names = {name: draft.read_value(f"{entry}.field_{name}", to_text) or name for name in ROW_FIELDS}
    if kind == "chat":
        names["conversations"] = names.pop("messages")
        if _is_sharegpt(str(draft.read_value(f"{entry}.type"))):  # its messages are in another field
            names["conversations"] = draft.get_stated(f"{entry}.field_messages") or "conversations"
    fields = {ours: theirs for ours, theirs in names.items() if ours != theirs}
    return source | ({"fields": fields} if fields else {})


TOOL = TrainerTable(
    title="Axolotl",
    rows=common.rename_keys(common.ROWS | common.MODEL_ROWS, AXOLOTL_NAMES) | AXOLOTL_ROWS,
    import_values=import_axolotl,
    names=AXOLOTL_NAMES,
    defaults={key: common.DEFAULTS[key] for key in ("weight_decay", "adam_beta1", "adam_beta2", "seed")}
    | {"max_grad_norm": 1.0, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0}
    | {"sequence_len": 512, "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "warmup_ratio": 0.03}
    | {"bf16": "auto", "save_strategy": "epoch", "save_total_limit": 4},
)
