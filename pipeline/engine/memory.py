"""Bytes of an engine's tensors by category, and settings of glibc's allocator."""

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

_MAX_NESTING = 6  # depth of lists and dicts with tensors in torch's and DeepSpeed's optimizers


class _EngineInternals(Protocol):
    """Members of every engine that are read here; `_build_state` is not part of the Engine interface."""

    @property
    def module(self) -> nn.Module: ...

    def _build_state(self) -> RankState: ...


def count_tensor_bytes(engine: Engine, device_type: str) -> dict[str, int]:
    """Return the bytes of an engine's tensors on this rank, by category.

    Each storage counts once, in the first category that refers to it: parameters, gradients, optimizer,
    engine's buffers. Counting allocates no tensor.

    Args:
        engine: Engine whose tensors are counted.
        device_type: Type of the devices whose memory is counted, `cuda` or `cpu`.
    """
    counted: set[int] = set()  # addresses of storages

    def count(value: Any) -> int:
        return sum(_count_bytes(each, device_type, counted) for each in _find_tensors(value, _MAX_NESTING))

    internals = cast(_EngineInternals, engine)
    state = internals._build_state()
    parameters = list(internals.module.parameters())
    zero3_shards = [getattr(p, "ds_tensor", None) for p in parameters]
    # Attributes of DeepSpeed's optimizer, among them its buffers.
    zero_attributes = getattr(getattr(engine, "_zero_optimizer", None), "__dict__", {})
    optimizers = {
        id(value): value
        for value in [*vars(engine).values(), *zero_attributes.values()]
        if isinstance(value, torch.optim.Optimizer)
    }
    optimizer_states = [(list(each.state.values()), each.param_groups) for each in optimizers.values()]
    return {
        "parameters": count([*parameters, *internals.module.buffers(), *zero3_shards]),
        "gradients": count([p.grad for p in parameters]) + count(list(state.get_stored_gradients())),
        "optimizer": count(list(state.get_masters())) + count(optimizer_states),
        "engine's buffers": count(list(zero_attributes.values())),
    }


def _count_bytes(tensor: Tensor, device_type: str, counted: set[int]) -> int:
    """Return the bytes of the tensor's storage, or 0 if it is in `counted` or on another type of device.

    Adds the storage to `counted`.
    """
    if tensor.device.type != device_type or tensor.layout != torch.strided:
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in counted:
        return 0
    counted.add(storage.data_ptr())
    return storage.nbytes()


def _find_tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists, tuples and sets, down to `depth` levels."""
    if torch.is_tensor(value):
        yield value
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _find_tensors(each, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _find_tensors(each, depth - 1)


# Numbers of mallopt's parameters in malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


@contextmanager
def unmap_freed_tensors() -> Iterator[None]:
    """Have glibc return freed tensors of 1 MiB or more to the system immediately.

    Use it as a context manager or a decorator. glibc maps each large block by itself, and unmaps it when it
    is freed. But glibc raises the size limit for that with each freed block, up to 32 MiB. Smaller tensors
    then come from the heap, which hardly returns any memory. A ZeRO-3 model, whose weights are drawn whole
    and cut one by one, left twice its size in the heap.

    When the context ends, the limits are set to the values at which glibc's growth ends, since steps are
    slower if each tensor is mapped. A `malloc_trim` after the first step instead of this context saves
    nothing.

    Does nothing without glibc on Linux, or if the environment tunes malloc. A preloaded allocator other than
    glibc's is not affected.
    """
    mallopt = None if is_malloc_tuned(os.environ) else _find_libc_function("mallopt")
    trim = _find_libc_function("malloc_trim")
    if mallopt is None or trim is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, MIB)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, 32 * MIB)  # the largest value that glibc accepts, where its growth ends
        mallopt(M_TRIM_THRESHOLD, 64 * MIB)  # glibc itself chooses twice the other limit
        trim(0)


def trim_heap() -> None:
    """Have glibc return freed memory of its heap to the system. Does nothing without glibc."""
    trim = _find_libc_function("malloc_trim")
    if trim is not None:
        trim(0)


def is_malloc_tuned(environment: Mapping[str, str]) -> bool:
    """Return whether these environment variables tune glibc's malloc.

    They are MALLOC_*, and glibc.malloc.* in GLIBC_TUNABLES.
    """
    has_variable = any(name.startswith("MALLOC_") for name in environment)
    return has_variable or "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")


def _find_libc_function(name: str) -> Callable[..., int] | None:
    """Return a function of this process's C library, or `None` if the library does not have it (musl)."""
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function
