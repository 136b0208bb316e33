"""What checkpoints take: on the disk, and in host memory while one is written beside training."""

from __future__ import annotations

from pipeline.config.parameter_groups import group_keys, kind_of
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.planning.model import Model
from pipeline.planning.states import moments


def checkpoint_bytes(model: Model, config: RunConfig) -> int:
    """Of one checkpoint: fp32 weights of what is trained, and what the optimizer keeps."""
    optimizer, has_base = config.optimizer, config.adapter is not None
    keys = group_keys({p.name: len(p.shape) for p in model.parameters if p.trains}, optimizer)
    return sum(
        4 * p.numel + moments(optimizer, kind_of(keys[p.name], optimizer), p.shape)
        if p.trains
        else 0
        if has_base
        else 4 * p.numel
        for p in model.parameters
    )


def copy_bytes(model: Model, config: RunConfig, resolved: Resolved) -> float:
    """Of a rank's share of it in host memory, from the first save on that training does not wait for."""
    saves, steps = config.checkpoint, config.max_steps
    is_within = saves.every_minutes > 0 or (saves.every > 0 and (steps is None or saves.every < steps))
    return checkpoint_bytes(model, config) / resolved.split.world_size if is_within else 0.0
