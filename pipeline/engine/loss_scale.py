"""The fp16 loss scale: where DeepSpeed leaves it to the caller, and what happens at its minimum."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler


def loss_scale_left_to_us(optimizer: Any, precision: str) -> float:
    """What the loss must be multiplied by because DeepSpeed does not, else 1.

    At stage 0 engine.backward (0.19.6 to 0.19.8) does not scale the loss, yet step divides the gradients by
    the scale: they would vanish beside AdamW's eps. tests/engine holds both halves of this.
    """
    return 1.0 if precision != "fp16" or isinstance(optimizer, ZeROOptimizer) else float(optimizer.loss_scale)


def go_on_at_the_minimum(optimizer: Any) -> None:
    """An overflow at the smallest scale is a skipped step like any other; DeepSpeed would raise there.

    The meters warn of it and end a run that does nothing else.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        scaler.raise_error_at_min_scale = False
