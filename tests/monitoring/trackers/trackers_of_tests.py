"""Trackers as a user would write them; named by import path."""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any, ClassVar

from pipeline.monitoring.trackers import interface as dispensable


class Recorded:
    """Keeps what it is given."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, run_dir, start_step, run_config, server):
        self.calls.append(("made", run_dir, start_step, run_config, server))

    def write(self, step, row):
        self.calls.append(("write", step, dict(row)))

    def tell(self, step, event):
        self.calls.append(("tell", step, event))

    def close(self, exit_code):
        self.calls.append(("close", exit_code))


class Failing:
    """Raises in one of its methods."""

    def __init__(self, run_dir, start_step, run_config, at):
        self.at = at
        self._do("open")

    def _do(self, what):
        if self.at == "exit" and what == "write":
            sys.exit(3)
        if self.at == what:
            raise ConnectionError("no answer")

    def write(self, step, row):
        self._do("write")

    def tell(self, step, event):
        self._do("tell")

    def close(self, exit_code):
        self._do("close")


class Blocked(Failing):
    """Never comes back from one of its methods, nor from its exit handler."""

    def __init__(self, run_dir, start_step, run_config, at, close_seconds=None):
        self.at = at
        if close_seconds is not None:  # of a process of its own
            dispensable.CLOSE_SECONDS = dispensable.EXIT_SECONDS = close_seconds
            atexit.register(threading.Event().wait)

    def _do(self, what):
        if self.at == what:
            threading.Event().wait()


class ReadsTheRecord(Blocked):
    """Waits in its first `write` until the record says where the run's time went."""

    seen: ClassVar[list[str]] = []

    def __init__(self, run_dir, start_step, run_config):
        super().__init__(run_dir, start_step, run_config, at="")
        self.record = run_dir / "metrics.jsonl"
        self.patience = 3000  # tenths of a second: a run of three steps on a busy machine

    def write(self, step, row):
        while '"event": "time"' not in self.record.read_text() and self.patience > 0:
            self.patience -= 1
            threading.Event().wait(0.1)
        self.seen.append("summed up" if self.patience else "gave up")

    def close(self, exit_code):
        self.seen.append("closed")


class Half:
    """Lacks the rest."""

    def __init__(self, run_dir, start_step, run_config):
        pass

    def write(self, step, row):
        pass


def make_nothing(run_dir, start_step, run_config):
    return None
