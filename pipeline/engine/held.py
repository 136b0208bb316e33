"""What of a device's memory an engine holds, by what it is: counted in its tensors, without a new one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from pipeline.engine.interface import Engine
from pipeline.engine.state import State
from pipeline.planning.account import EngineStates

_NESTING = 6  # lists of dicts of tensors, in optimizers and DeepSpeed's around them


class _Stateful(Protocol):
    """What all engines have behind their interface."""

    @property
    def module(self) -> nn.Module: ...

    def _state(self) -> State: ...


def states(engine: Engine, kind: str) -> EngineStates:
    """Return the bytes that an engine holds on `cuda` or `cpu`.

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
    return EngineStates(
        parameters=count([*parameters, *own.module.buffers(), *shares]),
        gradients=count([p.grad for p in parameters]) + count(list(state.kept_gradients())),
        optimizer=count(list(state.masters())) + count(stepped),
        buffers=count(list(around.values())),
    )


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
