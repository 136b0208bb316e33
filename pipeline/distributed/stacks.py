"""Where the threads of this process stand: in which collective, called from which line; written to a file.

Reads Python's frames and the flight recorder of torch's collectives; touches no device and no other rank.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple

from torch._C import _distributed_c10d

# Frames in these files are a collective's own; the functions around it that say nothing.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
_WRAPPERS = {"wrapper", "log_wrapper", "inner", "_fn", "<lambda>", "fn"}
# A line of Python that waits for the device, and with it for the collective that the device is in.
_WAITS = (".wait(", ".item(", "float(", "int(", "bool(", "synchronize(", ".tolist(", ".cpu(")
_HERE = os.path.dirname(__file__)
_STDLIB = sysconfig.get_paths()["stdlib"]


class ThreadPosition(NamedTuple):
    """What a thread is at."""

    collective: str | None
    """`all_reduce`, `barrier`, ...; None: it waits for no other rank."""
    place: str
    """The innermost line that is no library's."""


class InFlight(NamedTuple):
    """A collective that this rank has entered and not left: its name and its number in its group."""

    name: str
    number: int


def thread_position(frames: Sequence[FrameSummary], in_flight: Sequence[InFlight] = ()) -> ThreadPosition:
    """What a thread with this stack (innermost last) is at."""
    inner: list[FrameSummary] = []
    mine = None
    for frame in reversed(frames):
        if not _is_library(frame):
            mine = frame
            break
        inner.append(frame)
    place = _described(mine or (frames[-1] if frames else FrameSummary("?", 0, "?", line="")))
    for frame in reversed(inner):  # from the outside: all_gather_object, and not the all_gather in it
        if any(part in frame.filename for part in _COLLECTIVES) and frame.name not in _WRAPPERS:
            return ThreadPosition(frame.name, place)
    # Autograd, and whatever else waits outside Python, is seen by the flight recorder alone. What the
    # user's own line is busy with may have a collective under way beside it.
    if in_flight and (inner or (mine is not None and any(word in (mine.line or "") for word in _WAITS))):
        return ThreadPosition(in_flight[0].name, place)
    return ThreadPosition(None, place)


def _is_library(frame: FrameSummary) -> bool:
    """Not the user's; of this project what only hands on to a collective counts as one too."""
    return frame.filename.startswith((_STDLIB, _HERE, "<")) or "site-packages" in frame.filename


def _described(frame: FrameSummary) -> str:
    file = os.path.relpath(frame.filename) if frame.filename.startswith(os.getcwd()) else frame.filename
    return f"{file}:{frame.lineno or 0} in {frame.name}" + (f" ({frame.line})" if frame.line else "")


def main_frames() -> list[FrameSummary]:
    """The main thread's stack, innermost last. For other threads."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.extract_stack(frame) if frame is not None else []


def in_flight_now() -> list[InFlight]:
    """What training has entered and not left, by the flight recorder; the first one first.

    What a thread of ours does beside training (a checkpoint being written) is left out.
    """
    # Autograd's own threads show up as dummies where a hook of theirs was Python.
    beside = {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    }
    found = []
    for entry in _recorded(only_active=True).get("entries", []):
        if entry.get("retired") or entry.get("state") == "completed" or entry.get("thread_id") in beside:
            continue
        name = entry["profiling_name"].rpartition(":")[2]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        found.append(InFlight(name, int(number)))
    return found


def write_stacks(folder: Path, rank: int, headline: str) -> None:
    """`rank-00001.txt`: every thread's Python stack; beside it what the flight recorder holds, if anything.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank:05d}.txt").open("w") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {headline}\n\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
    recorded = _recorded(only_active=False)
    if recorded.get("entries"):
        (folder / f"rank-{rank:05d}.collectives.json").write_text(json.dumps(recorded))


def _recorded(only_active: bool) -> dict[str, Any]:
    """What both recorders hold, NCCL's first: it has one of its own, which CUDA builds alone can read."""
    merged: dict[str, Any] = {}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is None:
            continue
        with suppress(RuntimeError, ValueError):
            recorded = json.loads(dump(True, only_active))
            entries = [*merged.get("entries", []), *recorded.pop("entries", [])]
            merged = recorded | merged | {"entries": entries}
    return merged
