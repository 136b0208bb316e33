"""What a rank really holds: the bytes of every tensor alive in this process, each storage once."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import torch


def reachable_tensor_bytes() -> int:
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


def anonymous_bytes() -> int:
    """Of this process: what is resident and no file's, without what was freed and is kept for the next."""
    ctypes.CDLL(None).malloc_trim(0)
    return _read_status_bytes("RssAnon:")


@contextmanager
def track_peak_anonymous_bytes() -> Iterator[list[int]]:
    """[the most anonymous memory inside of it]: looked at a thousand times a second, so a lower bound."""
    most, done = [anonymous_bytes()], Event()

    def look() -> None:
        while not done.wait(0.001):
            most[0] = max(most[0], _read_status_bytes("RssAnon:"))

    thread = Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def _read_status_bytes(wanted: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(wanted))
    return int(line.split()[1]) * 1024
