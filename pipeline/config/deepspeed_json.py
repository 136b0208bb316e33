"""Loads the DeepSpeed JSON, and resolves it to the dict that DeepSpeed gets, without any "auto"."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.config import deepspeed_keys as keys
from pipeline.config.batch_plan import BatchPlan
from pipeline.config.deepspeed_check import check_deepspeed_json, load_key_rules
from pipeline.config.loading import ConfigFile, Tree, get_dotted, read_json
from pipeline.config.schema import RunConfig
from pipeline.config.split import Device
from pipeline.errors import ConfigError


def load_deepspeed_json(path: Path, overrides: list[tuple[list[str], Any]]) -> ConfigFile:
    """Return the checked file with the `ds.` overrides of the command line.

    Args:
        path: JSON file.
        overrides: Parts of each key, without `ds`, and its value.

    Raises:
        ConfigError: The file is missing or malformed, a key is unknown or not supported, or DeepSpeed does
            not accept a value.
    """
    file = read_json(path)
    for parts, value in overrides:
        file.override(parts, value)
    check_deepspeed_json(file)
    return file


def resolve_deepspeed(file: ConfigFile, config: RunConfig, plan: BatchPlan, precision: str) -> Tree:
    """Return the dict that DeepSpeed gets: every "auto" filled, without optimizer and schedule.

    Args:
        file: Checked DeepSpeed JSON.
        config: The recipe.
        plan: Batch for the ranks of this job.
        precision: From `decide_precision`.

    Raises:
        ConfigError: No rule fills an "auto".
    """
    filled = {
        key: copy.deepcopy(value)
        for key, value in file.tree.items()
        if key not in ("optimizer", "scheduler") and key not in keys.OWN_SECTIONS
    }
    filled["train_batch_size"] = plan.global_batch_size
    filled["train_micro_batch_size_per_gpu"] = plan.micro_batch_size
    filled["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
    filled["gradient_clipping"] = config.optimizer.max_grad_norm
    if config.optimizer.kind != "adamw":
        filled["zero_allow_untested_optimizer"] = True
        filled["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's CPU kernel computes Adam only
    # DeepSpeed's throughput timer is on by default. It synchronizes with the device before each forward pass
    # and after each step.
    filled.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    zero = filled.setdefault("zero_optimization", {"stage": 0})
    if zero.get("stage"):
        zero.setdefault("overlap_comm", "auto")
    if zero.get("stage") in (1, 2):  # vectorised kernels need parameters at multiples of 16 bytes
        zero.setdefault("parameter_alignment", True)
    if zero.get("stage") == 3:  # DeepSpeed's default group is larger than most models
        zero.setdefault("sub_group_size", "auto")
    # ZeRO shards over the ranks of a sequence, too.
    num_shards = plan.dp_world_size * filled.get("sequence_parallel_size", 1)
    for key, value in _compute_zero_defaults(config, num_shards, zero.get("stage", 0)).items():
        if zero.get(key) == "auto":
            zero[key] = value
    if zero.get("reduce_bucket_size") is None:
        zero.pop("reduce_bucket_size", None)
    for name in ("bf16", "fp16"):
        if name in filled:
            filled[name]["enabled"] = name == precision
    for dotted in _find_leftover_autos(filled):
        raise ConfigError(f'{file.describe_key(dotted)}: nothing here can fill this "auto"; write a value')
    return filled


def _compute_zero_defaults(config: RunConfig, num_shards: int, stage: int) -> Tree:
    """Return ZeRO's values for "auto"; sizes count elements. `None` leaves the size to the engine.

    At stages 1 and 2 the engine chooses the reduce bucket by the size of the model. At stage 3 the bucket
    is the square of the hidden size, as in Hugging Face's integration, but at least 50 million elements:
    smaller messages would take longer to start than to transfer.

    Args:
        config: The recipe.
        num_shards: Number of ranks over which ZeRO shards.
        stage: ZeRO stage.
    """
    language = config.model.language_model
    hidden = (language.hidden_size if language is not None else None) or 0
    bucket = max(hidden * hidden, 50_000_000)
    return {
        "overlap_comm": num_shards > 1,  # without effect on one rank, but two synchronizations a step
        "reduce_bucket_size": bucket if stage == 3 else None,
        "allgather_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": int(0.9 * bucket),
        "stage3_param_persistence_threshold": 10 * hidden if hidden else 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        # During a step the gradients of one group exist in fp32, which takes 4 bytes an element.
        "sub_group_size": 100_000_000,
    }


def decide_precision(file: ConfigFile, device: Device) -> str:
    """Return the precision of the run: `bf16`, `fp16` or `fp32`.

    A half precision is used if the JSON enables it. With "auto" it is used if the device is faster in it
    than in fp32, bf16 before fp16.

    Raises:
        ConfigError: Both half precisions are enabled, or one in which the device cannot compute.
    """
    bf16 = get_dotted(file.tree, "bf16.enabled") or False
    fp16 = get_dotted(file.tree, "fp16.enabled") or False
    if bf16 is True and fp16 is True:
        raise ConfigError(
            f"{file.describe_key('bf16.enabled')} and fp16.enabled are both true; set one of them to false"
        )
    alternatives = {"fp16": "bf16 (ds_configs/zero2.json)", "bf16": "fp16 (ds_configs/zero2_fp16.json)"}
    for name, enabled in (("fp16", fp16), ("bf16", bf16)):
        if enabled is True and device.kind == "cuda" and not getattr(device, name):
            raise ConfigError(
                f"{file.describe_key(f'{name}.enabled')}: this device does not compute in {name}; "
                f"use {alternatives[name]}, or fp32 with ds.{name}.enabled=false"
            )
    if bf16 is True or (bf16 == "auto" and fp16 is not True and device.bf16):
        return "bf16"
    return "fp16" if fp16 is True or (fp16 == "auto" and device.fp16) else "fp32"


def get_precision(filled: Tree) -> str:
    """Return the precision of a resolved JSON: `fp32`, `bf16` or `fp16`."""
    return next((name for name in ("bf16", "fp16") if filled.get(name, {}).get("enabled")), "fp32")


def get_min_loss_scale(filled: Tree | None) -> float | None:
    """Return the lowest fp16 loss scale that DeepSpeed uses; `None` in other precisions."""
    if filled is None or get_precision(filled) != "fp16":
        return None
    return float(filled["fp16"].get("loss_scale") or filled["fp16"].get("min_loss_scale", 1))


def _find_leftover_autos(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that are still "auto", except those whose default in DeepSpeed is "auto"."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, value in items:
        if value == "auto":
            if load_key_rules().get(f"{prefix}{key}", {}).get("default") != "auto":
                yield f"{prefix}{key}"
        else:
            yield from _find_leftover_autos(value, f"{prefix}{key}.")
