"""Contradictions between keys of a recipe, found before any data is read."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from pipeline.config.data_schema import DataSection, DocumentsConfig, PreferenceDataConfig
from pipeline.config.interval import find_interval_contradictions
from pipeline.config.model_schema import CausalLMConfig
from pipeline.config.objective_schema import AutoObjectiveConfig
from pipeline.config.optimizer_schema import OptimizerConfig, ScheduleConfig
from pipeline.config.schema import RunConfig

Contradiction = tuple[tuple[str, ...], str]
"""Dotted keys that contradict each other, the one to change first; and the message."""

# Architectures of transformers whose head width is hidden_size / num_heads, with rotary positions over all
# of it. Others have a head width of their own (gemma, qwen3) or rotate a part of it (phi, gpt_neox).
ROTARY_HEADS = {
    "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe",
    "starcoder2",
}  # fmt: skip
# Fields of `extra` that change which part of a head is rotated.
OTHER_ROTARY = {"partial_rotary_factor", "rope_parameters", "rope_scaling"}

# Objectives that need preference data: pairs of answers, or single answers.
PAIR_OBJECTIVES = ("dpo", "orpo", "simpo", "cpo", "reward")
UNPAIRED_OBJECTIVE = "kto"

# Key that names the origin of a source -> keys that are read with this origin only.
KEYS_OF_ORIGIN = {"dataset": ("subset", "split", "revision", "streaming"), "iterable": ("args",)}


def find_contradictions(config: RunConfig) -> Iterator[Contradiction]:
    """Yield every contradiction between keys of a recipe."""
    if (config.max_steps is None) == (config.max_epochs is None):
        yield ("max_steps", "max_epochs"), "give exactly one of max_steps and max_epochs"
    first = config.profile.start_step
    last = config.max_steps
    if first is not None and last is not None and first > last:
        yield (
            ("profile.start_step", "max_steps"),
            f"profile.start_step {first} is after the last step (max_steps {last}); lower it",
        )
    if config.early_stopping is not None and not config.eval.every:
        yield (
            ("early_stopping", "eval.every"),
            "early_stopping counts evaluations, and with eval.every: 0 there are none between the first and "
            "the last step; set eval.every",
        )
    if config.early_stopping is not None and not (holds_out(config.data) or config.eval.is_best_of_task):
        yield (
            ("early_stopping", "data.eval_fraction"),
            "early_stopping: nothing is held out to evaluate on; set data.eval_fraction=0.1",
        )
    if config.model.cnn is not None and config.model.neftune_alpha is not None:
        yield (
            ("model.neftune_alpha", "model.kind"),
            "model.neftune_alpha: a cnn model has no token embedding to add noise to; remove it",
        )
    yield from find_interval_contradictions(config, None)
    yield from _check_tasks(config)
    if config.model.language_model is not None:
        yield from _check_language_model(config.model.language_model)
    if config.data.documents is not None:
        yield from _check_documents(config.data.documents)
    yield from _check_objective(config)
    yield from _check_optimizer(config.optimizer)
    yield from _check_schedule(config.schedule)


def holds_out(data: DataSection) -> bool:
    """Return whether a data section asks for held-out data; your own data may have some."""
    if data.documents is not None:
        return bool(data.documents.eval_fraction or data.documents.eval_sets)
    if data.images is not None:
        return bool(data.images.eval_fraction or data.images.eval_path)
    return True


def _check_tasks(config: RunConfig) -> Iterator[Contradiction]:
    section = config.eval
    if not section.tasks:
        for name in ("tasks_every", "tasks_limit", "tasks_chat_template"):
            if _is_set(section, name):
                message = (
                    f"eval.{name} is read only with eval.tasks, which is empty; remove {name}, or name tasks"
                )
                yield (f"eval.{name}", "eval.tasks"), message
    elif config.model.language_model is None or config.objective.kind == "reward":
        model = "a reward model" if config.objective.kind == "reward" else f"model.kind: {config.model.kind}"
        yield (
            ("eval.tasks", "model.kind", "objective.kind"),
            f"eval.tasks: {model} gives no probabilities of text, which tasks need; remove eval.tasks",
        )
    elif config.data.custom is not None:
        yield (
            ("eval.tasks", "data.kind"),
            "eval.tasks: data of your own has no tokenizer for the text of tasks; remove eval.tasks",
        )
    if section.is_best_of_task and not section.tasks:
        yield (
            ("eval.best_metric", "eval.tasks"),
            f"eval.best_metric: {section.best_metric} is a metric of a task, and eval.tasks is empty; name "
            "the task there",
        )
    if section.is_best_of_task and section.tasks_every > 1:
        yield (
            ("eval.tasks_every", "eval.best_metric"),
            f"eval.best_metric: {section.best_metric} is missing in most evaluations, since eval.tasks_every "
            f"is {section.tasks_every}; set it to 1",
        )


def _is_set(section: BaseModel, name: str) -> bool:
    """Return whether a key has a value other than its default."""
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _check_language_model(model: CausalLMConfig) -> Iterator[Contradiction]:
    if (model.architecture is None) == (model.pretrained is None):
        yield (
            ("model.architecture", "model.pretrained"),
            "model: give exactly one of architecture (new weights) and pretrained (a folder or hub name)",
        )
    if model.pretrained is not None and model.weights is not None:
        yield (
            ("model.weights", "model.pretrained"),
            "model: give pretrained or weights, not both; a pretrained model brings its weights",
        )
    if model.activation_offload and model.activation_checkpointing == "none":
        yield (
            ("model.activation_offload", "model.activation_checkpointing"),
            "model.activation_offload moves the inputs of recomputed blocks, and no block is recomputed; set "
            "model.activation_checkpointing: full",
        )
    if model.architecture is not None and model.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        yield (
            ("model.architecture",),
            f"model.architecture: {model.architecture!r} is the name of a class; write the model_type of its "
            "config.json (llama for LlamaForCausalLM)",
        )
    heads = model.num_heads
    groups = model.num_key_value_heads
    width = model.hidden_size
    if heads and groups and heads % groups:
        yield (
            ("model.num_heads", "model.num_key_value_heads"),
            f"model.num_heads {heads} is not a multiple of num_key_value_heads {groups}",
        )
    head_width_follows = model.pretrained is None and "head_dim" not in model.extra
    if head_width_follows and width and heads:
        rotates_whole_heads = model.architecture in ROTARY_HEADS and not OTHER_ROTARY & set(model.extra)
        if width % heads:
            yield (
                ("model.hidden_size", "model.num_heads"),
                f"model.hidden_size {width} is not a multiple of num_heads {heads}; change either, or, if "
                "the architecture has its own head width, give it: model.extra: {head_dim: ...}",
            )
        elif rotates_whole_heads and width // heads % 2:
            yield (
                ("model.num_heads", "model.hidden_size"),
                f"model.num_heads {heads} with hidden_size {width} gives a head width of {width // heads}; "
                "rotary positions need an even one: change either",
            )


def _check_documents(data: DocumentsConfig) -> Iterator[Contradiction]:
    sources = {f"data.sources.{number}": source for number, source in enumerate(data.sources or [])}
    sources |= {f"data.eval_sets.{name}": source for name, source in data.eval_sets.items()}
    for section, source in sources.items():
        for origin, keys in KEYS_OF_ORIGIN.items():
            for key in keys:
                if getattr(source, origin) is None and _is_set(source, key):
                    dotted = f"{section}.{key}"
                    yield (
                        (dotted, section),
                        f"{dotted} is read only with {origin}, which is not given; remove {key}, or give "
                        f"{origin}",
                    )
    if data.text is not None and data.sources is not None and _is_set(data.text, "text_field"):
        yield (
            ("data.text_field", "data.sources"),
            "data.text_field is read only with data.paths; write text_field in each of data.sources",
        )


def _check_preferences(data: PreferenceDataConfig, kind: str) -> Iterator[Contradiction]:
    """Yield contradictions between preference data and the kind of objective."""
    if kind in ("auto", "causal_lm", "classification"):
        yield (
            ("objective.kind", "data.kind"),
            f"objective.kind: {kind} would learn rejected answers of preference data like chosen ones; "
            f"choose a loss that compares them: {', '.join(PAIR_OBJECTIVES)} or {UNPAIRED_OBJECTIVE}",
        )
    examples_of = {UNPAIRED_OBJECTIVE: "unpaired", **dict.fromkeys(PAIR_OBJECTIVES, "pairs")}
    needed = examples_of.get(kind, data.examples)
    if data.examples is not None and data.examples != needed:
        yield (
            ("data.examples", "objective.kind"),
            f"data.examples {data.examples}: objective {kind} needs {needed}; remove the key, or change "
            "objective.kind",
        )


def _check_objective(config: RunConfig) -> Iterator[Contradiction]:
    objective = config.objective
    is_language_model = config.model.language_model is not None
    if config.data.preferences is not None:
        yield from _check_preferences(config.data.preferences, objective.kind)
    elif objective.kind in (*PAIR_OBJECTIVES, UNPAIRED_OBJECTIVE) and config.data.custom is None:
        yield (
            ("objective.kind", "data.kind"),
            f"objective.kind: {objective.kind} compares answers, and data of kind {config.data.kind} has "
            "none; use data.kind: preference",
        )
    kind = config.model.default_objective if objective.kind == "auto" else objective.kind
    if kind is None:
        yield (
            ("objective.kind", "model.kind"),
            "objective.kind is auto, but a model of your own has no default objective; write causal_lm, "
            "classification, model_loss (the model returns its loss), or package.module:function",
        )
    if config.wandb.x_axis == "tokens_seen" and kind != "causal_lm":
        yield (
            ("wandb.x_axis", "objective.kind", "model.kind"),
            "wandb.x_axis: tokens_seen: only a run with objective causal_lm counts tokens; set global_step",
        )
    compares_logps = kind in (*PAIR_OBJECTIVES, UNPAIRED_OBJECTIVE) and kind != "reward"
    if compares_logps and config.model.language_model and config.model.language_model.balances_experts:
        yield (
            ("model.extra.output_router_logits", "objective.kind"),
            f"model.extra.output_router_logits: the routers' loss is not part of objective {kind}; set it to "
            "false",
        )
    if objective.kind == "reward" and "sample" in config.model_fields_set and config.sample.max_new_tokens:
        yield (
            ("sample", "objective.kind"),
            "sample: a reward model scores answers and generates no text; remove the section",
        )
    if is_language_model and isinstance(objective, AutoObjectiveConfig):
        for name in ("class_weights", "label_smoothing"):
            if _is_set(objective, name):
                key = f"objective.{name}"
                yield (
                    (key, "objective.kind", "model"),
                    f"{key}: only classification reads it, and a causal_lm model's objective is causal_lm; "
                    "remove it",
                )
    kinds_of_data = None
    if is_language_model and config.data.image_shape is not None:
        kinds_of_data = "text, chat or preference"
    if config.model.cnn is not None and config.data.documents is not None:
        kinds_of_data = "digits or images"
    if kinds_of_data is not None:
        yield (
            ("data.kind", "model.kind"),
            f"data.kind {config.data.kind}: a {config.model.kind} model cannot be trained on it; "
            f"use {kinds_of_data}",
        )


def _check_optimizer(optimizer: OptimizerConfig) -> Iterator[Contradiction]:
    unread = {"adamw": {"momentum"}, "sgd": {"betas", "eps"}, "adafactor": {"betas", "eps", "momentum"}}
    is_own = ":" in optimizer.kind
    if is_own:
        unread[optimizer.kind] = {"betas", "eps", "momentum"}
    elif optimizer.args:
        yield (
            ("optimizer.args", "optimizer.kind"),
            f"optimizer.args: {optimizer.kind} is built in and takes none; remove it, or name your own "
            "optimizer (package.module:function) in optimizer.kind",
        )
    alternative = "write it into optimizer.args" if is_own else "change optimizer.kind"
    kinds = {optimizer.kind, *(group.kind for group in optimizer.groups or [])}
    unread_by_each_kind = [names for kind, names in unread.items() if kind in kinds]
    for name in sorted(set.intersection(*unread_by_each_kind)):
        if _is_set(optimizer, name):
            yield (
                (f"optimizer.{name}", "optimizer.kind"),
                f"optimizer.{name}: {optimizer.kind} does not read it; remove it, or {alternative}",
            )


def _check_schedule(schedule: ScheduleConfig) -> Iterator[Contradiction]:
    unread: dict[str, tuple[str, ...]] = {"wsd": (), "constant": ("decay_steps", "min_learning_rate_ratio")}
    reason = f"a {schedule.kind} schedule does not read it; remove it, or change schedule.kind"
    if ":" in schedule.kind:
        unread[schedule.kind] = tuple(name for name in ScheduleConfig.model_fields if name != "kind")
        reason = f"{schedule.kind} decides the whole curve; remove the key, or compute it in that function"
    for name in unread.get(schedule.kind, ("decay_steps",)):
        if _is_set(schedule, name):
            yield (f"schedule.{name}", "schedule.kind"), f"schedule.{name}: {reason}"
