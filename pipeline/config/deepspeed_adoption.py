"""Completes the recipe with numbers that a DeepSpeed JSON states.

The recipe owns batch size, optimizer and schedule; in a JSON of this project they are absent or "auto". A
JSON of another trainer may state them if the recipe does not. If both state a number and the values differ,
that is an error that quotes both; neither file takes precedence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.config import deepspeed_keys as keys
from pipeline.config.deepspeed_check import MASTER_WEIGHT_KEYS, OPTIMIZER_STATES_KEY
from pipeline.config.loading import ConfigFile, get_dotted, set_dotted
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError

_RATIO = "schedule.min_learning_rate_ratio"
_COSINE_FLOOR = 0.0001
"""DeepSpeed's default of cos_min_ratio: last learning rate of WarmupCosineLR, as a share of the peak."""
_REPLACED = {
    "max_steps": ("max_steps", "max_epochs"),
    "schedule.kind": ("kind", "decay_steps", "min_learning_rate_ratio"),
}
"""Key of the recipe -> names of keys in its section. A JSON that states the key replaces all of them."""


class _StatedNumber(NamedTuple):
    """A number, or a kind of optimizer or schedule, that the JSON states."""

    json_key: str
    """Dotted key of the JSON."""
    recipe_key: str
    """Dotted key of the recipe for the same number."""
    value: Any
    """Value in the recipe's terms."""
    quoted: str
    """Value as the JSON states it, for messages."""


def remove_replaced_keys(recipe: ConfigFile, file: ConfigFile) -> None:
    """Remove the keys of the default recipe that a checked JSON replaces.

    If it replaces one key of the batch, the whole `batch` section is removed.
    """
    for stated in _read_stated(file):
        section, _, key = stated.recipe_key.rpartition(".")
        if section == "batch":
            recipe.tree.pop(section, None)
            continue
        values = recipe.tree.get(section, {}) if section else recipe.tree
        for name in _REPLACED.get(stated.recipe_key, (key,)):
            values.pop(name, None)


def adopt_stated_numbers(recipe: ConfigFile, file: ConfigFile) -> None:
    """Complete the recipe with numbers that a checked JSON states and the recipe does not.

    Raises:
        ConfigError: Both state a number and the values differ. The message quotes both.
    """
    has_batch = "batch" in recipe.tree
    adopted: dict[str, str] = {}
    for stated in _read_stated(file):
        recipe_key = stated.recipe_key
        start = f"{file.describe_key(stated.json_key)} is {stated.quoted}"
        compared_keys = ("max_steps", "max_epochs") if recipe_key == "max_steps" else (recipe_key,)
        for key in compared_keys:
            recipe_value = get_dotted(recipe.tree, key)
            is_equal = recipe_value == stated.value and key == recipe_key
            if recipe_value is None or is_equal:
                continue
            if recipe_key in adopted:  # another key of the JSON stated it
                raise ConfigError(f'{start}, {adopted[recipe_key]} is {recipe_value}; write "auto" here')
            in_recipe = f"{recipe.location_of(key)}: {key} is {recipe_value}"
            raise ConfigError(f'{start}, {in_recipe}; write "auto" here, or remove {key} there')
        if get_dotted(recipe.tree, recipe_key) is None:
            adopted[recipe_key] = file.describe_key(stated.json_key)
            set_dotted(recipe.tree, recipe_key.split("."), stated.value, adopted[recipe_key])
    is_cosine = get_dotted(file.tree, "scheduler.type") == "WarmupCosineLR"
    has_no_floor = get_dotted(file.tree, "scheduler.params.cos_min_ratio") is None
    if is_cosine and has_no_floor and get_dotted(recipe.tree, _RATIO) is None:
        adopted[_RATIO] = file.describe_key("scheduler.type")
        set_dotted(recipe.tree, _RATIO.split("."), _COSINE_FLOOR, adopted[_RATIO])
    recipe.locations |= adopted
    # A batch section with nothing but the JSON's accumulation steps lacks the default micro-batch size.
    if not has_batch and list(recipe.tree.get("batch", ())) == ["gradient_accumulation_steps"]:
        default = RunConfig.model_fields["batch"].default
        recipe.tree["batch"]["micro_batch_size"] = default.micro_batch_size
    _note_schedule_differences(recipe, file)


def adopt_torch_section(recipe: ConfigFile, file: ConfigFile) -> None:
    """Write the recipe's `engine` section from a file with a `torch` section, which asks for plain PyTorch.

    Raises:
        ConfigError: The recipe has an engine section too, or the file also has keys of DeepSpeed.
    """
    tree = file.tree
    half_keys = (*MASTER_WEIGHT_KEYS, OPTIMIZER_STATES_KEY)
    foreign = sorted(set(tree) - keys.ALLOWED_BESIDE_TORCH)
    foreign += [key for key in half_keys if get_dotted(tree, key)]
    if foreign:
        raise ConfigError(
            f"{file.describe_key('torch')}: plain PyTorch does not read "
            f"{', '.join(foreign)}; remove the torch section, or remove these"
        )
    if "engine" in recipe.tree:
        raise ConfigError(
            f"{file.describe_key('torch')}: the recipe has an engine section too; remove one of the two"
        )
    if get_dotted(tree, "fp16.enabled") is True:
        raise ConfigError(
            f"{file.describe_key('fp16.enabled')}: plain PyTorch computes in fp32 or bf16; use "
            "ds_configs/zero2_fp16.json"
        )
    precision = "fp32"
    bf16 = get_dotted(tree, "bf16.enabled")
    if bf16:
        precision = "auto" if bf16 == "auto" else "bf16"
    compile_enabled = get_dotted(tree, "compile.enabled")
    recipe.tree["engine"] = {
        **tree["torch"],
        "precision": precision,
        "tf32": get_dotted(tree, "tf32.enabled") in (True, "auto"),
        "compile": "auto" if compile_enabled is None else compile_enabled,
    }
    json_keys = {"precision": "bf16.enabled", "tf32": "tf32.enabled", "compile": "compile.enabled"}
    json_keys |= {key: f"torch.{key}" for key in tree["torch"]}
    recipe.locations |= {f"engine.{key}": file.describe_key(dotted) for key, dotted in json_keys.items()}


def _read_stated(file: ConfigFile) -> Iterator[_StatedNumber]:
    """Yield each number that the JSON states and the recipe owns. "auto" states nothing."""
    tree = file.tree
    peak = get_dotted(tree, "scheduler.params.warmup_max_lr")
    for json_key, recipe_key in keys.ADOPTED.items():
        json_value = get_dotted(tree, json_key)
        if not _is_stated(json_value):
            continue
        if json_key == "optimizer.params.lr" and _is_stated(peak) and peak != json_value:
            continue  # DeepSpeed's schedule replaces this rate by warmup_max_lr
        value = json_value
        if json_key == "optimizer.type":
            value = keys.OPTIMIZERS[json_value.lower()]
        elif json_key == "scheduler.type":
            value = keys.SCHEDULES[json_value]
        has_same_name = str(json_value).lower() == str(value)
        quoted = str(json_value) if has_same_name else f"{json_value} (here: {value})"
        yield _StatedNumber(json_key, recipe_key, value, quoted)
    if get_dotted(tree, "scheduler.type") == "WarmupDecayLR":
        lowest = get_dotted(tree, "scheduler.params.warmup_min_lr")
        are_numbers = isinstance(lowest, int | float) and isinstance(peak, int | float)
        floor = lowest / peak if are_numbers and peak > 0 else 0.0
        yield _StatedNumber("scheduler.type", _RATIO, floor, f"WarmupDecayLR (here: {_RATIO} {floor})")


def _is_stated(value: Any) -> bool:
    """Return whether a value of the JSON is neither absent nor "auto"."""
    return value is not None and value != "auto"


def _note_schedule_differences(recipe: ConfigFile, file: ConfigFile) -> None:
    """Add notes to the file if the run's peak rate is not the file's `lr`, or its warm-up not DeepSpeed's."""
    params = get_dotted(file.tree, "scheduler.params") or {}
    rate = get_dotted(file.tree, "optimizer.params.lr")
    peak = params.get("warmup_max_lr")
    if _is_stated(rate) and _is_stated(peak) and rate != peak:
        key = file.describe_key("optimizer.params.lr")
        file.notes.append(
            f"{key}: the peak learning rate is warmup_max_lr, {peak}, not {rate}, as in DeepSpeed"
        )
    if not _is_stated(get_dotted(file.tree, "scheduler.type")):
        return
    starts = [params.get(name) for name in ("warmup_min_lr", "warmup_min_ratio")]
    starts_above_0 = any(_is_stated(start) and start != 0 for start in starts)
    differs = starts_above_0 or params.get("warmup_type") != "linear"
    if differs and get_dotted(recipe.tree, "schedule.warmup"):
        file.notes.append(
            f"{file.describe_key('scheduler.type')}: DeepSpeed's warm-up begins at warmup_min_lr and is "
            "logarithmic unless warmup_type is linear; here it is linear from 0"
        )
