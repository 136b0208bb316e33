"""Completes the recipe with what a DeepSpeed JSON from elsewhere states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from pipeline.config import deepspeed_keys as keys
from pipeline.config.loading import ConfigFile, did_you_mean, get_dotted, is_comment, set_dotted
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError

_SECTIONS = ("optimizer", "optimizer.params", "scheduler", "scheduler.params")
_RATIO = "schedule.min_learning_rate_ratio"


class _Stated(NamedTuple):
    json_key: str
    recipe_key: str
    value: Any
    """Value in the recipe's terms."""
    quoted: str
    """Value as the JSON states it, for messages."""


def adopt_stated_numbers(recipe: ConfigFile, file: ConfigFile, *, is_default: bool = False) -> None:
    """Complete the recipe with numbers that a JSON from elsewhere states and the recipe does not.

    Args:
        is_default: Whether nobody chose the recipe. The JSON's numbers then replace those of its file, and
            only the command line's are compared with them.

    Raises:
        ConfigError: both state a number and the two differ (both are quoted); the JSON's optimizer or
            scheduler is of a type that this trainer does not build, or has a parameter that it does not read.
    """
    _refuse_other_types(file)
    _refuse_unread(file)
    if is_default:
        _drop_what_the_json_replaces(recipe, file)
    has_batch = "batch" in recipe.tree
    adopted: dict[str, str] = {}
    for stated in _stated(file):
        mine = stated.recipe_key
        if isinstance(stated.value, str) and not stated.json_key.endswith(".type"):
            raise ConfigError(_not_a_number(file, stated))
        said = f"{file.at(stated.json_key)} is {stated.quoted}"
        for key in ("max_steps", "max_epochs") if mine == "max_steps" else (mine,):
            own = get_dotted(recipe.tree, key)
            if own is None or (own == stated.value and key == mine):
                continue
            if mine in adopted:
                raise ConfigError(f'{said}, {adopted[mine]} is {own}; write "auto" here')
            if not is_default or recipe.place(key) == "command line":
                other = f"{recipe.place(key)}: {key} is {own}"
                raise ConfigError(f'{said}, {other}; write "auto" here, or drop {key} there')
        if get_dotted(recipe.tree, mine) != stated.value:
            adopted[mine] = file.at(stated.json_key)
            set_dotted(recipe.tree, mine.split("."), stated.value, adopted[mine])
    recipe.places |= adopted
    if not has_batch and list(recipe.tree.get("batch", ())) == ["gradient_accumulation_steps"]:
        default = RunConfig.model_fields["batch"].default
        recipe.tree["batch"]["micro_batch_size"] = default.micro_batch_size
    _adopt_floor_of_cosine(recipe, file)
    _note_other_warm_up(recipe, file)


def adopt_torch_section(recipe: ConfigFile, file: ConfigFile) -> None:
    """Give the recipe the `engine` section that a file with a `torch` section stands for.

    Raises:
        ConfigError: the recipe has an engine section too, or the file also speaks to DeepSpeed.
    """
    tree = file.tree
    if foreign := sorted(set(tree) - keys.WITH_TORCH):
        raise ConfigError(
            f"{file.at('torch')}: plain PyTorch does not read {', '.join(foreign)}; drop torch, or drop these"
        )
    if "engine" in recipe.tree:
        raise ConfigError(f"{file.at('torch')}: the recipe has an engine section too; drop one of the two")
    if get_dotted(tree, "fp16.enabled") is True:
        raise ConfigError(
            f"{file.at('fp16.enabled')}: plain PyTorch computes in fp32 or bf16; use "
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
    recipe.places |= {f"engine.{key}": file.at(dotted) for key, dotted in theirs.items()}


def _stated(file: ConfigFile) -> Iterator[_Stated]:
    """Yield each number that the JSON states, with the recipe's key. "auto" leaves it to the recipe."""
    tree = file.tree
    for json_key, mine in keys.RECIPE_OWNS.items():
        value = get_dotted(tree, json_key)
        if value is None or value == "auto":
            continue
        peak = get_dotted(tree, "scheduler.params.warmup_max_lr")
        if json_key == "optimizer.params.lr" and peak not in (None, "auto", value):
            file.notes.append(
                f"{file.at(json_key)}: DeepSpeed steps at warmup_max_lr, {peak}, not at {value}"
            )
            continue
        if json_key.endswith("_num_steps") and not isinstance(value, str):
            value = _whole(file, json_key, mine, value)
        yield _Stated(json_key, mine, value, str(value))
    kinds = {"optimizer.type": keys.OPTIMIZERS, "scheduler.type": keys.SCHEDULES}
    for json_key, known in kinds.items():
        given = get_dotted(tree, json_key)
        if given not in (None, "auto"):
            value = known[_type_name(json_key, given)]
            said = str(given) if str(given).lower() == value else f"{given} (here: {value})"
            yield _Stated(json_key, keys.ADOPTED[json_key], value, said)
    if get_dotted(tree, "scheduler.type") == "WarmupDecayLR":
        floor = _floor_of_decay(file)
        yield _Stated("scheduler.type", _RATIO, floor, f"WarmupDecayLR (here: {_RATIO} {floor})")


def _type_name(json_key: str, given: Any) -> str:
    """Return the name as DeepSpeed reads it: an optimizer's in any case, a schedule's only as written."""
    return str(given).lower() if json_key == "optimizer.type" else str(given)


def _floor_of_decay(file: ConfigFile) -> float:
    """Return the last rate of WarmupDecayLR, `warmup_min_lr`, as a share of its peak."""
    low, peak = (get_dotted(file.tree, f"scheduler.params.warmup_{end}_lr") for end in ("min", "max"))
    numbers = isinstance(low, int | float) and isinstance(peak, int | float) and peak > 0
    return low / peak if numbers else 0.0


def _adopt_floor_of_cosine(recipe: ConfigFile, file: ConfigFile) -> None:
    """Set the last rate of a WarmupCosineLR without `cos_min_ratio` to DeepSpeed's default, 0.0001."""
    is_cosine = get_dotted(file.tree, "scheduler.type") == "WarmupCosineLR"
    is_open = get_dotted(file.tree, "scheduler.params.cos_min_ratio") is None
    if is_cosine and is_open and get_dotted(recipe.tree, _RATIO) is None:
        place = file.at("scheduler.type")
        set_dotted(recipe.tree, _RATIO.split("."), 0.0001, place)
        recipe.places[_RATIO] = place


def _drop_what_the_json_replaces(recipe: ConfigFile, file: ConfigFile) -> None:
    """Drop the default recipe's keys that belong to another batch or schedule than the JSON's."""
    replaced = []
    if get_dotted(file.tree, "train_batch_size") not in (None, "auto"):
        replaced += ["batch.micro_batch_size", "batch.gradient_accumulation_steps", "batch.global_batch_size"]
    if get_dotted(file.tree, "scheduler.type") not in (None, "auto"):
        replaced += ["schedule.kind", "schedule.decay_steps", _RATIO]
    if get_dotted(file.tree, "scheduler.params.total_num_steps") not in (None, "auto"):
        replaced += ["max_steps", "max_epochs"]
    for dotted in replaced:
        if recipe.place(dotted) != "command line":
            section, _, key = dotted.rpartition(".")
            part = get_dotted(recipe.tree, section) if section else recipe.tree
            if isinstance(part, dict):
                part.pop(key, None)


def _not_a_number(file: ConfigFile, stated: _Stated) -> str:
    wanted = "a whole number" if stated.json_key.endswith(("size", "steps", "gpu")) else "a number"
    unquoted = ""
    with suppress(ValueError):
        float(stated.value)
        unquoted = "; write it without quotes"
    given = f"given {stated.value!r}, which is a text{unquoted}"
    return f'{file.at(stated.json_key)}: expected {wanted} or "auto", {given}'


def _whole(file: ConfigFile, json_key: str, mine: str, value: Any) -> int:
    """Return a number of steps. 5e2 is whole; 0.5 is not the share of the run that a recipe means by it."""
    if isinstance(value, bool) or not float(value).is_integer():
        given = json.dumps(value)
        raise ConfigError(
            f'{file.at(json_key)}: expected a whole number or "auto", given {given}; for a share of the run '
            f'write "auto" here, and {mine} in the recipe'
        )
    return int(value)


def _refuse_other_types(file: ConfigFile) -> None:
    optimizer, scheduler = (
        get_dotted(file.tree, f"{section}.type") for section in ("optimizer", "scheduler")
    )
    if optimizer not in (None, "auto") and _type_name("optimizer.type", optimizer) not in keys.OPTIMIZERS:
        raise ConfigError(
            f"{file.at('optimizer.type')}: {optimizer!r}; this trainer builds AdamW, SGD and Adafactor (drop "
            "the section)"
        )
    if scheduler not in (None, "auto", *keys.SCHEDULES):
        raise ConfigError(
            f"{file.at('scheduler.type')}: {scheduler!r}; this trainer builds {', '.join(keys.SCHEDULES)} "
            "(drop the section, and set schedule.kind in the recipe)"
        )


def _refuse_unread(file: ConfigFile) -> None:
    """Refuse parameters of the JSON's optimizer and scheduler that change something, but nothing here."""
    unread: dict[str, str] = {}
    read = {*keys.RECIPE_OWNS, *_SECTIONS, *keys.OF_WARM_UP, "optimizer.type", "scheduler.type"}
    for dotted in _SECTIONS:
        part = get_dotted(file.tree, dotted)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise ConfigError(f"{file.at(dotted)}: expected an object, given {part!r}")
        for key, value in part.items():
            full = f"{dotted}.{key}"
            says_nothing = value in (None, "auto") or is_comment(key)
            if full not in read and not says_nothing and value not in keys.AS_BUILT.get(full, ()):
                unread[full] = f"{full} ({json.dumps(value)})"
    if unread:
        first = next(iter(unread))
        section, _, name = first.rpartition(".")
        known = {key.removeprefix(f"{section}.") for key in (*read, *keys.AS_BUILT)}
        near = did_you_mean(name, {key for key in known if "." not in key} - {name} | {"type", "params"})
        raise ConfigError(
            f"{file.at(first).removesuffix(first)}{', '.join(unread.values())}: the recipe's optimizer and "
            f"schedule know no such thing{near if 'mean' in near else ''}, and would train without it; drop "
            "it here"
        )


def _note_other_warm_up(recipe: ConfigFile, file: ConfigFile) -> None:
    """Note how DeepSpeed's warm-up differs from the one here, which is linear and begins near 0."""
    params = get_dotted(file.tree, "scheduler.params") or {}
    kind = get_dotted(file.tree, "scheduler.type")
    if kind in (None, "auto") or not get_dotted(recipe.tree, "schedule.warmup"):
        return
    others = [
        name for name in ("warmup_min_lr", "warmup_min_ratio") if params.get(name) not in (None, "auto", 0)
    ]
    others = [f"begins at {name} {params[name]}" for name in others]
    if params.get("warmup_type") != "linear":
        others.append("rises with the logarithm of the step (warmup_type log, its default)")
    if others:
        theirs = f"DeepSpeed's warm-up {' and '.join(others)}"
        file.notes.append(f"{file.at('scheduler.type')}: {theirs}; here it is linear from 0")
