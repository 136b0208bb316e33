"""Memory: what an engine holds on a device, by what it is, and what glibc keeps of freed tensors.

An engine's memory is counted in its tensors, without a new one. Of glibc, this answers for the allocator's
settings alone: who allocates what is not its concern.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from pipeline.engine.interface import Engine
from pipeline.engine.state import RankState
from pipeline.files import MIB

_NESTING = 6  # lists of dicts of tensors, in optimizers and DeepSpeed's around them


class _Stateful(Protocol):
    """The parts of an engine behind its interface."""

    @property
    def module(self) -> nn.Module: ...

    def _state(self) -> RankState: ...


def count_tensor_bytes(engine: Engine, kind: str) -> dict[str, int]:
    """Return the bytes that an engine holds on `cuda` or `cpu`, by what they are.

    A storage that several tensors share counts once, as what it is found as first: parameters, gradients, the
    optimizer's, the engine's buffers.
    """
    seen: set[int] = set()

    def count(value: Any) -> int:
        return sum(_bytes(each, kind, seen) for each in _reached(value, _NESTING))

    own = cast(_Stateful, engine)
    state, parameters = own._state(), list(own.module.parameters())
    shares = [getattr(p, "ds_tensor", None) for p in parameters]
    around = getattr(getattr(engine, "_zero_optimizer", None), "__dict__", {})  # DeepSpeed's, of its own
    optimizers = {
        id(value): value
        for value in [*vars(engine).values(), *around.values()]
        if isinstance(value, torch.optim.Optimizer)
    }
    stepped = [(list(each.state.values()), each.param_groups) for each in optimizers.values()]
    return {
        "parameters": count([*parameters, *own.module.buffers(), *shares]),
        "gradients": count([p.grad for p in parameters]) + count(list(state.get_stored_gradients())),
        "optimizer": count(list(state.get_masters())) + count(stepped),
        "engine's buffers": count(list(around.values())),
    }


def _bytes(tensor: Tensor, kind: str, seen: set[int]) -> int:
    if tensor.device.type != kind or tensor.layout != torch.strided:
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def _reached(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in dicts, lists and tuples."""
    if torch.is_tensor(value):
        yield value
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _reached(each, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _reached(each, depth - 1)


# malloc.h's numbers for mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


@contextmanager
def unmap_freed_tensors() -> Iterator[None]:
    """Have a tensor of 1 MiB or more go back to the system as it is freed. Also a decorator.

    glibc maps large blocks one by one, but the size from which on it does so grows with each one that is
    freed, up to 32 MiB: smaller tensors then come from its heap, which hardly gives anything back. A ZeRO-3
    model, whose weights are drawn whole and cut one by one, left twice its memory there. Afterwards the
    thresholds stand where glibc's own growth ends: a step is slower where each tensor is mapped.

    Does nothing where there is no glibc on Linux, or where the environment says how malloc is to work. What
    another allocator is preloaded for is not glibc's to decide, and stays as it is.
    """
    mallopt = None if is_malloc_tuned(os.environ) else _of_glibc("mallopt")
    trim = _of_glibc("malloc_trim")
    if mallopt is None or trim is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, MIB)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, 32 * MIB)  # the most that glibc takes, and where its own stops to grow
        mallopt(M_TRIM_THRESHOLD, 64 * MIB)  # twice that, as it chooses itself
        trim(0)


def trim_heap() -> None:
    """Give freed memory that glibc's heap keeps back to the system. Does nothing without glibc."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def is_malloc_tuned(environment: Mapping[str, str]) -> bool:
    """Return whether the environment tunes glibc's malloc: MALLOC_*, or glibc.malloc.* in GLIBC_TUNABLES."""
    is_set = any(name.startswith("MALLOC_") for name in environment)
    return is_set or "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of this process's C library, or `None`: musl and others lack it."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
