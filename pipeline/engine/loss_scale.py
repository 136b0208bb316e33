"""The state of the search for an fp16 loss scale, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from pipeline.shards import Scalars

# In a checkpoint -> DeepSpeed's word. ZeRO 0 keeps no hysteresis.
_STATE = {
    "loss_scale": "cur_scale",
    "loss_scale_iteration": "cur_iter",
    "loss_scale_last_overflow": "last_overflow_iter",
    "loss_scale_hysteresis": "cur_hysteresis",
}


def _searched(optimizer: Any) -> Any:
    """What keeps the state of a loss scale that is searched for; None where there is none, or a fixed one."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        return scaler
    kept = getattr(optimizer, "loss_scale_config", None)
    return kept if kept is not None and kept.dynamic_loss_scale else None


def loss_scale_state(optimizer: Any) -> Scalars:
    """The search's state; empty where nothing is searched for."""
    searched = _searched(optimizer)
    return {key: getattr(searched, word) for key, word in _STATE.items() if hasattr(searched, word)}


def go_on_searching(optimizer: Any, scalars: Mapping[str, Any]) -> None:
    """Sets what there is of loss_scale_state; a run that had none leaves the search at its beginning."""
    searched = _searched(optimizer)
    for key, word in _STATE.items():
        if key in scalars and hasattr(searched, word):
            setattr(searched, word, scalars[key])
