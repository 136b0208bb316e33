"""What checkpoints take: on the disk, and in host memory while one is written beside training."""

from __future__ import annotations

from pipeline.config.half_masters import has_half_masters, has_half_states
from pipeline.config.interval import Interval
from pipeline.config.parameter_groups import group_keys, kind_of
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.planning.model import Model
from pipeline.planning.states import moments


def checkpoint_bytes(model: Model, config: RunConfig, resolved: Resolved) -> int:
    """Of one checkpoint, in which all is as it is held: the weights that the optimizer steps and what it
    keeps of them, and what is frozen in the run's precision. An adapter's base is in none.
    """
    optimizer, has_base, json = config.optimizer, config.adapter is not None, resolved.deepspeed or {}
    stepped, kept = 2 if has_half_masters(json) else 4, 2 if has_half_states(json) else 4
    frozen = 4 if resolved.deepspeed is None or resolved.split.precision == "fp32" else 2
    keys = group_keys({p.name: len(p.shape) for p in model.parameters if p.trains}, optimizer)
    return sum(
        stepped * p.numel + moments(optimizer, kind_of(keys[p.name], optimizer), p.shape, kept)
        if p.trains
        else 0
        if has_base
        else frozen * p.numel
        for p in model.parameters
    )


def copy_bytes(model: Model, config: RunConfig, resolved: Resolved) -> float:
    """Of a rank's share of it in host memory, where a save comes before the last step: that is waited for."""
    saves, steps = config.checkpoint, config.max_steps
    every = Interval.of(saves.every).in_steps(None)  # None: in epochs, of which some may end before the run
    is_taken = every is None or (every > 0 and (steps is None or every < steps))
    if not is_taken and saves.every_minutes == 0:
        return 0.0
    return checkpoint_bytes(model, config, resolved) / resolved.split.world_size
