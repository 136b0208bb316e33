"""What a rank holds where a model is cut into stages: its layers, under the whole model's names."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeline.engine.deepspeed_state import state_of
from pipeline.engine.held import Part, State
from pipeline.engine.torch_state import Named, kept_buffers
from pipeline.models.staging import Layer


def stage_state(optimizer: Any, stage: nn.Module, sharers: tuple[int, int]) -> State:
    """Of one stage.

    Args:
        optimizer: What deepspeed.initialize made of it.
        sharers: (index, count) of the ranks of this stage.
    """
    layers = [module for module in stage.modules() if isinstance(module, Layer)]
    named = [
        # A tied weight lies on two stages, in step; DeepSpeed marks the copy.
        Named(f"{layer.name}.{name}", p, Part.all_of(p.shape), not getattr(p, "ds_pipe_replicated", False))
        for layer in layers
        for name, p in layer.part.named_parameters()
    ]
    buffers = {
        name: buffer for layer in layers for name, buffer in kept_buffers(layer.part, layer.name).items()
    }
    return state_of(optimizer, named, buffers, sharers)
