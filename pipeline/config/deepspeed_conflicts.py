"""Keys of the DeepSpeed JSON that are valid alone, and that DeepSpeed refuses or gets wrong together."""

from __future__ import annotations

from typing import Any

from pipeline.config.deepspeed_check import rules
from pipeline.config.loading import ConfigFile, Tree, get_dotted
from pipeline.errors import ConfigError


def refuse_conflicts(file: ConfigFile) -> None:
    """Holds a checked file to the table below.

    Raises:
        ConfigError: a key that cannot stand beside the others.
    """
    for dotted, wrong, message in _TOGETHER:
        if wrong(file.tree):
            raise ConfigError(f"{file.at(dotted)}: {message}")


def _get(tree: Tree, dotted: str) -> Any:
    default = rules()[dotted].get("default")
    value = get_dotted(tree, dotted)
    return default if value is None or value == "auto" else value


def _stage(tree: Tree) -> int:
    return int(_get(tree, "zero_optimization.stage"))


def _no_path(section: str) -> tuple[str, Any, str]:
    at = f"zero_optimization.{section}"
    return (
        f"{at}.device",
        lambda tree: get_dotted(tree, f"{at}.device") == "nvme" and not get_dotted(tree, f"{at}.nvme_path"),
        f"nvme needs a folder on a local NVMe disk; set {at}.nvme_path",
    )


def _no_master_weights(dotted: str) -> tuple[str, Any, str]:
    return (
        dotted,
        lambda tree: _get(tree, dotted) and not _stage(tree),
        "only ZeRO has master weights; set zero_optimization.stage 1, 2 or 3",
    )


def _scatters(tree: Tree, stage: int) -> bool:
    return _stage(tree) == stage and bool(_get(tree, "zero_optimization.reduce_scatter"))


# (key, whether it is wrong with the others, what to change).
_TOGETHER = [
    _no_path("offload_optimizer"),
    _no_path("offload_param"),
    (
        "zero_optimization.compute_grad_norm",
        lambda tree: not _get(tree, "zero_optimization.compute_grad_norm"),
        "the norm is logged, and without one nothing guards against gradients that are not finite; drop it",
    ),
    (
        "zero_optimization.offload_optimizer.ratio",
        lambda tree: _get(tree, "zero_optimization.offload_optimizer.ratio") < 1 and _stage(tree) < 3,
        "only ZeRO 3 offloads a part; set zero_optimization.stage 3, or drop it",
    ),
    _no_master_weights("bf16.bf16_master_weights_and_grads"),
    _no_master_weights("fp16.fp16_master_weights_and_grads"),
    (
        "bf16.bf16_optimizer_states",
        lambda tree: (
            _get(tree, "bf16.bf16_optimizer_states") and not _get(tree, "bf16.bf16_master_weights_and_grads")
        ),
        "needs bf16.bf16_master_weights_and_grads: true",
    ),
    (
        "prescale_gradients",
        lambda tree: _get(tree, "prescale_gradients") and _scatters(tree, 2),
        "DeepSpeed does not scale gradients beforehand where ZeRO 2 scatters them; set "
        "zero_optimization.stage 1, or zero_optimization.reduce_scatter: false",
    ),
    (
        "prescale_gradients",
        lambda tree: _get(tree, "prescale_gradients") and _scatters(tree, 3),
        "DeepSpeed does not scale gradients beforehand with ZeRO 3; drop it, or set "
        "zero_optimization.stage 1",
    ),
    (
        "gradient_predivide_factor",
        lambda tree: _get(tree, "gradient_predivide_factor") != 1 and _scatters(tree, 2),
        "DeepSpeed does not divide gradients beforehand where ZeRO 2 scatters them; set "
        "zero_optimization.stage 1, or zero_optimization.reduce_scatter: false",
    ),
    (
        "gradient_predivide_factor",
        # Without reduce_scatter it starts, and never multiplies by a factor that is the number of ranks.
        lambda tree: _get(tree, "gradient_predivide_factor") != 1 and _stage(tree) == 3,
        "DeepSpeed does not divide gradients beforehand with ZeRO 3; drop it, or set "
        "zero_optimization.stage 1",
    ),
]
