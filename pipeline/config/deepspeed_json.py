"""The DeepSpeed JSON: load it, hold it to what it owns, fill every "auto", hand on a plain dict.

The only module that reads the JSON of ds_configs/. It validates names itself, since DeepSpeed accepts an
unknown top-level key in silence and drops many an "auto".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config import deepspeed_keys as keys
from pipeline.config.batch import BatchPlan
from pipeline.config.loading import Tree, did_you_mean, get_dotted, read_text, set_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.split import Device
from pipeline.errors import ConfigError


def load_deepspeed_json(path: Path, overrides: list[tuple[list[str], Any]]) -> Tree:
    """The file with the command line's `ds.` overrides, all names checked.

    Raises:
        ConfigError: missing or malformed (line and column), unknown, dropped or misplaced keys.
    """
    try:
        tree = json.loads(read_text(path), object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{path}: the key {error.args[0]!r} is given twice") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected an object of keys to values, found a {type(tree).__name__}")
    given: set[str] = set()
    for parts, value in overrides:
        set_dotted(tree, parts, value, "command line")
        given.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
    _check_names(tree, path, given)
    return _without_nulls(tree)


class _DuplicateKeyError(Exception):
    pass


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> Tree:
    tree: Tree = {}
    for key, value in pairs:
        if key in tree:
            raise _DuplicateKeyError(key)
        tree[key] = value
    return tree


def _without_nulls(tree: Tree) -> Tree:
    """DeepSpeed's defaults are null where they are not a value: an explicit one says nothing."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }


def _check_names(tree: Tree, path: Path, given: set[str]) -> None:
    def place(full: str) -> str:
        return f"command line: ds.{full}" if full in given else f"{path}: {full}"

    for dotted, valid in [("", keys.TOP_LEVEL | keys.OWN), *keys.SECTIONS.items()]:
        section = get_dotted(tree, dotted) if dotted else tree
        if section is None:
            continue
        if not isinstance(section, dict):
            raise ConfigError(f"{place(dotted)}: expected an object, given {section!r}")
        for key in section:
            full = f"{dotted}.{key}" if dotted else key
            if full in keys.REMOVED:
                raise ConfigError(f"{place(full)}: DeepSpeed no longer has this; {keys.REMOVED[full]}")
            if full in keys.NOT_HERE:
                raise ConfigError(f"{place(full)}: not read here; {keys.NOT_HERE[full]}")
            if key not in valid:
                known = valid | set(keys.NOT_HERE) if not dotted else valid
                near = did_you_mean(key, known)
                raise ConfigError(f"{place(full)}: unknown key{near if 'mean' in near else ''}")
    stage = get_dotted(tree, "zero_optimization.stage")
    if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        raise ConfigError(f"{place('zero_optimization.stage')}: expected 0, 1, 2 or 3, given {stage!r}")
    partition = get_dotted(tree, "pipeline.partition")
    if partition not in (None, *keys.PARTITIONS):
        words = " or ".join(keys.PARTITIONS)
        raise ConfigError(f"{place('pipeline.partition')}: expected {words}, given {partition!r}")
    enabled = get_dotted(tree, "compile.enabled")
    if enabled is not None and not isinstance(enabled, bool):
        raise ConfigError(f"{place('compile.enabled')}: expected true or false, given {enabled!r}")
    for full in ("bf16.enabled", "fp16.enabled", "tf32.enabled"):
        enabled = get_dotted(tree, full)
        if enabled not in (None, "auto") and not isinstance(enabled, bool):
            raise ConfigError(f'{place(full)}: expected true, false or "auto", given {enabled!r}')


def adopt_stated_numbers(recipe: Tree, tree: Tree, path: Path) -> tuple[Tree, dict[str, str]]:
    """The recipe, completed with numbers that a JSON from elsewhere states and the recipe does not.

    Returns:
        The completed recipe, and the place in the JSON of each key that was completed.

    Raises:
        ConfigError: both state a number and the two differ (both are quoted), the JSON's optimizer or
            scheduler is of a type this trainer does not build, or has parameters that nothing here reads.
    """
    recipe = copy.deepcopy(recipe)
    optimizer, scheduler = get_dotted(tree, "optimizer.type"), get_dotted(tree, "scheduler.type")
    if optimizer is not None and str(optimizer).lower() not in ("adam", "adamw"):
        raise ConfigError(
            f"{path}: optimizer.type: {optimizer!r}; this trainer builds AdamW (drop the section)"
        )
    if scheduler is not None and scheduler not in keys.SCHEDULES:
        raise ConfigError(f"{path}: scheduler.type: {scheduler!r}; set schedule.kind in the recipe instead")
    _refuse_unread(tree, path)
    stated = [(json_key, mine, get_dotted(tree, json_key)) for json_key, mine in keys.RECIPE_OWNS.items()]
    stated.append(("scheduler.type", "schedule.kind", keys.SCHEDULES.get(scheduler)))
    adopted: dict[str, str] = {}
    for json_key, mine, value in stated:
        if value is None or value == "auto":
            continue
        own = get_dotted(recipe, mine)
        if own is None:
            adopted[mine] = f"{path}: {json_key}"
            set_dotted(recipe, mine.split("."), value, adopted[mine])
        elif own != value:
            other = adopted.get(mine, f"the recipe's {mine}")
            raise ConfigError(f'{path}: {json_key} is {value}, {other} is {own}; write "auto" here')
    return recipe, adopted


def adopt_torch_section(recipe: Tree, tree: Tree, path: Path) -> tuple[Tree, dict[str, str]]:
    """The recipe with the `engine` section that a file with a `torch` section stands for.

    Returns:
        The completed recipe, and the place in the JSON of each key of its engine section.

    Raises:
        ConfigError: the recipe has an engine section too, or the file also speaks to DeepSpeed.
    """
    if foreign := sorted(set(tree) - keys.WITH_TORCH):
        raise ConfigError(
            f"{path}: torch: plain PyTorch does not read {', '.join(foreign)}; drop torch, or drop these"
        )
    if "engine" in recipe:
        raise ConfigError(f"{path}: torch: the recipe has an engine section too; drop one of the two")
    if get_dotted(tree, "fp16.enabled") is True:
        raise ConfigError(
            f"{path}: fp16.enabled: plain PyTorch computes in fp32 or bf16; use ds_configs/zero2_fp16.json"
        )
    bf16 = get_dotted(tree, "bf16.enabled")
    engine = {
        **tree["torch"],
        "precision": "auto" if bf16 == "auto" else "bf16" if bf16 else "fp32",
        "tf32": get_dotted(tree, "tf32.enabled") in (True, "auto"),
        "compile": bool(get_dotted(tree, "compile.enabled")),
    }
    places = {f"engine.{key}": f"{path}: torch.{key}" for key in engine}
    return recipe | {"engine": engine}, places


def _refuse_unread(tree: Tree, path: Path) -> None:
    """Refuses parameters of the JSON's optimizer and scheduler that change something, but nothing here."""
    unread = []
    for name in ("optimizer", "scheduler"):
        section = tree.get(name, {})
        for dotted, part in ((name, section), (f"{name}.params", get_dotted(tree, f"{name}.params") or {})):
            if not isinstance(part, dict):
                raise ConfigError(f"{path}: {dotted}: expected an object, given {part!r}")
            for key, value in part.items():
                full = f"{dotted}.{key}"
                read = full in keys.RECIPE_OWNS or full in (f"{name}.type", f"{name}.params")
                if not read and value != "auto" and value not in keys.AS_BUILT.get(full, ()):
                    unread.append(f"{full} ({json.dumps(value)})")
    if unread:
        raise ConfigError(
            f"{path}: {', '.join(unread)}: the recipe's optimizer and schedule know no such thing, and would "
            "train without it; drop it here"
        )


def resolve_deepspeed(tree: Tree, config: RunConfig, plan: BatchPlan, precision: str, path: Path) -> Tree:
    """The dict DeepSpeed gets: every "auto" a value, optimizer and schedule left to the recipe's builders.

    Raises:
        ConfigError: an "auto" that nothing can fill.
    """
    filled = {
        key: copy.deepcopy(value)
        for key, value in tree.items()
        if key not in ("optimizer", "scheduler") and key not in keys.OWN
    }
    filled["train_batch_size"] = plan.global_batch_size
    filled["train_micro_batch_size_per_gpu"] = plan.micro_batch_size
    filled["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
    filled["gradient_clipping"] = config.optimizer.max_grad_norm
    zero = filled.setdefault("zero_optimization", {"stage": 0})
    for key, value in _zero_defaults(config).items():
        if zero.get(key) == "auto":
            zero[key] = value
    for name in ("bf16", "fp16"):
        if name in filled:
            filled[name]["enabled"] = name == precision
    for dotted in _leftover_autos(filled):
        raise ConfigError(f'{path}: {dotted}: nothing here can fill this "auto"; write a value')
    return filled


def _zero_defaults(config: RunConfig) -> Tree:
    """Bucket sizes in elements, by the model's width where it is known (the rule Hugging Face uses)."""
    hidden = getattr(config.model, "hidden_size", None)
    return {
        "overlap_comm": True,
        "reduce_bucket_size": hidden * hidden if hidden else 500_000_000,
        "allgather_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden) if hidden else 50_000_000,
        "stage3_param_persistence_threshold": 10 * hidden if hidden else 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "sub_group_size": 1_000_000_000,
    }


def decide_precision(tree: Tree, device: Device, path: Path) -> str:
    """`bf16` where it is asked for, or left open and the device has it; else `fp16`; else `fp32`.

    Raises:
        ConfigError: both half precisions asked for, or one the device does not compute in.
    """
    bf16 = get_dotted(tree, "bf16.enabled") or False
    fp16 = get_dotted(tree, "fp16.enabled") or False
    if bf16 is True and fp16 is True:
        raise ConfigError(f"{path}: bf16.enabled and fp16.enabled are both true; choose one")
    if fp16 is True and device.kind == "cuda" and not device.fp16:
        raise ConfigError(
            f"{path}: fp16.enabled: this device does not compute in fp16; use bf16 (ds_configs/zero2.json), "
            "or fp32 with ds.fp16.enabled=false"
        )
    if bf16 is True and device.kind == "cuda" and not device.bf16:
        raise ConfigError(
            f"{path}: bf16.enabled: this device does not compute in bf16; use fp16 "
            "(ds_configs/zero2_fp16.json), or fp32 with ds.bf16.enabled=false"
        )
    if bf16 is True or (bf16 == "auto" and fp16 is not True and device.bf16):
        return "bf16"
    return "fp16" if fp16 is True or (fp16 == "auto" and device.fp16) else "fp32"


def precision_of(filled: Tree) -> str:
    """`fp32`, `bf16` or `fp16`: what a resolved configuration computes in."""
    return next((name for name in ("bf16", "fp16") if filled.get(name, {}).get("enabled")), "fp32")


def lowest_loss_scale(filled: Tree | None) -> float | None:
    """The fp16 scale DeepSpeed does not go below: the minimum, or the fixed one; None in other precisions."""
    if filled is None or precision_of(filled) != "fp16":
        return None
    return float(filled["fp16"].get("loss_scale") or filled["fp16"].get("min_loss_scale", 1))


def _leftover_autos(tree: Any, prefix: str = "") -> Iterator[str]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if value == "auto" and isinstance(value, str):
            yield f"{prefix}{key}"
        else:
            yield from _leftover_autos(value, f"{prefix}{key}.")
