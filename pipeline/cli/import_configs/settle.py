"""Numbers of a recipe that follow from several keys of theirs: batch, schedule, cadence, adapter, precision.

Each takes their keys by the names that transformers gave them; Axolotl's others are handed over.
"""

from __future__ import annotations

import math
import re
from typing import Any, get_args

from pipeline.cli.import_configs.mapping import (
    Draft,
    NotTakenError,
    Section,
    flag,
    names,
    number,
    text,
    whole,
)
from pipeline.config.objective_schema import ObjectiveConfig

SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", 0.0),
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "warmup_stable_decay": ("wsd", 0.0),
}
"""transformers' schedules -> ours, and the share of the rate that is left at the end."""


def optimizer(value: Any) -> str:
    """Return the recipe's kind for transformers' name."""
    name = text(value).lower()
    if name in ("adafactor", "sgd"):
        return name
    if re.fullmatch(r"adamw(_torch|_torch_fused|_hf|_apex_fused|_anyprecision)?", name):
        return "adamw"
    if re.fullmatch(
        r"(paged_|ao_|optimi_)?adamw(_bnb)?(_8bit|_4bit|_32bit|_torch_8bit|_torch_4bit|_fp8)?", name
    ):
        raise NotTakenError(f"{name} is AdamW with states of fewer bits; the recipe has AdamW in fp32")
    raise NotTakenError(f"{name} is not built here; the recipe has AdamW")


def run_name(value: Any) -> str:
    """Return a name that a run can have."""
    return re.sub(r"[^\w.-]+", "-", text(value))[:128]


def settle_batch(draft: Draft, micro: str, accumulation: str) -> None:
    """Put the samples of a step; theirs are those of a device."""
    size, steps = draft.given(micro, whole), draft.given(accumulation, whole)
    told = f"{size} (a GPU) x {steps} (accumulated) x {draft.gpus} (GPUs, --gpus)"
    if min(size, steps) < 1:
        raise draft.top.refused(micro, f"{told} is no number of samples")
    finds = draft.given("auto_find_batch_size", flag)
    draft.put("batch.micro_batch_size", "auto" if finds else size, "the largest that fits" if finds else "")
    draft.put("batch.global_batch_size", size * steps * draft.gpus, told)


def settle_length(draft: Draft, epochs: str) -> None:
    """Put the steps of the run, or its epochs."""
    steps, passes = draft.given("max_steps", whole), draft.given(epochs, number)
    if steps is not None and steps > 0:
        draft.put("max_steps", steps)
    else:
        draft.put("max_epochs", passes)


def share_of_run(draft: Draft, share: float) -> int | str:
    """Return a share of the run's steps as steps or as epochs, whichever the run is measured in."""
    if "max_steps" in draft.recipe:
        return math.ceil(share * draft.recipe["max_steps"])
    return in_epochs(share * draft.recipe["max_epochs"])


def in_epochs(count: float) -> str:
    """Return a number of epochs as the recipe writes it."""
    return f"{count:.12g} epochs"


def settle_schedule(draft: Draft, kind: str) -> None:
    """Put the shape of the rate and its warm-up."""
    given = draft.given(kind, text)
    [more] = draft.top.sections("lr_scheduler_kwargs") or [Section(draft.file, {})]
    shape, last = SCHEDULES.get(given, (None, None))
    if shape == "wsd" and more.given("decay_type") != "linear":
        shape = None
    if shape is None:
        draft.drop(kind, f"{given} is no shape of schedule.kind; the recipe's default holds")
    else:
        draft.put("schedule.kind", shape, "" if given in draft.file.tree.values() else "their default")
        if shape == "wsd" and (steps := more.given("num_decay_steps", whole)):
            draft.put("schedule.decay_steps", steps)
    if last is not None:
        ratios = (draft.given("cosine_min_lr_ratio", number), *(more.given(key, number) for key in MINIMA))
        last = next((ratio for ratio in ratios if ratio), last)
        if floor := more.given("min_lr", number):
            last = floor / draft.given("learning_rate", number)
        draft.put("schedule.min_learning_rate_ratio", float(last))
    if given == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            draft.drop(key, "transformers' constant schedule has no warm-up")
        draft.put("schedule.warmup", 0)
        return
    steps, share = draft.given("warmup_steps", number), draft.given("warmup_ratio", number)
    if steps is not None and draft.file.tree.get("warmup_ratio") is None:
        share = None
    if steps and steps >= 1:
        draft.put("schedule.warmup", whole(steps))
    else:  # transformers 5 has the share in warmup_steps
        draft.put("schedule.warmup", float(steps or share or 0.0) or 0)


MINIMA = ("min_lr_rate", "min_lr_ratio")


def settle_cadence(draft: Draft, has_eval: bool) -> None:
    """Put when a checkpoint is written and when an evaluation runs."""
    for ours, what, default in (("checkpoint.every", "save", "steps"), ("eval.every", "eval", "no")):
        of_kind = (f"{what}_strategy", f"{what}_steps", f"{what}s_per_epoch")
        _, every, parts = (draft.given(key) for key in of_kind)
        if what == "eval" and not has_eval:
            for key in of_kind:
                draft.drop(key, "nothing is held out to evaluate on")
            continue
        strategy = draft.file.tree.get(of_kind[0])
        if strategy is None:
            strategy = "steps" if every else draft.tool.defaults.get(of_kind[0], default)
        if parts:
            per_run = draft.top.converted(of_kind[2], number, parts) * draft.given("num_epochs", number)
            draft.put(ours, share_of_run(draft, 1 / per_run))
        elif strategy == "epoch":
            draft.put(ours, in_epochs(1))
        elif strategy in (False, "no"):
            draft.put(ours, 0)
        elif strategy == "steps" and every is not None:
            steps = draft.top.converted(of_kind[1], number, every)
            draft.put(ours, share_of_run(draft, steps) if 0 < steps < 1 else whole(steps))
        elif strategy != "steps":
            draft.drop(of_kind[0], f"{strategy} is no cadence here")
    best = draft.given("load_best_model_at_end", flag)
    if best and draft.recipe.get("eval.every") and _is_by_loss(draft):
        if draft.recipe["checkpoint.every"] == draft.recipe["eval.every"]:
            draft.put("checkpoint.keep_best", True)
        else:
            draft.drop("load_best_model_at_end", "give checkpoint.every and eval.every one cadence for it")
    elif best:
        draft.drop("load_best_model_at_end", "it needs evaluations, and their loss as the measure")


def _is_by_loss(draft: Draft) -> bool:
    metric, greater = draft.given("metric_for_best_model"), draft.given("greater_is_better")
    if metric in (None, "loss", "eval_loss") and not greater:
        return True
    draft.drop("metric_for_best_model", "set eval.best_metric to the name that the metric has here")
    draft.drop("greater_is_better", "set eval.best_mode")
    return False


def settle_adapter(
    draft: Draft,
    *,
    rank: str,
    alpha: float | None,
    targets: list[str] | None,
    weights: str | None = None,
    flags: tuple[str, str] = ("use_rslora", "use_dora"),
    to_save: str = "lora_modules_to_save",
    told_of_alpha: str = "",
) -> None:
    """Put the section of a low-rank adapter; `flags`: their keys of rsLoRA and DoRA."""
    width = draft.given(rank, whole)
    rs, dora = (draft.given(key, flag) for key in flags)
    if weights is not None:
        draft.put("adapter.weights", weights, "brings its rank, alpha and targets")
    elif alpha is not None:
        if dora and rs:  # alpha / sqrt(rank), said in the words of alpha / rank
            alpha, told_of_alpha = alpha * math.sqrt(width), f"{alpha:g} x sqrt(rank), for {flags[0]}"
        draft.put("adapter.rank", width)
        draft.put("adapter.alpha", float(alpha), told_of_alpha)
        if targets:
            draft.put("adapter.targets", targets)
    draft.put("adapter.kind", "dora" if dora else "rslora" if rs else "lora")
    draft.put("adapter.dropout", float(draft.given("lora_dropout", number) or 0.0))
    if saved := draft.given(to_save, names):
        draft.put("adapter.modules_to_save", saved)
    if ratio := draft.given("loraplus_lr_ratio", number):
        group = {"patterns": ["*.lora_B.*"], "learning_rate_factor": float(ratio)}
        draft.put("optimizer.groups", [group], "LoRA+")


def settle_bits(draft: Draft, key: str, bits: int | None) -> None:
    """Put in how many bits the base is held."""
    if bits == 4:
        draft.put("adapter.quantize", "nf4")
    elif bits:
        draft.drop(key, f"{bits} bits: a base is held in the precision of the run, or in 4 bits")


def settle_reports(draft: Draft, key: str = "report_to") -> None:
    """Put where numbers go besides metrics.jsonl."""
    where = set(draft.given(key, names) or [])
    draft.put("wandb.mode", "auto" if where & {"wandb", "all"} else "disabled")
    if where & {"tensorboard", "all"}:
        draft.put("log.tensorboard", True)
    if others := sorted(where - {"wandb", "all", "tensorboard", "none"}):
        draft.drop(key, f"{', '.join(others)}: a sink of your own (docs/your-own-sink.md)")


def settle_resume(draft: Draft) -> None:
    """Put whether a run resumes; checkpoints of another trainer cannot be resumed."""
    given = draft.given("resume_from_checkpoint")
    if isinstance(given, str):
        draft.drop("resume_from_checkpoint", "start from its weights: adapter.weights, model.weights")
    elif given:
        draft.put("checkpoint.resume", "auto")


def settle_precision(draft: Draft, default: Any = False) -> None:
    """Note what the JSON needs of the keys: precision, their JSON, and how the work is split without it."""
    bf16, fp16 = draft.given("bf16"), draft.given("fp16") is True
    draft.json["bf16"] = bf16 if bf16 in (True, False, "auto") else False if fp16 else default
    if bf16 is not None and bf16 not in (True, False, "auto"):
        draft.drop("bf16", f"{bf16!r}: true, false or auto")
    draft.json["fp16"] = fp16
    for key, ours in (("tf32", "tf32"), ("torch_compile", "compile")):
        if (value := draft.given(key)) in (True, "auto"):
            draft.json[ours] = value
    draft.json["theirs"] = draft.given("deepspeed")
    shards = draft.given("fsdp")
    fsdp = draft.given("fsdp_config")
    draft.json["split"] = "zero3" if shards or fsdp else "zero2"
    if draft.json["split"] == "zero3" and not draft.json["theirs"]:
        for key in ("fsdp", "fsdp_config"):
            draft.drop(key, "the weights are cut by ZeRO 3; its JSON says the rest")


def settle_recomputing(draft: Draft, default: bool, key: str = "gradient_checkpointing") -> None:
    """Put activation checkpointing."""
    given = draft.given(key)
    is_on = default if given is None else given
    if is_on is True:
        draft.put("model.activation_checkpointing", "full", "" if given else "their default")
    elif is_on == "offload":
        draft.put("model.activation_checkpointing", "full")
        draft.put("model.activation_offload", True)
    elif is_on is not False:
        draft.drop(
            key, "full recomputation, with or without offload, is there: model.activation_checkpointing"
        )


def settle_terms(draft: Draft, kind: str, terms: dict[str, str], defaults: dict[str, float]) -> None:
    """Put the numbers of an objective that its kind has: their key -> its key; `defaults`: by their key."""
    draft.put("objective.kind", kind)
    for key, name in terms.items():
        value = draft.given(key, number)
        value = defaults.get(key) if value is None else value
        if value is not None and _has_term(kind, name):
            draft.put(f"objective.{name}", float(value))
        elif value:
            draft.drop(key, f"objective.kind {kind} has no such term")


def _has_term(kind: str, name: str) -> bool:
    of_kind = {tag.tag: section for section, tag in map(get_args, get_args(get_args(ObjectiveConfig)[0]))}
    return name in of_kind[kind].model_fields


def settle_betas(draft: Draft) -> None:
    """Put both of Adam's betas."""
    draft.put("optimizer.betas", [float(draft.given(key, number)) for key in ("adam_beta1", "adam_beta2")])
