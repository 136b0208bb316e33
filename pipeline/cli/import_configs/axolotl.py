"""Imports Axolotl's YAML (`axolotl train FILE`), by utils/schemas/*.py of July 2026.

Conversations written by a chat template and plain text are imported; text of other types is left open.
"""

from __future__ import annotations

from pipeline.cli.import_configs import training_arguments as common
from pipeline.cli.import_configs.conversions import parse_table, to_bool, to_int, to_text
from pipeline.cli.import_configs.mapping import (
    DATASET_FIELDS,
    FILL_IN,
    ImportDraft,
    Source,
    TrainerTable,
    find_source,
    put_sources,
)
from pipeline.errors import ConfigError

OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "reward": "reward"}
CHAT_TYPES = {
    None: ("chat_template", "chat_template.load"),
    "dpo": ("chat_template", "chat_template.default"),
    "ipo": ("chat_template", "chat_template.default"),
    "reward": ("bradley_terry.chat_template",),
}
"""Types of data sets whose rows the chat template writes, by `rl`."""
FIELDS = ("messages", "tools", "system", "chosen", "rejected")
"""Fields of a row that an entry's `field_...` may rename."""
NAMES = {
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
checkpoint.every: saves_per_epoch
log.tensorboard as boolean: use_tensorboard
wandb.mode: wandb_mode
wandb.project as text: wandb_project
wandb.entity as text: wandb_entity
""")


def import_axolotl(draft: ImportDraft) -> None:
    """Import data, objective and adapter.

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
            "steps of warmup are rounded up here; Axolotl rounds down, and by default to 100 steps at most"
        )
    logs = "auto" if draft.get_stated("wandb_project") else "disabled"
    draft.put("wandb.mode", draft.read_value("wandb_mode", to_text) or logs)
    if tokenizer := draft.read_value("tokenizer_config", to_text):
        draft.put("data.tokenizer", {"pretrained": tokenizer})
    needed = ["base_model", "learning_rate"]
    if (kind := draft.read_value("adapter", to_text)) is not None:
        if kind not in ("lora", "qlora"):
            raise draft.make_error("adapter", f"{kind} is not supported; expected lora or qlora")
        common.put_adapter(draft)
        needed += ["lora_r", "lora_alpha"] if "adapter.weights" not in draft.recipe else []
        if draft.read_value("lora_target_linear", to_bool):
            draft.discard("adapter.targets", "lora_target_linear takes all linear layers")
        else:
            common.ask_for_targets(draft)
    for key in needed:
        if draft.get_stated(key) is None:
            raise ConfigError(
                f"{draft.file.path}: {key} is missing; Axolotl has no default for it, so add it"
            )


def _put_objective(draft: ImportDraft, rl: str) -> None:
    if rl not in OBJECTIVES:
        raise draft.make_error("rl", f"{rl} is not supported; expected {', '.join(OBJECTIVES)}")
    draft.put("objective.kind", OBJECTIVES[rl])
    if rl == "simpo":  # TRL's CPOConfig
        draft.recipe = {"objective.gamma": 0.5, "objective.sft_weight": 1.0} | draft.recipe
    elif rl == "reward":
        draft.put("objective.margin_weight", 0.0, "no margins, as in Axolotl")
    elif rl in ("dpo", "ipo"):
        draft.put("objective.loss_type", "ipo" if rl == "ipo" else "sigmoid")


def _put_data(draft: ImportDraft, rl: str | None) -> None:
    streams = draft.list_entries("pretraining_dataset")
    entries = draft.list_entries("datasets") + streams
    types = {str(draft.read_value(f"{at}.type") or "pretrain") for at in entries}
    is_text = bool(types) and rl is None and types <= {"completion", "pretrain"}
    kind = "text" if is_text else "chat"
    if rl:
        kind = "preference"
    put_sources(draft, kind, [_find_source(draft, at, kind) for at in entries])
    length = draft.read_value("sequence_len", to_int)
    packs = draft.read_value("sample_packing", to_bool)
    draft.put("data.sequence_length", length)
    if streams:
        draft.put("data.packing", "concatenate")
    else:
        draft.put("data.packing", "best_fit" if packs else "none")
    if is_text:
        draft.left_open["type"] = common.BEGIN_TOKEN_ADVICE
        return
    if rl:
        common.put_preferences(draft, length)
    too_long = draft.read_value("excess_length_strategy", to_text)
    draft.put("data.too_long", "error" if too_long == "raise" else "drop")
    if too_long not in (None, "drop", "raise"):
        draft.leave_open("excess_length_strategy", f"{too_long}: a row that is too long is left out here")
    draft.put("data.append_eos", False)
    draft.put("data.learn_from", "content", "and the end token after it, as in Axolotl")
    if draft.read_value("train_on_inputs", to_bool):
        draft.leave_open(
            "train_on_inputs",
            "in Axolotl the content of every turn counts in the loss, here only the assistant's",
        )
    if others := types - set(CHAT_TYPES.get(rl, ())):
        what = f"a Jinja file that writes what Axolotl's type {', '.join(sorted(others))} writes"
        draft.ask(
            "data.chat_template", f"{FILL_IN}.jinja", f"{what} (docs/data.md, Rows that a template reads)"
        )
        draft.put("data.layout", "row")
    else:
        layout = "messages" if rl else "sharegpt"
        draft.put("data.layout", "icr" if rl == "reward" else layout)
        _put_template(draft)
    if rl in ("dpo", "ipo"):
        draft.left_open["eos_token"] = "TRL adds it after another end of a turn, and counts it in the loss"


def _put_template(draft: ImportDraft) -> None:
    given = draft.read_value("chat_template", to_text)
    jinja = draft.read_value("chat_template_jinja", to_text)
    found = draft.find_path(jinja) if jinja and "{" not in jinja else None
    if found is not None and given in (None, "jinja"):
        draft.put("data.chat_template", str(found))
    elif given == "chatml":
        draft.put("data.chat_template", "chatml")
    elif jinja or given not in (None, "tokenizer_default"):
        what = f"a Jinja file with Axolotl's {given} (utils/chat_templates/templates), or one for {given}"
        draft.ask("data.chat_template", f"{FILL_IN}.jinja", what)


def _find_source(draft: ImportDraft, at: str, kind: str) -> Source:
    source = find_source(draft, {name: f"{at}.{name}" for name in DATASET_FIELDS})
    if kind == "text":
        return source | {"text_field": draft.read_value(f"{at}.field", to_text) or "text"}
    named = {name: draft.read_value(f"{at}.field_{name}", to_text) or name for name in FIELDS}
    if kind == "chat":
        named["conversations"] = named.pop("messages")
    fields = {ours: theirs for ours, theirs in named.items() if ours != theirs}
    return source | ({"fields": fields} if fields else {})


TOOL = TrainerTable(
    title="Axolotl",
    rows=common.rename_keys(common.ROWS | common.MODEL_ROWS, NAMES) | AXOLOTL_ROWS,
    import_values=import_axolotl,
    names=NAMES,
    defaults={key: common.DEFAULTS[key] for key in ("weight_decay", "adam_beta1", "adam_beta2", "seed")}
    | {"max_grad_norm": 1.0, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0}
    | {"sequence_len": 512, "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "warmup_ratio": 0.03}
    | {"bf16": "auto", "save_strategy": "epoch", "save_total_limit": 4},
)
