"""Storages of tensors that come and go while something runs."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, strided
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Reports each storage that an operator makes on a kind of device, and when it is freed."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._known: dict[int, int] = {}
        self._count = 0

    def came(self, number: int, size: int) -> None:
        raise NotImplementedError

    def gone(self, number: int, size: int) -> None:
        raise NotImplementedError

    def number(self, tensor: Tensor) -> int | None:
        return self._known.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor) and each.layout == strided
        }
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.device.type == self._device:
                storage = each.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._note(storage)
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        size = storage.nbytes()
        self._count += 1
        self._known[key] = self._count
        self.came(self._count, size)
        weakref.finalize(storage, self._forget, key, self._count, size)

    def _forget(self, key: int, number: int, size: int) -> None:
        self._known.pop(key, None)
        self.gone(number, size)


class Allocations(Storages):
    """`most`: the largest sum of the storages that were made inside of it."""

    def __init__(self, device: str, block: int = 1) -> None:
        """Block: what an allocator's sizes are multiples of."""
        super().__init__(device)
        self.most = self.now = 0
        self._block = block

    def came(self, number: int, size: int) -> None:
        self.now += self._rounded(size)
        self.most = max(self.most, self.now)

    def gone(self, number: int, size: int) -> None:
        self.now -= self._rounded(size)

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block
