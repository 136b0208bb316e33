"""What a rank holds where a model is cut into stages: its layers, under the whole model's names."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeline.engine.deepspeed_state import state_of
from pipeline.engine.parameter_state import kept_buffers
from pipeline.engine.state import Place, State
from pipeline.models.staging import Layer


def stage_state(optimizer: Any, stage: nn.Module, sharers: tuple[int, int]) -> State:
    """Of one stage.

    Args:
        optimizer: What deepspeed.initialize made of it.
        sharers: (index, count) of the ranks of this stage.
    """
    layers = [module for module in stage.modules() if isinstance(module, Layer)]
    places = {
        # A tied weight lies on two stages, in step; DeepSpeed marks the copy.
        p: Place.all_of(
            f"{layer.name}.{name}",
            p.shape,
            is_written=not getattr(p, "ds_pipe_replicated", False),
            is_frozen=not p.requires_grad,
        )
        for layer in layers
        for name, p in layer.part.named_parameters()
    }
    buffers = {
        name: buffer for layer in layers for name, buffer in kept_buffers(layer.part, layer.name).items()
    }
    return state_of(optimizer, places, buffers, sharers)
