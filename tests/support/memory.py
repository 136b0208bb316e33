"""What a rank really holds: the bytes of every tensor alive in this process, each storage once."""

from __future__ import annotations

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

IMAGINED = (FakeTensor, FunctionalTensor)  # what a compiler keeps: shapes without storage


def held_bytes() -> int:
    """Bytes of all distinct tensor storages that Python can reach, gradients included.

    For a difference: `gc.collect()` before the first of the two.
    """
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or issubclass(type(thing), IMAGINED):
            continue
        with_gradient = (thing, thing.grad) if thing.is_leaf else (thing,)
        for tensor in with_gradient:
            if tensor is not None and tensor.layout == torch.strided and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())
