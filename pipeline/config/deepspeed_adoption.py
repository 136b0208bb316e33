"""Completes the recipe with numbers that a DeepSpeed JSON states.

The recipe owns batch size, optimizer and schedule; in a JSON of this project they are absent or "auto". A
JSON of another trainer may state them if the recipe does not. Two different values of one number are an
error that quotes both, never a matter of precedence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.config import deepspeed_keys as keys
from pipeline.config.loading import ConfigFile, get_dotted, set_dotted
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError

_RATIO = "schedule.min_learning_rate_ratio"
_REPLACED = {
    "max_steps": ("max_steps", "max_epochs"),
    "schedule.kind": ("kind", "decay_steps", "min_learning_rate_ratio"),
}
"""Key of the recipe -> names of keys in its section that a JSON which states it replaces."""


class _StatedNumber(NamedTuple):
    """A number that the JSON states."""

    json_key: str
    recipe_key: str
    value: Any
    """Value in the recipe's terms."""
    quoted: str
    """Value as the JSON states it, for messages."""


def remove_replaced_keys(recipe: ConfigFile, file: ConfigFile) -> None:
    """Drop the keys of the default recipe that a checked JSON replaces; of the batch, the whole section."""
    for stated in _read_stated(file):
        section, _, key = stated.recipe_key.rpartition(".")
        if section == "batch":
            recipe.tree.pop(section, None)
            continue
        for name in _REPLACED.get(stated.recipe_key, (key,)):
            (recipe.tree.get(section, {}) if section else recipe.tree).pop(name, None)


def adopt_stated_numbers(recipe: ConfigFile, file: ConfigFile) -> None:
    """Complete the recipe with numbers that a checked JSON states and the recipe does not.

    Raises:
        ConfigError: Both state a number and the values differ. The message quotes both.
    """
    has_batch = "batch" in recipe.tree
    adopted: dict[str, str] = {}
    for stated in _read_stated(file):
        recipe_key = stated.recipe_key
        in_json = f"{file.describe_key(stated.json_key)} is {stated.quoted}"
        for key in ("max_steps", "max_epochs") if recipe_key == "max_steps" else (recipe_key,):
            own = get_dotted(recipe.tree, key)
            if own is None or (own == stated.value and key == recipe_key):
                continue
            if recipe_key in adopted:
                raise ConfigError(f'{in_json}, {adopted[recipe_key]} is {own}; write "auto" here')
            in_recipe = f"{recipe.location_of(key)}: {key} is {own}"
            raise ConfigError(f'{in_json}, {in_recipe}; write "auto" here, or remove {key} there')
        if get_dotted(recipe.tree, recipe_key) is None:
            adopted[recipe_key] = file.describe_key(stated.json_key)
            set_dotted(recipe.tree, recipe_key.split("."), stated.value, adopted[recipe_key])
    is_cosine = get_dotted(file.tree, "scheduler.type") == "WarmupCosineLR"
    has_no_floor = get_dotted(file.tree, "scheduler.params.cos_min_ratio") is None
    if is_cosine and has_no_floor and get_dotted(recipe.tree, _RATIO) is None:
        adopted[_RATIO] = file.describe_key("scheduler.type")
        set_dotted(recipe.tree, _RATIO.split("."), 0.0001, adopted[_RATIO])  # DeepSpeed's default
    recipe.locations |= adopted
    if not has_batch and list(recipe.tree.get("batch", ())) == ["gradient_accumulation_steps"]:
        default = RunConfig.model_fields["batch"].default
        recipe.tree["batch"]["micro_batch_size"] = default.micro_batch_size
    _note_schedule_differences(recipe, file)


def adopt_torch_section(recipe: ConfigFile, file: ConfigFile) -> None:
    """Give the recipe the `engine` section that a file with a `torch` section means.

    Raises:
        ConfigError: The recipe has an engine section too, or the file also has keys of DeepSpeed.
    """
    tree = file.tree
    if foreign := sorted(set(tree) - keys.ALLOWED_BESIDE_TORCH):
        raise ConfigError(
            f"{file.describe_key('torch')}: plain PyTorch does not read "
            f"{', '.join(foreign)}; remove torch, or remove these"
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
    compiles = get_dotted(tree, "compile.enabled")
    recipe.tree["engine"] = {
        **tree["torch"],
        "precision": precision,
        "tf32": get_dotted(tree, "tf32.enabled") in (True, "auto"),
        "compile": "auto" if compiles is None else compiles,
    }
    json_keys = {"precision": "bf16.enabled", "tf32": "tf32.enabled", "compile": "compile.enabled"}
    json_keys |= {key: f"torch.{key}" for key in tree["torch"]}
    recipe.locations |= {f"engine.{key}": file.describe_key(dotted) for key, dotted in json_keys.items()}


def _read_stated(file: ConfigFile) -> Iterator[_StatedNumber]:
    """Yield each number that the JSON states and the recipe owns. "auto" states nothing."""
    tree = file.tree
    peak = get_dotted(tree, "scheduler.params.warmup_max_lr")
    for json_key, recipe_key in keys.ADOPTED.items():
        given = get_dotted(tree, json_key)
        if given in (None, "auto"):
            continue
        if json_key == "optimizer.params.lr" and peak not in (None, "auto", given):
            continue  # DeepSpeed's schedule replaces this rate by warmup_max_lr
        value = given
        if json_key == "optimizer.type":
            value = keys.OPTIMIZERS[given.lower()]
        elif json_key == "scheduler.type":
            value = keys.SCHEDULES[given]
        is_same = str(given).lower() == str(value)
        yield _StatedNumber(
            json_key, recipe_key, value, str(given) if is_same else f"{given} (here: {value})"
        )
    if get_dotted(tree, "scheduler.type") == "WarmupDecayLR":
        low = get_dotted(tree, "scheduler.params.warmup_min_lr")
        are_numbers = isinstance(low, int | float) and isinstance(peak, int | float) and peak > 0
        floor = low / peak if are_numbers else 0.0
        yield _StatedNumber("scheduler.type", _RATIO, floor, f"WarmupDecayLR (here: {_RATIO} {floor})")


def _note_schedule_differences(recipe: ConfigFile, file: ConfigFile) -> None:
    """Note differences of the learning rate: from the file's `lr`, or from DeepSpeed's warm-up."""
    params = get_dotted(file.tree, "scheduler.params") or {}
    rate = get_dotted(file.tree, "optimizer.params.lr")
    peak = params.get("warmup_max_lr")
    if not {rate, peak} & {None, "auto"} and rate != peak:
        key = file.describe_key("optimizer.params.lr")
        file.notes.append(
            f"{key}: the peak learning rate is warmup_max_lr, {peak}, not {rate}, as in DeepSpeed"
        )
    if get_dotted(file.tree, "scheduler.type") in (None, "auto"):
        return
    starts = [params.get(name) for name in ("warmup_min_lr", "warmup_min_ratio")]
    is_other = params.get("warmup_type") != "linear" or any(each not in (None, "auto", 0) for each in starts)
    if is_other and get_dotted(recipe.tree, "schedule.warmup"):
        file.notes.append(
            f"{file.describe_key('scheduler.type')}: DeepSpeed's warm-up begins at warmup_min_lr and is "
            "logarithmic unless warmup_type is linear; here it is linear from 0"
        )
