"""Bytes of the tensors that come and go while something runs, storage by storage."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """`most`: the largest sum, inside of it, of storages that were made inside of it."""

    def __init__(self, device: str, block: int = 1) -> None:
        """Block: what an allocator's sizes are multiples of."""
        super().__init__()
        self.most = self.now = 0
        self._device, self._block = device, block
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor) and each.layout == torch.strided
        }
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.device.type == self._device:
                storage = each.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._note(storage)
        return result

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self._block) * self._block
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
