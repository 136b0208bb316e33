"""The gradients of one step, shard by shard, where an optimizer is about to step by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from pipeline.checkpoint.shards import Shard
from pipeline.engine.state import State


@contextmanager
def gradients_shown(
    optimizers: Iterable[Optimizer], state: Callable[[], State], take: Callable[[Shard], None]
) -> Iterator[None]:
    """Inside it `take` is given what moves the weights: averaged over the global batch, unscaled, clipped.

    Args:
        optimizers: All that step the model.
        state: Where their gradients lie in the whole model.
    """

    @torch.no_grad()
    def look(optimizer: Optimizer, *_: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        clipped_by = getattr(optimizer, "grad_scale", None)  # which the kernel divides by
        for shard in state().gradients(stepped):
            assert shard.values is not None
            values = shard.values if clipped_by is None else shard.values / clipped_by
            take(replace(shard, values=values))

    with ExitStack() as hooks:
        for optimizer in optimizers:  # behind the hooks that clip
            hooks.callback(optimizer.register_step_pre_hook(look).remove)
        yield
