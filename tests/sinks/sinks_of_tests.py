"""Sinks as a user would write them; named by import path."""

from __future__ import annotations

import sys
from typing import Any, ClassVar


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


class Half:
    """Lacks the rest."""

    def __init__(self, run_dir, start_step, run_config):
        pass

    def write(self, step, row):
        pass


def make_nothing(run_dir, start_step, run_config):
    return None
