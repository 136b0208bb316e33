"""A conversation with a process of ours, both sides of it: the doctor's with the probe on each host (through
ssh, with a process here, or over a connection), and the probe's with the ranks of its all-reduce.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

from pipeline.distributed.launch.node_agent import pack, unpack

PROBE = "pipeline.distributed.doctor.probe"
PATIENCE = 2.0
"""Seconds that a process has to end by itself."""


class SilentError(Exception):
    """The other side does not answer.

    Args:
        code: Exit code of what should lead there; None: it runs, or there was no process.
        said: Its last words.
    """

    def __init__(self, code: int | None, said: str):
        super().__init__(said)
        self.code, self.said = code, said


class Session:
    """Questions and answers, one at a time. The process on the other side ends with it.

    Args:
        end: Waits so many seconds for that process, then kills it; says how it ended.
    """

    def __init__(
        self, name: str, answers: BinaryIO, questions: BinaryIO, end: Callable[[float], SilentError]
    ):
        self.name = name
        self.step = ""  # what the other side said last of where it is
        self._questions, self._end = questions, end
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._number = 0
        threading.Thread(target=self._read, args=(answers,), daemon=True).start()

    def _read(self, answers: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            for line in answers:
                if (message := unpack(line)) is None:
                    continue  # a log-in script that prints
                if "step" in message:
                    self.step = message["step"]
                else:
                    self._lines.put(message)
        self._lines.put(None)

    def ask(self, method: str, value: Any = None, *, seconds: float) -> Any:
        """The other side's answer.

        Raises:
            SilentError: none within the time, or the other side ended.
        """
        self._number += 1
        say(self._questions, {"ask": method, "with": value, "number": self._number})
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SilentError(None, f"no answer within {seconds:g} s") from None
            if line is None:
                raise self._end(PATIENCE)
            if line["number"] == self._number:  # an earlier one came too late
                return line["answer"]

    def clock_offset(self) -> float:
        """Seconds that the other machine's clock is ahead; the least that the way there and back allows."""
        tries = []
        for _ in range(3):
            sent = time.time()
            there = float(self.ask("time", seconds=5))
            back = time.time()
            tries.append((back - sent, there - (sent + back) / 2))
        way, offset = min(tries)
        return max(0.0, abs(offset) - way / 2) * (1 if offset > 0 else -1)

    def close(self, patience: float = PATIENCE) -> None:
        with contextlib.suppress(OSError):
            self._questions.close()
        self._end(patience)


def over_command(name: str, command: Sequence[str]) -> Session:
    """A session with the process that a command starts."""
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

    def end(patience: float) -> SilentError:
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:  # it hangs, or what leads to it does
            process.kill()
            code = process.wait()
        listener.join(1)
        return SilentError(code, "\n".join(said))

    return Session(name, process.stdout, process.stdin, end)  # type: ignore[arg-type]


def over_socket(name: str, connection: socket.socket) -> Session:
    """A session with a probe that came to us."""

    def end(_: float) -> SilentError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        return SilentError(None, "the connection ended")

    return Session(name, connection.makefile("rb"), connection.makefile("wb"), end)


def say(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    """Sends a message. Where the other side is gone nothing happens: the reader of its messages finds out."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(pack(message))
        stream.flush()


def own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output, for messages alone: what a library prints goes to standard error.

    Not sys.stdin's own buffer: Python aborts at its exit where a thread waits in that, and hides the error.
    """
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return questions, answers


def read_questions(stream: BinaryIO, close: Callable[[], None] | None = None) -> queue.Queue[bytes]:
    """The questions, as they come. When there are no more, the process ends, whatever it waits for."""
    waiting: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                waiting.put(line)
        if close is not None:
            close()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return waiting


def answer_all(
    waiting: queue.Queue[bytes], answers: BinaryIO, methods: Mapping[str, Callable[[Any], Any]]
) -> NoReturn:
    """Answers questions, {"ask": METHOD, "with": VALUE, "number": N}, one after another."""
    while True:
        question = unpack(waiting.get())
        if question is not None:
            answer = methods[question["ask"]](question["with"])
            say(answers, {"number": question["number"], "answer": answer})
