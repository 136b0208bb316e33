"""What a module that no formula knows keeps and needs of a batch of images: by a trial without values."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.config.schema import RunConfig
from pipeline.planning.model import Trial

log = logging.getLogger(__name__)

FEW, MORE = 4, 12
"""Rows of the two trials: what grows with rows, and what does not."""


def trial_of(config: RunConfig, module: nn.Module) -> Trial | None:
    """Bytes of forward and backward on `meta`, in fp32; None: the data's shape is not known, or the module
    does not run without values.
    """
    shape = config.data.image_shape
    if shape is None:
        return None
    try:
        few, more = (_most(module, rows, shape) for rows in (FEW, MORE))
    except Exception:  # a stranger's code may read values
        log.debug("no trial of this module", exc_info=True)
        return None
    a_row = (more - few) / (MORE - FEW)
    return Trial(max(0.0, few - FEW * a_row), a_row)


def _most(module: nn.Module, rows: int, shape: tuple[int, ...]) -> float:
    """Bytes at the most, without gradients of parameters."""
    with _Live() as live:
        output = module.train()(torch.empty(rows, *shape, device="meta"))
        loss = sum(each.float().sum() for each in tree_leaves(output) if torch.is_tensor(each))
        trained = [p for p in module.parameters() if p.requires_grad]
        live.gradients = sum(p.nbytes for p in trained)
        torch.autograd.grad(loss, trained, allow_unused=True)  # type: ignore[arg-type]
    return max(0.0, live.most - live.gradients)


class _Live(TorchDispatchMode):
    """Counts the storages that are made inside of it and not yet gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.gradients = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves(args) if torch.is_tensor(each)}
        for each in tree_leaves(result):
            if (
                torch.is_tensor(each)
                and (storage := each.untyped_storage())._cdata not in self._known | given
            ):
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
