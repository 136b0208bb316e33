"""glibc's thresholds while an engine is made and after it, each time in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Prints whether glibc maps a block of 2 MiB by itself: within, and afterwards. One of 8 MiB is freed before,
# after which glibc left alone takes 2 MiB from its heap.
PROGRAM = """
import ctypes
from pipeline.engine.memory import unmap_freed_tensors

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks a b c d e f".split()]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallinfo2.restype = Counts

def is_mapped():
    before = libc.mallinfo2().hblks
    block = libc.malloc(2 << 20)
    mapped = libc.mallinfo2().hblks - before
    libc.free(block)
    return bool(mapped)

libc.free(libc.malloc(8 << 20))
with unmap_freed_tensors():
    print(is_mapped())
print(is_mapped())
"""
HEAP = ["False", "False"]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="glibc's own")
@pytest.mark.parametrize(
    ("environment", "mapped"),
    [
        pytest.param({}, ["True", "False"], id="ours"),
        pytest.param({"GLIBC_TUNABLES": "glibc.pthread.rseq=1"}, ["True", "False"], id="another tunable"),
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, HEAP, id="the user's tunable"),
        pytest.param({"MALLOC_ARENA_MAX": "2"}, HEAP, id="the user's variable"),
    ],
)
def test_blocks_are_mapped_within_alone_and_never_against_the_user(environment, mapped):
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_", "LD_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == mapped
