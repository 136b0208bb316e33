"""What glibc's heap keeps of tensors that were freed while a model and its engine are made.

Answers for the allocator's settings alone. Who allocates what, and memory on a device, are not its concern.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pipeline.files import MIB

# malloc.h's numbers for mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Within it a tensor of 1 MiB or more goes back to the system as it is freed. Also a decorator.

    glibc maps large blocks one by one, but the size from which on it does so grows with each one that is
    freed, up to 32 MiB: smaller tensors then come from its heap, which hardly gives anything back. A ZeRO-3
    model, whose weights are drawn whole and cut one by one, left twice its memory there. Afterwards the
    thresholds stand where glibc's own growth ends: a step is slower where each tensor is mapped.

    Does nothing where there is no glibc on Linux, or where the environment says how malloc is to work. What
    another allocator is preloaded for is not glibc's to decide, and stays as it is.
    """
    mallopt = None if chosen_by_user(os.environ) else _of_glibc("mallopt")
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


def give_back() -> None:
    """What glibc's heap keeps of freed tensors goes back to the system; nothing where there is no glibc."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def chosen_by_user(environment: Mapping[str, str]) -> bool:
    """Whether the environment tunes glibc's malloc: MALLOC_*, or glibc.malloc.* in GLIBC_TUNABLES."""
    is_set = any(name.startswith("MALLOC_") for name in environment)
    return is_set or "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library that this process runs with; None: musl and others have no such."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
