"""First weights of transformers' models: by their own code, in one order, a few modules at a time.

The random stream is the same for a whole and for a divided model, on every rank and device.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipeline.models.sharding import Sharding


@torch.no_grad()
def draw_weights(model: PreTrainedModel, sharding: Sharding, draws: bool) -> None:
    """transformers' own initialisation, children before parents, each on whole fp32 CPU parameters.

    Args:
        draws: False: only modules with buffers are initialised, since no checkpoint has all buffers.
    """
    torch.manual_seed(torch.initial_seed())

    def is_due(module: nn.Module) -> bool:
        return draws or next(module.buffers(recurse=False), None) is not None

    def visit(module: nn.Module, how: Any) -> None:
        children = [
            (child, child._init_weights if isinstance(child, PreTrainedModel) else how)
            for child in module.children()
        ]
        # A module may change what its children have drawn. Where these are leaves, all are whole once.
        together = all(next(child.children(), None) is None for child, _ in children)
        if not together:
            for child, its in children:
                visit(child, its)
        due = [(each, its) for each, its in [*(children if together else ()), (module, how)] if is_due(each)]
        own = [p for m in (module, *module.children()) for p in m.parameters(recurse=False)]
        with sharding.whole(own) if own and due else nullcontext():
            for each, its in due:
                its(each)

    visit(model, model._init_weights)
    model.tie_weights()
