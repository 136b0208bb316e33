"""Numbers of a recipe that follow from several keys of theirs: batch, schedule, cadence, adapter, precision.

Each takes their keys by the names that transformers gave them; Axolotl's others are handed over.
"""

from __future__ import annotations

import math
import re
from typing import Any, get_args

from pipeline.config.objective_schema import ObjectiveConfig
from pipeline.errors import ConfigError
from pipeline.foreign_configs.mapping import Draft, NotTakenError, flag, names, number, text, whole

SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", 0.0),
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "warmup_stable_decay": ("wsd", 0.0),
}
"""transformers' schedules -> ours, and the share of the rate that is left at the end."""
HELD_WHOLE = "its states are held in fewer bits there, in fp32 here"


def optimizer(value: Any) -> str:
    """transformers' name -> the recipe's kind."""
    name = text(value).lower()
    for kind in ("adafactor", "sgd"):
        if name == kind:
            return kind
    if re.fullmatch(r"adamw(_torch|_torch_fused|_hf|_apex_fused|_anyprecision)?", name):
        return "adamw"
    if re.fullmatch(
        r"(paged_|ao_|optimi_)?adamw(_bnb)?(_8bit|_4bit|_32bit|_torch_8bit|_torch_4bit|_fp8)?", name
    ):
        raise NotTakenError(f"{name} is AdamW, which the recipe has; {HELD_WHOLE}")
    raise NotTakenError(f"{name} is not built here; the recipe has AdamW")


def run_name(value: Any) -> str:
    """A name that a run can have."""
    return re.sub(r"[^\w.-]+", "-", text(value))[:128]


def interval(value: Any) -> int:
    """Steps between two of something."""
    if 0 < number(value) < 1:
        raise NotTakenError(f"{value} of a run's steps: write a number of steps")
    return whole(value)


def settle_batch(draft: Draft, micro: str, accumulation: str) -> None:
    """The samples of a step; what a device takes at once and what it adds up are theirs a device."""
    size, steps = draft.given(micro, whole), draft.given(accumulation, whole)
    told = f"{size} (a GPU) x {steps} (accumulated) x {draft.gpus} (GPUs, --gpus)"
    if min(size, steps) < 1:
        raise ConfigError(f"{draft.file.at(micro)}: {told} is no number of samples")
    finds = draft.given("auto_find_batch_size", flag)
    draft.put("batch.micro_batch_size", "auto" if finds else size, "the largest that fits" if finds else "")
    draft.put("batch.global_batch_size", size * steps * draft.gpus, told)


def settle_length(draft: Draft, epochs: str) -> None:
    """Steps of the run, or epochs."""
    steps = draft.given("max_steps", whole)
    if steps is not None and steps > 0:
        draft.put("max_steps", steps)
    else:
        draft.put("max_epochs", number(draft.given(epochs, number)))


def steps_of(draft: Draft) -> int | None:
    """Steps of an epoch, where its examples could be counted and each is a sample of its own."""
    if draft.rows is None or draft.recipe.get("data.packing") != "none":
        return None
    held_out = draft.recipe.get("data.eval_fraction", 0.0)
    return max(1, math.ceil(draft.rows * (1 - held_out) / draft.recipe["batch.global_batch_size"]))


def settle_schedule(draft: Draft, kind: str) -> None:
    """Shape and warm-up. Needs the data's rows, batch and length."""
    given = draft.given(kind, text)
    shape, last = SCHEDULES.get(given, ("cosine", 0.0))
    draft.put(
        "schedule.kind", shape, "" if given in draft.file.tree.values() else f"{draft.tool.title}'s default"
    )
    if given not in SCHEDULES:
        draft.drop(kind, f"{given} is no shape of schedule.kind; cosine stands in its place")
    more = draft.given("lr_scheduler_kwargs")
    more = more if isinstance(more, dict) else {}
    last = (
        draft.given("cosine_min_lr_ratio", number)
        or more.get("min_lr_rate")
        or more.get("min_lr_ratio")
        or last
    )
    if last is not None:
        draft.put("schedule.min_learning_rate_ratio", float(last))
    if "num_decay_steps" in more and shape == "wsd":
        draft.put("schedule.decay_steps", more.pop("num_decay_steps"))
    if left := sorted(set(more) - {"min_lr_rate", "min_lr_ratio"}):
        draft.drop("lr_scheduler_kwargs", f"not taken of it: {', '.join(map(str, left))}")
    steps, share = draft.given("warmup_steps", number), draft.given("warmup_ratio", number)
    if steps is not None and 0 < steps < 1:  # transformers 5 has the share there
        steps, share = None, steps
    elif draft.file.tree.get("warmup_ratio") is None and steps is not None:
        share = None
    if given == "constant":
        steps, share = 0, None  # transformers' constant has no warm-up, whatever is asked for
    if not steps and share:
        steps = _share_of_steps(draft, share)
        if steps is not None and draft.file.tree.get("warmup_ratio") is None:
            steps = min(steps, 100)  # Axolotl's default is a share, and no more than that
    draft.put("schedule.warmup", whole(steps or 0), *_told_of_warmup(draft, steps, share))


def _share_of_steps(draft: Draft, share: float) -> int | None:
    an_epoch, total = steps_of(draft), draft.recipe.get("max_steps")
    if total is None and an_epoch is not None:
        total = math.ceil(an_epoch * draft.recipe["max_epochs"])
    if total is not None:
        return math.ceil(share * total)
    draft.fill_in.append(
        f"schedule.warmup: {share:g} of the run's steps; a run says how many it has when it begins"
    )
    return None


def _told_of_warmup(draft: Draft, steps: float | None, share: float | None) -> tuple[str, ...]:
    if not share:
        return ()
    return (f"{share:g} of the steps" + (": fill in" if steps is None else ""),)


def settle_cadence(draft: Draft, has_eval: bool) -> None:
    """When there is a checkpoint and an evaluation; by steps, or by epochs where those can be counted."""
    for ours, what, default in (("checkpoint.every", "save", "steps"), ("eval.every", "eval", "no")):
        if what == "eval" and not has_eval:
            for key in ("eval_steps", "eval_strategy", "evals_per_epoch"):
                draft.drop(key, "nothing is held out to evaluate on")
            continue
        strategy, every = draft.given(f"{what}_strategy"), draft.given(f"{what}_steps", number)
        parts = draft.given(f"{what}s_per_epoch", number)
        strategy = strategy or ("steps" if every else default)
        if parts or strategy == "epoch":
            _by_epoch(draft, ours, f"{what}s_per_epoch" if parts else f"{what}_strategy", parts or 1)
        elif strategy in (False, "no"):
            draft.put(ours, 0)
        elif strategy == "steps" and every is not None:
            try:
                draft.put(ours, interval(every))
            except NotTakenError as reason:
                draft.drop(f"{what}_steps", str(reason))
    best, saves, evaluations = (
        draft.recipe.get(key) for key in ("checkpoint.keep_best", "checkpoint.every", "eval.every")
    )
    if best and (not evaluations or (saves or 0) % evaluations):
        del draft.recipe["checkpoint.keep_best"]
        draft.drop("load_best_model_at_end", "checkpoint.every is to be a multiple of eval.every for it")


def _by_epoch(draft: Draft, ours: str, key: str, parts: float) -> None:
    steps = steps_of(draft)
    if steps is None:
        draft.drop(key, f"an epoch's steps depend on the data; write them as {ours}")
    else:
        draft.put(ours, max(1, round(steps / parts)), f"an epoch has some {steps} steps")


def settle_adapter(
    draft: Draft,
    *,
    rank: str,
    alpha: float,
    targets: list[str] | None,
    weights: str | None = None,
    flags: tuple[str, str] = ("use_rslora", "use_dora"),
    to_save: str = "lora_modules_to_save",
    bits: int | None = None,
    told_of_alpha: str = "",
) -> None:
    """The section of a low-rank adapter; `bits`: of the base, `flags`: their keys of rsLoRA and DoRA."""
    width, (rs, dora) = draft.given(rank, whole), flags
    kind = "dora" if draft.given(dora) else "rslora" if draft.given(rs) else "lora"
    if draft.given(dora) and draft.given(rs):  # alpha / sqrt(rank), said in the words of alpha / rank
        alpha, told_of_alpha = round(alpha * math.sqrt(width), 4), f"{alpha:g} x sqrt(rank), for {rs}"
    draft.put("adapter.kind", kind)
    if weights is None:
        draft.put("adapter.rank", width)
        draft.put("adapter.alpha", float(alpha), told_of_alpha)
    else:
        draft.put("adapter.weights", weights, "brings its rank, alpha and targets")
    draft.put("adapter.dropout", float(draft.given("lora_dropout", number) or 0.0))
    if targets and weights is None:
        draft.put("adapter.targets", targets)
    if saved := draft.given(to_save, names):
        draft.put("adapter.modules_to_save", saved)
    if bits == 4:
        draft.put("adapter.quantize", "nf4")
    if ratio := draft.given("loraplus_lr_ratio", number):
        group = {"patterns": ["*.lora_B.*"], "learning_rate_factor": float(ratio)}
        draft.put("optimizer.groups", [group], "LoRA+")


def settle_bits(draft: Draft, keys: dict[str, int | None]) -> int | None:
    """In how many bits the base is held, by keys that ask for it (None: their value says how many)."""
    asked = {key: bits or draft.given(key, whole) for key, bits in keys.items() if draft.given(key)}
    for key, bits in asked.items():
        if bits != 4:
            draft.drop(key, f"{bits} bits: a base is held in the precision of the run, or in 4 bits")
    return next(iter(asked.values()), None)


def settle_reports(draft: Draft, key: str = "report_to") -> None:
    """Where numbers go besides metrics.jsonl."""
    where = set(draft.given(key, names) or [])
    draft.put("wandb.mode", "auto" if where & {"wandb", "all"} else "disabled")
    if where & {"tensorboard", "all"}:
        draft.put("log.tensorboard", True)
    if others := sorted(where - {"wandb", "all", "tensorboard", "none"}):
        draft.drop(key, f"{', '.join(others)}: a sink of your own (docs/your-own-sink.md)")


def settle_resume(draft: Draft) -> None:
    """A run goes on by itself; another trainer's checkpoints say nothing to it."""
    if isinstance(draft.given("resume_from_checkpoint"), str):
        draft.drop(
            "resume_from_checkpoint",
            "of another trainer; start from its weights: adapter.weights, model.weights",
        )
    elif draft.given("resume_from_checkpoint"):
        draft.put("checkpoint.resume", "auto")


def settle_precision(draft: Draft, default: Any = False) -> None:
    """What the JSON needs of the keys: precision, and whether theirs names one or shards without it."""
    bf16, fp16 = draft.given("bf16"), bool(draft.given("fp16"))
    draft.json["bf16"] = bf16 if bf16 is not None else False if fp16 else default
    draft.json["fp16"] = fp16
    for key, value in (("tf32", draft.given("tf32")), ("compile", draft.given("torch_compile"))):
        if value:
            draft.json[key] = value
    draft.json["theirs"] = draft.given("deepspeed")
    draft.json["sharded"] = bool(draft.given("fsdp") or draft.given("fsdp_config"))


def settle_recomputing(draft: Draft, default: bool, key: str = "gradient_checkpointing") -> None:
    """Activation checkpointing."""
    given = draft.given(key)
    is_on = default if given is None else given
    if is_on is not False:
        draft.put("model.activation_checkpointing", "full", "" if given else f"{draft.tool.title}'s default")
    if isinstance(is_on, str):
        draft.put("model.activation_offload", True)


def settle_terms(draft: Draft, kind: str, terms: dict[str, str], defaults: dict[str, float]) -> None:
    """Numbers of an objective: their key -> its key, where this kind has one; `defaults`: by their key."""
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
    """Both of them."""
    betas = [draft.given(key, number) for key in ("adam_beta1", "adam_beta2")]
    draft.put("optimizer.betas", [float(beta) for beta in betas])
