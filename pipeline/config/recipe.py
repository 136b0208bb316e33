"""Turns a recipe into a validated RunConfig, explains each mistake, and finds the code that a recipe runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from pipeline.config.command_lines import format_shell_line
from pipeline.config.contradictions import find_contradictions
from pipeline.config.data_schema import ImagesDataConfig
from pipeline.config.import_paths import suggest_import_path
from pipeline.config.loading import ConfigFile, did_you_mean
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError

# Keys that users look for in the recipe, but that the DeepSpeed JSON decides.
DEEPSPEED_OWNS = {
    "zero_optimization", "zero_stage", "stage", "fp16", "bf16", "precision", "dtype", "offload",
    "offload_optimizer", "offload_param", "loss_scale", "tensor_parallel", "pipeline",
}  # fmt: skip

# Key of the recipe, or advice with several keys -> its names in other trainers, separated by spaces.
_OTHER_NAMES = {
    "batch.global_batch_size": "train_batch_size total_batch_size",
    "batch.gradient_accumulation_steps": "grad_accum grad_accumulation_steps",
    "batch.global_batch_size (all ranks) or batch.micro_batch_size (one rank at a time)": "batch_size",
    "batch.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu",
    "checkpoint.every": "save_steps save_interval save_every",
    "checkpoint.keep_best": "load_best_model_at_end",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "data.chat_template": "template",
    "data.eval_fraction": "val_set_size val_size test_size validation_split",
    "data.packing": "sample_packing",
    "data.paths": "train_file train_files data_path data_dir",
    "data.prepare_workers": "preprocessing_num_workers dataset_num_proc dataset_processes",
    "data.sequence_length": "sequence_len cutoff_len max_seq_length max_seq_len seq_length seq_len "
    "block_size model_max_length",
    "data.sources": "dataset datasets dataset_name train_dataset",
    "data.tokenizer.pretrained": "tokenizer_name tokenizer_name_or_path tokenizer_config",
    "distributed.timeout_seconds": "ddp_timeout",
    "early_stopping.min_delta": "early_stopping_threshold early_stopping_min_delta",
    "early_stopping.patience": "early_stopping_patience",
    "engine.compile": "torch_compile",
    "eval.every": "eval_steps eval_interval evals_per_epoch",
    "loader.num_workers": "dataloader_num_workers",
    "log.console": "log_level logging_level",
    "log.every": "logging_steps log_interval",
    "log.tensorboard": "use_tensorboard",
    "max_epochs": "num_train_epochs num_epochs epochs",
    "max_steps": "max_iters train_steps num_steps total_steps",
    "model.activation_checkpointing": "gradient_checkpointing activation_budget_gib",
    "model.architecture": "model_type",
    "model.attention": "flash_attention flash_attn flash_attn_2 attn_implementation",
    "model.freeze": "freeze_layers freeze_parameters frozen_parameters",
    "model.pretrained or model.architecture": "model.name",
    "model.pretrained": "model_name_or_path model_name base_model model_path pretrained_model_name_or_path",
    "name": "run_name experiment_name",
    "objective.label_smoothing": "label_smoothing_factor",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer.learning_rate": "lr",
    "optimizer.max_grad_norm": "grad_clip gradient_clipping gradient_clip_val clip_grad",
    "run_dir": "output_dir out_dir save_dir",
    "schedule.kind": "lr_scheduler_type lr_scheduler scheduler",
    "schedule.min_learning_rate_ratio": "min_lr min_lr_ratio cosine_min_lr_ratio",
    "schedule.warmup": "warmup_steps warmup_ratio num_warmup_steps warmup_iters",
    "wandb.entity": "wandb_entity",
    "wandb.mode": "report_to use_wandb wandb_mode",
    "wandb.project": "wandb_project",
}
_MAIN_KEY = {
    "batch": "global_batch_size",
    "checkpoint": "every",
    "data": "paths",
    "eval": "every",
    "model": "pretrained",
    "objective": "kind",
    "optimizer": "kind",
    "schedule": "kind",
}
"""Section -> key that is most likely meant if the section is a single value."""
_HUB_IMAGE_KEYS = {"dataset", "subset", "split", "eval_split", "image_field", "label_field"}
"""Keys of an image dataset on the hub, which data of kind images does not read."""
ALIASES = {word: key for key, words in _OTHER_NAMES.items() for word in words.split()}
"""Name in another trainer -> dotted key of the recipe, or advice with several keys."""

NO_IMPORT_PATHS = "--no-import-paths"
FILL_IN = "FILL-IN"
"""Placeholder that the command `import` writes for a value that the user has to write."""
IMPORT_PATH_FIELDS = ("kind", "iterable", "collate_fn", "curriculum")
"""Fields that may hold `package.module:function`."""
COMMAND_FIELD = "command"
"""Field that holds a command to run."""

Section = type[BaseModel]


def validate_recipe(file: ConfigFile) -> RunConfig:
    """Return the validated recipe.

    Raises:
        ConfigError: The recipe is wrong. The message has one line for each problem, with file, line, key,
            value and what is expected; of contradictions between keys, only the first.
    """
    if file.path.suffix == ".json" and not {"model", "data"} & file.tree.keys():
        option = format_shell_line("--deepspeed", str(file.path))
        raise ConfigError(
            f"{file.path}: --config takes a recipe, and this is a DeepSpeed JSON; give it as {option}"
        )
    try:
        config = RunConfig.model_validate(file.tree)
    except ValidationError as error:
        problems = [_explain(problem, file) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None
    for keys, message in find_contradictions(config):
        locations = [file.location_of(key) for key in keys]
        location = "command line" if "command line" in locations else locations[0]
        raise ConfigError(f"{location}: {message}")
    return config


def refuse_placeholders(file: ConfigFile) -> None:
    """Check that the user has replaced each FILL_IN in a recipe.

    Raises:
        ConfigError: Placeholders are left. The message has one line for each key.
    """
    keys = dict.fromkeys(_find_placeholders(file.tree))
    if keys:
        advice = f"fill in the value, which is still {FILL_IN}; a comment at the top of the recipe says how"
        raise ConfigError("\n".join(f"{file.location_of(key)}: {key}: {advice}" for key in keys))


def _find_placeholders(value: Any, dotted: str = "") -> Iterator[str]:
    """Yield the dotted key of each text that begins with FILL_IN; for a text in a list, the list's key."""
    if isinstance(value, str) and value.startswith(FILL_IN):
        yield dotted
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _find_placeholders(below, f"{dotted}.{key}".lstrip("."))
    elif isinstance(value, list):
        for element in value:
            yield from _find_placeholders(element, dotted)


def _explain(problem: Any, file: ConfigFile) -> str:
    """Return the error message for one problem that pydantic found."""
    parts, section = _locate(problem["loc"])
    error_type = problem["type"]
    value = problem["input"]
    if error_type in ("union_tag_invalid", "union_tag_not_found") and isinstance(value, dict):
        parts.append("kind")
    dotted = ".".join(parts)
    location = file.location_of(dotted)
    command_line_keys = [key for key, where in file.locations.items() if where == "command line"]
    if error_type == "value_error" and any(key.startswith(f"{dotted}.") for key in command_line_keys):
        # Keys of this section exclude each other, and the command line gave one of them.
        location = "command line"
    # Characters such as a no-break space would be invisible in the message.
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in dotted)
    start = f"{location}: {visible}: "
    if error_type == "extra_forbidden":
        return start + _explain_unknown(parts[-1], dotted, section)
    if error_type == "union_tag_invalid":
        tag = problem["ctx"]["tag"]
        expected = problem["ctx"]["expected_tags"].replace("'custom'", "")
        hint = did_you_mean(tag, re.findall(r"'(\w+)'", expected))
        return f"{start}{tag!r} is no known kind{hint}; your own: package.module:function"
    if error_type == "missing":
        return start + "missing"
    if error_type == "union_tag_not_found" and isinstance(value, dict):
        in_section = dotted.removesuffix("kind")
        sections = _iterate_sections("", "", RunConfig)
        kinds = [kind for prefix, kind, _ in sections if prefix == in_section and kind != "custom"]
        return f"{start}missing (valid: {', '.join(kinds)}); your own: package.module:function"
    if error_type in ("model_type", "model_attributes_type", "union_tag_not_found"):
        has_hint = dotted in _MAIN_KEY and value
        hint = f"; did you mean {dotted}.{_MAIN_KEY[dotted]}?" if has_hint else ""
        return f"{start}expected a section of keys and values, given {value!r}{hint}"
    if error_type == "value_error":  # raised by a validator of the schema, whose message is complete
        return start + str(problem["ctx"]["error"])
    if error_type == "string_pattern_mismatch" and (advice := suggest_import_path(value)) is not None:
        return f"{start}{value}: {advice}"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{start}{message}, given {value!r}"


def _explain_unknown(key: str, dotted: str, section: Section | None) -> str:
    """Return the error text for a key that its section does not have."""
    if not key.isprintable():
        return "unknown key; it has invisible characters, escaped here: type the line anew, with plain spaces"
    if key in ("deepspeed", "deepspeed_config"):
        return "unknown key; the DeepSpeed JSON is an option of the command: --deepspeed FILE"
    if key in DEEPSPEED_OWNS:
        return "the DeepSpeed JSON decides this (--deepspeed FILE, or ds.KEY=VALUE)"
    if section is ImagesDataConfig and key in _HUB_IMAGE_KEYS:
        return "unknown key; images are read from one folder for each class: set data.path and data.eval_path"
    recipe_key = ALIASES.get(dotted) or ALIASES.get(key, dotted)
    if recipe_key != dotted:  # if equal, it is a key of another kind of this section
        return f"unknown key; use {recipe_key}"
    hint = did_you_mean(key, section.model_fields if section else {})
    if "did you mean" in hint:
        return f"unknown key{hint}"
    elsewhere: dict[str, list[str]] = {}
    for prefix, kind, other in _iterate_sections("", "", RunConfig):
        if key in other.model_fields:
            elsewhere.setdefault(f"{prefix}{key}", []).append(kind)
    if dotted in elsewhere:
        return f"unknown key; it goes with kind {' or '.join(elsewhere[dotted])}"
    return f"unknown key; use {' or '.join(elsewhere)}" if elsewhere else f"unknown key{hint}"


def _iterate_sections(prefix: str, kind: str, annotation: Any) -> Iterator[tuple[str, str, Section]]:
    """Yield dotted prefix, kind and class of each section within an annotation, also of nested sections.

    Args:
        prefix: Dotted key of the annotated field with a dot at its end; empty for the whole recipe.
        kind: Kind of the sections; empty if the field has sections of one kind only.
        annotation: Type annotation of the field.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield prefix, kind, annotation
        for name, field in annotation.model_fields.items():
            yield from _iterate_sections(f"{prefix}{name}.", "", field.annotation)
        return
    origin = get_origin(annotation)
    if origin is dict:  # its keys are names that the user chooses
        return
    member_prefix = f"{prefix}0." if origin is list else prefix
    for member in get_args(annotation):
        tagged = get_args(member)
        if len(tagged) == 2 and isinstance(tagged[1], Tag):
            if tagged[1].tag != "auto":
                yield from _iterate_sections(prefix, tagged[1].tag, tagged[0])
        else:
            yield from _iterate_sections(member_prefix, kind, member)


def _locate(loc: tuple[Any, ...]) -> tuple[list[str], Section | None]:
    """Return the parts of a pydantic location's key, without union tags, and the class of its section.

    The section is that of the last part; `None` if the last part is not a key of a section.
    """
    parts: list[str] = []
    section: Section | None = None
    annotation: Any = RunConfig
    for item in loc:
        sections = (each for each in (annotation, *get_args(annotation)) if hasattr(each, "model_fields"))
        section = next(sections, None)  # also of an optional section
        pairs = [get_args(member) for member in get_args(annotation)]
        kinds = {pair[1].tag: pair[0] for pair in pairs if len(pair) == 2 and isinstance(pair[1], Tag)}
        if item in kinds:
            annotation = kinds[item]
        else:
            parts.append(str(item))
            annotation = _find_annotation(annotation, str(item))
    return parts, section


def _find_annotation(annotation: Any, key: str) -> Any:
    """Return the annotation of a section's key, or of the values of a list or mapping; `None` if unknown.

    Args:
        annotation: Annotation of the section, list or mapping.
        key: Key of the section.
    """
    fields = getattr(annotation, "model_fields", {})
    if key in fields:
        return fields[key].annotation
    for each in (annotation, *get_args(annotation)):
        if get_origin(each) in (list, dict):
            return get_args(each)[-1]
    return None


def find_code_references(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of each field of a recipe that would run code.

    Args:
        section: Recipe, section, list or mapping.
        prefix: Its dotted key with a dot at its end; empty for the recipe.
    """
    entries: dict[Any, Any] = {}
    if isinstance(section, BaseModel | dict):
        entries = dict(section)
    elif isinstance(section, list):
        entries = dict(enumerate(section))
    for name, value in entries.items():
        is_import = name in IMPORT_PATH_FIELDS and isinstance(value, str) and ":" in value
        runs_other_code = name in ("trust_remote_code", COMMAND_FIELD) and value
        if isinstance(section, BaseModel) and (is_import or runs_other_code):
            yield f"{prefix}{name}", str(value)
        yield from find_code_references(value, f"{prefix}{name}.")


def refuse_code(config: RunConfig, file: ConfigFile) -> None:
    """Check that a recipe would run no code.

    Raises:
        ConfigError: A key names code to run.
    """
    for dotted, value in find_code_references(config):
        raise ConfigError(
            f"{file.location_of(dotted)}: {dotted}: {value!r} would run code, and {NO_IMPORT_PATHS} "
            "was given; if you trust that code, leave the option out"
        )
