"""Measures the memory of this process: bytes of live tensors, and anonymous memory by the kernel's count."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import torch


def reachable_tensor_bytes() -> int:
    """Return the bytes of all tensor storages that Python can reach, gradients included, each storage once.

    To measure a difference, call `gc.collect()` before the first of the two calls.
    """
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        with_gradient = (candidate, candidate.grad) if candidate.is_leaf else (candidate,)
        for tensor in with_gradient:
            if tensor is not None and tensor.layout == torch.strided and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                with suppress(RuntimeError):  # a compiler keeps fake tensors, which have no memory
                    storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def anonymous_bytes() -> int:
    """Return the resident bytes of this process that belong to no file.

    The allocator first returns freed memory to the kernel, so that it does not count.
    """
    ctypes.CDLL(None).malloc_trim(0)
    return _read_status_bytes("RssAnon:")


@contextmanager
def track_peak_anonymous_bytes() -> Iterator[list[int]]:
    """Yield a list of one number, the peak of anonymous bytes inside of the block.

    A thread samples it every millisecond, so a shorter peak may be missed.
    """
    peak = [anonymous_bytes()]
    done = Event()

    def sample() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _read_status_bytes("RssAnon:"))

    thread = Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _read_status_bytes(name: str) -> int:
    """Return a size in bytes from /proc/self/status, which has it in KiB."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) * 1024
