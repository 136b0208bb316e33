"""A conversation with the probe on one host: through ssh, with a process here, or over a connection."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from pipeline.launching.node_agent import pack, unpack

PROBE = "pipeline.doctor.probe"


class SilentError(Exception):
    """A host does not answer.

    Args:
        code: Exit code of what should lead there; None: it runs, or there was no process.
        said: Its last words.
    """

    def __init__(self, code: int | None, said: str):
        super().__init__(said)
        self.code, self.said = code, said


class Session:
    """Questions and answers, one at a time. A context manager: the probe ends with it."""

    def __init__(self, name: str, answers: BinaryIO, questions: BinaryIO, end: Callable[[], SilentError]):
        self.name = name
        self._questions, self._end = questions, end
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._number = 0
        self._noise: list[str] = []
        threading.Thread(target=self._read, args=(answers,), daemon=True).start()

    def _read(self, answers: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            for line in answers:
                if (message := unpack(line)) is not None:
                    self._lines.put(message)
                else:  # a log-in script that prints
                    self._noise = [*self._noise[-5:], line.decode(errors="replace").strip()]
        self._lines.put(None)

    def ask(self, method: str, value: Any = None, *, seconds: float) -> Any:
        """The probe's answer.

        Raises:
            SilentError: none within the time, or the probe ended.
        """
        self._number += 1
        question = {"ask": method, "with": value, "number": self._number}
        with contextlib.suppress(OSError, ValueError):  # it ended: said below
            self._questions.write(pack(question))
            self._questions.flush()
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SilentError(None, f"no answer within {seconds:g} s") from None
            if line is None:
                raise self._end()
            if line["number"] == self._number:  # an earlier one came too late
                return line["answer"]

    def clock_offset(self) -> float:
        """Seconds that the other machine's clock is ahead; the least that the way there and back allows."""
        best: tuple[float, float] | None = None
        for _ in range(3):
            sent = time.time()
            there = float(self.ask("time", seconds=5))
            back = time.time()
            if best is None or back - sent < best[0]:
                best = back - sent, there - (sent + back) / 2
        assert best is not None
        way, offset = best
        return max(0.0, abs(offset) - way / 2) * (1 if offset > 0 else -1)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._questions.close()
        self._end()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def over_command(name: str, command: Sequence[str]) -> Session:
    """A session with the probe that a command starts."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []

    def listen(stream: BinaryIO) -> None:
        for line in stream:
            said[:] = [*said[-50:], line.decode(errors="replace").strip()]

    listener = threading.Thread(target=listen, args=(process.stderr,), daemon=True)
    listener.start()

    def end() -> SilentError:
        try:
            code = process.wait(2)
        except subprocess.TimeoutExpired:  # it hangs, or what leads to it does
            process.kill()
            code = process.wait()
        listener.join(1)
        return SilentError(code, "\n".join(said))

    return Session(name, process.stdout, process.stdin, end)  # type: ignore[arg-type]


def over_socket(name: str, connection: socket.socket) -> Session:
    """A session with a probe that came to us."""

    def end() -> SilentError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        return SilentError(None, "the connection ended")

    return Session(name, connection.makefile("rb"), connection.makefile("wb"), end)
