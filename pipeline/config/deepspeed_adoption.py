"""Completes the recipe with what a DeepSpeed JSON from elsewhere states."""

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
"""The recipe's key -> names beside it that say something else once the JSON states it."""


class _Stated(NamedTuple):
    json_key: str
    recipe_key: str
    value: Any
    """Value in the recipe's terms."""
    quoted: str
    """Value as the JSON states it, for messages."""


def drop_replaced_keys(recipe: ConfigFile, file: ConfigFile) -> None:
    """Drop the keys of the default recipe that a checked JSON replaces; of the batch, all."""
    for stated in _stated(file):
        section, _, key = stated.recipe_key.rpartition(".")
        if section == "batch":
            recipe.tree.pop(section, None)
            continue
        for name in _REPLACED.get(stated.recipe_key, (key,)):
            (recipe.tree.get(section, {}) if section else recipe.tree).pop(name, None)


def adopt_stated_numbers(recipe: ConfigFile, file: ConfigFile) -> None:
    """Complete the recipe with numbers that a checked JSON states and the recipe does not.

    Raises:
        ConfigError: Both state a number and the two differ. The message quotes both.
    """
    has_batch = "batch" in recipe.tree
    adopted: dict[str, str] = {}
    for stated in _stated(file):
        mine = stated.recipe_key
        said = f"{file.describe_key(stated.json_key)} is {stated.quoted}"
        for key in ("max_steps", "max_epochs") if mine == "max_steps" else (mine,):
            own = get_dotted(recipe.tree, key)
            if own is None or (own == stated.value and key == mine):
                continue
            if mine in adopted:
                raise ConfigError(f'{said}, {adopted[mine]} is {own}; write "auto" here')
            other = f"{recipe.location_of(key)}: {key} is {own}"
            raise ConfigError(f'{said}, {other}; write "auto" here, or drop {key} there')
        if get_dotted(recipe.tree, mine) is None:
            adopted[mine] = file.describe_key(stated.json_key)
            set_dotted(recipe.tree, mine.split("."), stated.value, adopted[mine])
    is_cosine = get_dotted(file.tree, "scheduler.type") == "WarmupCosineLR"
    is_open = get_dotted(file.tree, "scheduler.params.cos_min_ratio") is None
    if is_cosine and is_open and get_dotted(recipe.tree, _RATIO) is None:
        adopted[_RATIO] = file.describe_key("scheduler.type")
        set_dotted(recipe.tree, _RATIO.split("."), 0.0001, adopted[_RATIO])  # DeepSpeed's default
    recipe.locations |= adopted
    if not has_batch and list(recipe.tree.get("batch", ())) == ["gradient_accumulation_steps"]:
        default = RunConfig.model_fields["batch"].default
        recipe.tree["batch"]["micro_batch_size"] = default.micro_batch_size
    _note_other_warm_up(recipe, file)


def adopt_torch_section(recipe: ConfigFile, file: ConfigFile) -> None:
    """Give the recipe the `engine` section that a file with a `torch` section stands for.

    Raises:
        ConfigError: The recipe has an engine section too, or the file also speaks to DeepSpeed.
    """
    tree = file.tree
    if foreign := sorted(set(tree) - keys.ALLOWED_BESIDE_TORCH):
        raise ConfigError(
            f"{file.describe_key('torch')}: plain PyTorch does not read "
            f"{', '.join(foreign)}; drop torch, or drop these"
        )
    if "engine" in recipe.tree:
        raise ConfigError(
            f"{file.describe_key('torch')}: the recipe has an engine section too; drop one of the two"
        )
    if get_dotted(tree, "fp16.enabled") is True:
        raise ConfigError(
            f"{file.describe_key('fp16.enabled')}: plain PyTorch computes in fp32 or bf16; use "
            "ds_configs/zero2_fp16.json"
        )
    bf16 = get_dotted(tree, "bf16.enabled")
    recipe.tree["engine"] = {
        **tree["torch"],
        "precision": "auto" if bf16 == "auto" else "bf16" if bf16 else "fp32",
        "tf32": get_dotted(tree, "tf32.enabled") in (True, "auto"),
        "compile": "auto" if (asked := get_dotted(tree, "compile.enabled")) is None else asked,
    }
    theirs = {"precision": "bf16.enabled", "tf32": "tf32.enabled", "compile": "compile.enabled"}
    theirs |= {key: f"torch.{key}" for key in tree["torch"]}
    recipe.locations |= {f"engine.{key}": file.describe_key(dotted) for key, dotted in theirs.items()}


def _stated(file: ConfigFile) -> Iterator[_Stated]:
    """Yield what the JSON states, with the recipe's key. "auto" leaves it to the recipe."""
    tree = file.tree
    peak = get_dotted(tree, "scheduler.params.warmup_max_lr")
    for json_key, mine in keys.ADOPTED.items():
        given = get_dotted(tree, json_key)
        if given in (None, "auto"):
            continue
        if json_key == "optimizer.params.lr" and peak not in (None, "auto", given):
            continue  # DeepSpeed steps at the other number
        value = given
        if json_key == "optimizer.type":
            value = keys.OPTIMIZERS[given.lower()]
        elif json_key == "scheduler.type":
            value = keys.SCHEDULES[given]
        is_same = str(given).lower() == str(value)
        yield _Stated(json_key, mine, value, str(given) if is_same else f"{given} (here: {value})")
    if get_dotted(tree, "scheduler.type") == "WarmupDecayLR":
        low = get_dotted(tree, "scheduler.params.warmup_min_lr")
        are_numbers = isinstance(low, int | float) and isinstance(peak, int | float) and peak > 0
        floor = low / peak if are_numbers else 0.0
        yield _Stated("scheduler.type", _RATIO, floor, f"WarmupDecayLR (here: {_RATIO} {floor})")


def _note_other_warm_up(recipe: ConfigFile, file: ConfigFile) -> None:
    """Note where the rate differs from what the file seems to say, or from DeepSpeed's warm-up."""
    params = get_dotted(file.tree, "scheduler.params") or {}
    rate, peak = get_dotted(file.tree, "optimizer.params.lr"), params.get("warmup_max_lr")
    if not {rate, peak} & {None, "auto"} and rate != peak:
        place = file.describe_key("optimizer.params.lr")
        file.notes.append(f"{place}: DeepSpeed steps at warmup_max_lr, {peak}, not at {rate}")
    if get_dotted(file.tree, "scheduler.type") in (None, "auto"):
        return
    starts = [params.get(name) for name in ("warmup_min_lr", "warmup_min_ratio")]
    is_other = params.get("warmup_type") != "linear" or any(each not in (None, "auto", 0) for each in starts)
    if is_other and get_dotted(recipe.tree, "schedule.warmup"):
        file.notes.append(
            f"{file.describe_key('scheduler.type')}: DeepSpeed's warm-up begins at warmup_min_lr, and "
            "follows a logarithm unless warmup_type is linear; here it is linear from 0"
        )
