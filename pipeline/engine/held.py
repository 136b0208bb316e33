"""What of a device's memory an engine holds, by what it is: counted in its tensors, without a new one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.interface import Engine
from pipeline.planning.account import EngineStates

_NESTING = 4  # lists of lists of tensors, in DeepSpeed's optimizers


def states(engine: Engine, kind: str) -> EngineStates:
    """Of tensors on `cuda` or `cpu`. A storage that several share counts once, as what it is found as first:
    parameters, gradients, the optimizer's, the engine's buffers.
    """
    seen: set[int] = set()

    def count(tensors: Iterator[Tensor | None]) -> int:
        return sum(_bytes(each, kind, seen) for each in tensors if each is not None)

    parameters = list(engine.module.parameters())
    found = [*parameters, *engine.module.buffers(), *(getattr(p, "ds_tensor", None) for p in parameters)]
    weights = count(iter(found))
    gradients = count(p.grad for p in parameters)
    optimizers = [value for value in vars(engine).values() if isinstance(value, torch.optim.Optimizer)]
    kept = count(_reached([(each.state, each.param_groups) for each in optimizers], 6))
    buffers = 0
    for name, value in getattr(getattr(engine, "_zero_optimizer", None), "__dict__", {}).items():
        if isinstance(value, torch.optim.Optimizer):
            kept += count(_reached((value.state, value.param_groups), 6))
            continue
        num_bytes = count(_reached(value, _NESTING))
        if "grad" in name:
            gradients += num_bytes
        elif "fp32" in name and "bucket" not in name and "buffer" not in name:
            kept += num_bytes
        else:
            buffers += num_bytes
    return EngineStates(weights, gradients, kept, buffers)


def _bytes(tensor: Tensor, kind: str, seen: set[int]) -> int:
    if tensor.device.type != kind or tensor.layout != torch.strided:
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def _reached(value: Any, depth: int) -> Iterator[Tensor]:
    """Tensors in dicts, lists and tuples."""
    if torch.is_tensor(value):
        yield value
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _reached(each, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _reached(each, depth - 1)
