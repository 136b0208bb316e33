"""A process killed, or refused by the system, at any of the calls that a save is made of.

Each trial is a fork with a profiler in every thread: before the n-th call into the operating system it kills
the process, or raises what the system would. Whatever is left, the newest checkpoint is whole.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import pytest
from plain_engine import PlainEngine
from support.checkpoints import verify
from test_store import make_store, state_at

from pipeline.checkpoint.catalog import find_newest_complete

pytestmark = pytest.mark.slow

# What changes a disk. Closing is not among them: after an error it is only tidying up.
CALLS = {"open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "posix_fadvise"}


class Fault:
    """Counts the calls of all threads; at the n-th something happens."""

    def __init__(self, at: int | None, error: int | None):
        self.at = at
        self.error = error
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self, frame, event, function):
        if event != "c_call" or function.__name__ not in CALLS:
            return
        if getattr(function, "__module__", None) not in ("posix", "io", "_io"):
            return
        with self._lock:
            self.calls += 1
            if self.calls != self.at:
                return
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.error, os.strerror(self.error))


def trial(folder: Path, at: int | None, wait: bool, error: int | None) -> tuple[int, int]:
    """Saves steps 2 and 3 in another process, with a fault. Its exit status, and the calls it made."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fault = Fault(at, error)
            store = make_store(folder, keep_last=1)
            threading.setprofile(fault)
            sys.setprofile(fault)
            for step in (2, 3):
                store.save(PlainEngine(0, 1, seed=step), state_at(step), wait)
            store.close()
            sys.setprofile(None)
            os.write(writer, fault.calls.to_bytes(8, "little"))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    calls = int.from_bytes(os.read(reader, 8), "little")
    os.close(reader)
    return status, calls


def check_newest(folder: Path) -> int:
    """The newest checkpoint is whole, by every byte and by what an engine makes of it."""
    found, _ = find_newest_complete(folder)
    assert found is not None
    assert verify(found.folder) == []
    step = int(found.folder.name.removeprefix("step-"))
    engine = PlainEngine(0, 1)
    assert make_store(folder).resume(engine)["global_step"] == step
    assert engine.is_model_of(step)
    return step


def fresh(folder: Path, steps: list[int]) -> Path:
    """A run directory with these steps saved."""
    folder.mkdir()
    for step in steps:
        make_store(folder).save(PlainEngine(0, 1, seed=step), state_at(step), wait=True)
    return folder


def trials():
    """Each day at every seventh call, each night at every call."""
    yield pytest.param(False, None, 7, [1], id="kill-some")
    yield pytest.param(True, errno.ENOSPC, 7, [1], id="no-space-some")
    every_call = pytest.mark.nightly
    yield pytest.param(False, None, 1, [1], id="kill-background", marks=every_call)
    yield pytest.param(True, errno.ENOSPC, 1, [1], id="no-space-waiting", marks=every_call)
    # Step 2 is there already: the run went on from step 1, and repeats it.
    yield pytest.param(True, errno.EIO, 1, [1, 2], id="io-error-repeated", marks=every_call)


@pytest.mark.parametrize(("wait", "error", "every", "there"), trials())
def test_after_any_fault_the_newest_checkpoint_is_whole(tmp_path, wait, error, every, there):
    status, calls = trial(fresh(tmp_path / "none", there), None, wait, error)
    assert status == 0
    assert check_newest(tmp_path / "none") == 3
    assert calls > 30
    newest = []
    for at in range(1, calls + 1, every):
        folder = fresh(tmp_path / str(at), there)
        status, _ = trial(folder, at, wait, error)
        assert status == (signal.SIGKILL if error is None else 0)
        newest.append(check_newest(folder))
        # The next save works, and clears away what was left.
        store = make_store(folder, keep_last=1)
        assert store.save(PlainEngine(0, 1, seed=4), state_at(4), wait=True).problem is None
        assert os.listdir(folder) == ["step-00000004"]
    assert set(newest) == ({1, 2, 3} if error is None else {2, 3})
