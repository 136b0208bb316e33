"""Counts, on a CPU, of what a step asks of the device: operators, and reads that the host would wait for.

On CUDA an operator is one launch or a few, and each host read drains what was launched. A foreach operator
counts once, as there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "_local_scalar_dense",  # item, bool, int, float
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "repeat_interleave",
}
"""Operators after which the host knows a value, or a shape that depends on one."""
COPIES = {"lift_fresh"}
"""torch.tensor(...): on the host, and from there a pageable copy, which waits."""
# What launches nothing: views, and what only describes.
_VIEWS = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "expand",
    "alias",
    "detach",
    "slice",
    "select",
    "unsqueeze",
}
_VIEWS |= {"squeeze", "permute", "as_strided", "split", "split_with_sizes", "unbind", "narrow", "lift_fresh"}
_VIEWS |= {
    "device",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "is_same_size",
}
_OWN = ("pipeline", "deepspeed", "transformers")


@dataclass
class Census:
    """Counts of the operators that ran inside `counted`."""

    operators: int = 0
    """Those that launch something."""
    reads: Counter[str] = field(default_factory=Counter)
    """`file:function` of the trainer or a library -> how often the host read there."""
    largest: int = 0
    """Bytes of the largest tensor that an operator gave."""

    @property
    def host_reads(self) -> int:
        return self.reads.total()


class _Operators(TorchDispatchMode):
    def __init__(self, census: Census):
        super().__init__()
        self._census = census

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        census = self._census
        result = func(*args, **(kwargs or {}))
        if name in READS or name in COPIES:
            census.reads[_place()] += 1
        elif name not in _VIEWS:
            census.operators += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                census.largest = max(census.largest, tensor.numel() * tensor.element_size())
        return result


class _Calls(TorchFunctionMode):
    """Calls that are no operator on a CPU: the tensor is there already."""

    WAITS = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy)

    def __init__(self, census: Census):
        super().__init__()
        self._census = census

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.WAITS:
            self._census.reads[_place()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Census]:
    """Count what runs inside, with backward and collectives."""
    census = Census()

    def synchronize(*_: Any) -> None:
        census.reads[_place()] += 1

    with patch.object(get_accelerator(), "synchronize", synchronize), _Calls(census), _Operators(census):
        yield census


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        if "tests" not in parts and any(each in parts for each in _OWN):
            return f"{parts[-1]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
