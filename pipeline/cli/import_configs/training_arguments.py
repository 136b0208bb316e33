"""Imports transformers' TrainingArguments (4.57 and 5). Other trainers share their keys and rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from pipeline.cli.import_configs.conversions import parse_table, to_bool, to_int, to_names, to_number, to_text
from pipeline.cli.import_configs.mapping import ImportDraft, TrainerTable, put_sources
from pipeline.config.optimizer_schema import ADVICE_ON_OTHER_KINDS, OptimizerKind, ScheduleKind
from pipeline.config.recipe import FILL_IN

# Keys here [as conversion]: keys of TrainingArguments; see parse_table.
ROWS = parse_table("""
batch.micro_batch_size: per_device_train_batch_size
batch.global_batch_size: gradient_accumulation_steps
max_steps: max_steps
max_epochs: num_train_epochs
optimizer.kind: optim
optimizer.learning_rate as number: learning_rate
optimizer.weight_decay as number: weight_decay
optimizer.betas: adam_beta1 adam_beta2
optimizer.eps as number: adam_epsilon
optimizer.max_grad_norm as number: max_grad_norm
schedule.kind: lr_scheduler_type
schedule.min_learning_rate_ratio: lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.min_lr
schedule.warmup: warmup_steps warmup_ratio
checkpoint.every: save_steps save_strategy
checkpoint.keep_last as integer: save_total_limit
eval.every: eval_steps eval_strategy
log.every as integer: logging_steps
wandb.mode, log.tensorboard: report_to
name as name: run_name
run_dir as text: output_dir
seed as integer: seed
model.trust_remote_code as boolean: trust_remote_code
model.neftune_alpha as number: neftune_noise_alpha
model.activation_checkpointing as recomputation: gradient_checkpointing
JSON: bf16.enabled: bf16
JSON: fp16.enabled: fp16
JSON: tf32.enabled as true, false or auto: tf32
JSON: compile.enabled as true, false or auto: torch_compile
JSON: zero_optimization: deepspeed fsdp fsdp_config
""")
MODEL_ROWS = parse_table("""
model.pretrained as text: model_name_or_path
adapter.kind: use_rslora use_dora
adapter.rank as integer: lora_r
adapter.alpha as number: lora_alpha
adapter.dropout as number: lora_dropout
adapter.targets as targets: lora_target_modules
adapter.modules_to_save as names: lora_modules_to_save
optimizer.groups as LoRA+: loraplus_lr_ratio
""")
"""Keys of the other trainers, whose files also name a model, by TRL's names."""
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
"""Defaults of TrainingArguments."""
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
"""Value of `lr_scheduler_type` -> schedule.kind."""
BEGIN_TOKEN_ADVICE = (
    "a tokenizer's begin token is not put before each text here, as the other trainer does; for the same ids "
    "write a template (docs/how-to/data.md, Write the text of a row yourself)"
)


def rename_keys(table: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a table with its keys renamed to a trainer's own names, by `names`."""
    return {names.get(key, key): value for key, value in table.items()}


def put_arguments(draft: ImportDraft, has_eval: bool) -> None:
    """Import the values that several keys of TrainingArguments determine together.

    Args:
        draft: Draft to put the values into.
        has_eval: Whether the run has held-out data; without, intervals of evaluation have no effect.

    Raises:
        ConfigError: A value has the wrong type, or is not positive.
    """
    _put_batch_size_and_length(draft)
    draft.put("optimizer.betas", [draft.read_value(key, to_number) for key in ("adam_beta1", "adam_beta2")])
    _put_optimizer(draft)
    _put_schedule(draft)
    _put_cadence(draft, "checkpoint.every", "save")
    if has_eval:
        _put_cadence(draft, "eval.every", "eval")
    trackers = set(draft.read_value("report_to", to_names) or [])
    draft.put("wandb.mode", "auto" if trackers & {"wandb", "all"} else "disabled")
    if trackers & {"tensorboard", "all"}:
        draft.put("log.tensorboard", True)
    if trackers - {"wandb", "all", "tensorboard", "none"}:
        draft.leave_open(
            "report_to", "only W&B and TensorBoard are imported; for others see docs/how-to/watching.md"
        )
    if draft.recipe.get("model.trust_remote_code"):
        draft.left_open["trust_remote_code"] = (
            "imported: the recipe runs code of the model's repository; if you do not trust that code, remove "
            "model.trust_remote_code"
        )
    _put_json(draft)


def _put_batch_size_and_length(draft: ImportDraft) -> None:
    """Put the batch size, which is per GPU in the imported file, and the steps or epochs of the run."""
    size_key = "per_device_train_batch_size"
    size = draft.read_value(size_key, to_int)
    accumulated = draft.read_value("gradient_accumulation_steps", to_int)
    product = f"{size} (per GPU) x {accumulated} (accumulated) x {draft.gpus} (GPUs, --gpus)"
    if min(size, accumulated) < 1:
        raise draft.make_error(size_key, f"{product} is no batch size; expected positive numbers")
    draft.put("batch.micro_batch_size", size)
    draft.put("batch.global_batch_size", size * accumulated * draft.gpus, product)
    max_steps = draft.read_value("max_steps", to_int)
    if max_steps is not None and max_steps > 0:
        draft.put("max_steps", max_steps)
    else:
        draft.put("max_epochs", draft.read_value("num_train_epochs", to_number))


def _put_optimizer(draft: ImportDraft) -> None:
    """Put the kind of the optimizer. Leave it to the user if there is no counterpart."""
    name = draft.read_value("optim", to_text).lower()
    replaced_by = [key for key in ("use_badam", "use_galore", "use_muon") if draft.get_stated(key)]
    if replaced_by:
        ask_for_kind(draft, "optimizer.kind", replaced_by[0].removeprefix("use_"))
    elif name in ("adafactor", "sgd"):
        draft.put("optimizer.kind", name)
    elif re.fullmatch(r"adamw(_torch|_torch_fused|_hf|_apex_fused|_anyprecision)?", name):
        draft.put("optimizer.kind", "adamw")
    else:
        ask_for_kind(draft, "optimizer.kind", name)
    remove_unread_keys(draft)


def remove_unread_keys(draft: ImportDraft) -> None:
    """Remove keys of AdamW if the recipe has another optimizer, and set the momentum of SGD to theirs."""
    kind = draft.recipe["optimizer.kind"]
    if kind in ("sgd", "adafactor"):
        draft.recipe.pop("optimizer.betas", None)
        draft.discard("optimizer.eps", f"{kind} does not read it")
    if kind == "sgd" and "optimizer.momentum" not in draft.recipe:
        draft.put("optimizer.momentum", 0.0, "none, as in transformers")


def ask_for_kind(draft: ImportDraft, ours: str, theirs: str) -> None:
    """Leave the kind of optimizer or schedule, whose value in the imported file is `theirs`, to the user."""
    kinds = get_args(OptimizerKind if ours == "optimizer.kind" else ScheduleKind)
    default = f"write one of {', '.join(kinds)}, or your own (docs/how-to/extending.md)"
    advice = ADVICE_ON_OTHER_KINDS.get(theirs, default)
    draft.ask(ours, FILL_IN, f"{theirs} is not supported, and another kind trains another curve; {advice}")


def _put_schedule(draft: ImportDraft) -> None:
    """Put the kind of the schedule, its final learning rate and its warmup.

    The kind is left to the user if there is no counterpart, or if the file changes the curve of the kind.
    """
    scheduler = draft.read_value("lr_scheduler_type", to_text)
    rate_keys = ("lr_scheduler_kwargs.min_lr_rate", "lr_scheduler_kwargs.min_lr")
    others = [key for key in draft.theirs if key.startswith("lr_scheduler_kwargs") and key not in rate_keys]
    kind = SCHEDULES.get(scheduler)
    if kind is None:
        ask_for_kind(draft, "schedule.kind", scheduler)
    elif others:
        ask_for_kind(draft, "schedule.kind", f"{scheduler} with {', '.join(others)}")
    else:
        draft.put("schedule.kind", kind)
    if kind != "constant":
        ratio = draft.read_value("lr_scheduler_kwargs.min_lr_rate", to_number)
        rate = draft.read_value("lr_scheduler_kwargs.min_lr", to_number)
        peak = draft.recipe.get("optimizer.learning_rate")
        if rate and peak:
            ratio = rate / peak
        draft.put("schedule.min_learning_rate_ratio", ratio or 0.0)
    if scheduler == "constant":
        draft.put("schedule.warmup", 0, "transformers' constant schedule has no warmup")
    else:
        put_warmup(draft)


def put_warmup(draft: ImportDraft) -> None:
    """Put the length of the warmup, in steps or as a share of the run."""
    steps = draft.read_value("warmup_steps", to_number)
    share = draft.read_value("warmup_ratio", to_number)
    states_only_steps = (
        draft.get_stated("warmup_steps") is not None and draft.get_stated("warmup_ratio") is None
    )
    if states_only_steps:
        share = None  # it is the trainer's default, and the file's steps replace it
    if steps and steps >= 1:
        draft.put("schedule.warmup", to_int(steps))
    else:  # in transformers 5, warmup_steps below 1 is a share of the steps
        draft.put("schedule.warmup", float(steps or share or 0) or 0)


def _put_cadence(draft: ImportDraft, ours: str, event: str) -> None:
    """Put the interval of checkpoints (`event` is save) or evaluations (eval), as steps or epochs.

    Args:
        draft: Draft to put the interval into.
        ours: Key of the recipe.
        event: Beginning of their keys: `EVENT_steps`, `EVENT_strategy` and, in Axolotl, `EVENTs_per_epoch`.
    """
    steps = draft.read_value(f"{event}_steps", to_number)
    strategy = draft.read_value(f"{event}_strategy")
    per_epoch = draft.read_value(f"{event}s_per_epoch", to_number)
    if draft.get_stated(f"{event}_strategy") is None:
        strategy = "steps" if steps else strategy or "no"
    if per_epoch and "max_epochs" in draft.recipe:
        draft.put(ours, f"{1 / per_epoch:.12g} epochs")
    elif strategy == "epoch" and not per_epoch:
        draft.put(ours, "1 epochs")
    elif strategy in (False, "no") and not per_epoch:
        draft.put(ours, 0)
    elif strategy == "steps" and steps is not None and steps >= 1:
        draft.put(ours, to_int(steps))
    else:
        for key in (f"{event}_steps", f"{event}_strategy", f"{event}s_per_epoch"):
            draft.leave_open(key, f"write {ours} in steps or epochs")


def _put_json(draft: ImportDraft) -> None:
    """Put the precision, and the DeepSpeed JSON to start from.

    That is the JSON of the imported file; without one, `zero3` if the file shards by FSDP, else `zero2`.
    """
    bf16 = draft.read_value("bf16")
    fp16 = draft.read_value("fp16") is True
    if bf16 not in (None, True, False, "auto"):
        draft.leave_open("bf16", f"{bf16}: write bf16.enabled in the JSON")
    fp16_wins = fp16 and draft.get_stated("bf16") is None  # bf16 is only a default then
    draft.json["bf16.enabled"] = bf16 if bf16 in (True, "auto") and not fp16_wins else False
    if fp16:
        draft.json["fp16.enabled"] = True
    fsdp_keys = [key for key in ("fsdp", "fsdp_config") if draft.read_value(key)]
    for key in fsdp_keys:
        draft.leave_open(
            key, "ZeRO 3 shards the weights, or the imported JSON does; see docs/reference/splits.md"
        )
    draft.base = draft.read_value("deepspeed") or ("zero3" if fsdp_keys else "zero2")
    if not isinstance(draft.base, str | dict):
        raise draft.make_error("deepspeed", f"expected a file's name or a mapping, given {draft.base!r}")


def put_adapter(draft: ImportDraft) -> None:
    """Put the kind of a low-rank adapter, and remove rank, alpha and targets if a saved adapter is loaded."""
    uses_rslora = draft.read_value("use_rslora", to_bool)
    uses_dora = draft.read_value("use_dora", to_bool)
    if uses_dora:
        draft.put("adapter.kind", "dora")
    else:
        draft.put("adapter.kind", "rslora" if uses_rslora else "lora")
    if uses_rslora and uses_dora:
        draft.leave_open(
            "use_rslora", "with use_dora: multiply adapter.alpha by the square root of adapter.rank"
        )
    if "adapter.weights" in draft.recipe:
        for key in ("rank", "alpha", "targets"):
            draft.discard(f"adapter.{key}", f"the loaded adapter has its own {key}")


def ask_for_targets(draft: ImportDraft) -> None:
    """Leave `adapter.targets` to the user if the file relies on PEFT's choice of layers."""
    if draft.get_stated("lora_target_modules") is None and "adapter.weights" not in draft.recipe:
        what = "the file names none, and PEFT chooses by the model: for most [q_proj, v_proj]"
        draft.ask("adapter.targets", [FILL_IN], what)


def put_preferences(draft: ImportDraft, length: int) -> None:
    """Put the lengths and the packing of preference data: one pair of answers is one sample.

    Args:
        draft: Draft to put them into.
        length: Tokens of a prompt with one answer, at most.
    """
    draft.put("data.sequence_length", 2 * length, f"two answers of {length} tokens, each with its prompt")
    draft.put("data.answer_length", length)
    draft.put("data.packing", "none", "one example is one sample, as in the imported file's trainer")


def put_held_out(draft: ImportDraft, key: str) -> bool:
    """Put the held-out share of the data, and return whether it is more than 0.

    A number of rows, which the recipe does not take, is left open.

    Args:
        draft: Draft to put the share into.
        key: Key of theirs: a share below 1, or a number of rows.
    """
    share = draft.read_value(key, to_number) or 0.0
    if share >= 1:
        draft.leave_open(key, "it is a number of rows; write the share of the rows as data.eval_fraction")
    draft.put("data.eval_fraction", share if share < 1 else 0.0)
    return 0 < share < 1


def import_training_arguments(draft: ImportDraft) -> None:
    """Import the arguments of transformers' Trainer. The data, which the user's script has, is left open."""
    put_sources(draft, "chat", [])
    draft.ask("data.sequence_length", FILL_IN, "the largest number of tokens of a row in your script")
    draft.left_open["data.kind"] = (
        "chat is a guess, since the imported file does not name the data; for plain text write text"
    )
    draft.put("data.packing", "none", "one row is one sample, unless your script packs rows")
    draft.put("data.eval_fraction", 0.0, "nothing is held out of the training data")
    has_eval = draft.read_value("eval_strategy") not in (None, "no", False)
    if has_eval:
        draft.leave_open("eval_strategy", "write your script's held-out data as data.eval_sets")
    put_arguments(draft, has_eval)


TOOL = TrainerTable(
    title="transformers' Trainer",
    rows=ROWS | {"model_name_or_path": MODEL_ROWS["model_name_or_path"]},
    import_values=import_training_arguments,
    defaults=DEFAULTS,
)
