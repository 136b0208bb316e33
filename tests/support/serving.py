"""Starts `python -m pipeline serve` for a test, and ends it with the test."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.fork_server import ForkedProgram
from support.launch import make_environment


@dataclass
class RunningServer:
    """A server that answers."""

    url: str
    """Address up to `/v1`."""
    process: ForkedProgram
    log: Path
    """File with what the server wrote to stderr."""

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        os.kill(self.process.pid, number)
        return self.process.wait(timeout=120)


@contextmanager
def serving(folder: Path, source: Path, *arguments: str, **environment: str) -> Iterator[RunningServer]:
    """Serve a model at a port that the system chooses; the output goes to `folder`."""
    output = folder / "stdout"
    log = folder / "stderr"
    words = ["-m", "pipeline", "serve", str(source), "--port", "0", *arguments]
    process = ForkedProgram(words, make_environment(**environment), output, log)
    try:
        deadline = time.monotonic() + 300
        while not (found := re.search(r" on (http://\S+/v1)", output.read_text() if output.exists() else "")):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)
        yield RunningServer(found[1], process, log)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=60)
