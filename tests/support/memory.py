"""What a rank really holds: the bytes of every tensor alive in this process, each storage once."""

from __future__ import annotations

import gc
from contextlib import suppress

import torch


def held_bytes() -> int:
    """Bytes of all distinct tensor storages that Python can reach, gradients included.

    For a difference: `gc.collect()` before the first of the two.
    """
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        with_gradient = (thing, thing.grad) if thing.is_leaf else (thing,)
        for tensor in with_gradient:
            if tensor is not None and tensor.layout == torch.strided and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                with suppress(RuntimeError):  # what a compiler keeps: shapes without memory
                    storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def resident_bytes(peak: bool = False) -> int:
    """Of this process, now or at the most since `forget_peak`."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(wanted))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """The kernel's mark of the most resident memory starts again at what there is now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
