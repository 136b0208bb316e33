"""Both ends of the conversation with a node that the doctor examines.

The doctor sends questions with `ask`, and the process on the node answers them with `serve`, one after
another. Each message is a line of JSON (see pipeline.distributed.launch.ssh).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, BinaryIO, NoReturn, TypeVar

from pipeline.distributed.launch.ssh import NodeProcess, decode_message, encode_message, wait_and_report

ANSWER_TIMEOUT = 300.0
"""Seconds that a node has for an answer. If a machine disappears, ssh itself ends within 20 seconds."""
Result = TypeVar("Result")
StepReporter = Callable[[str], None]
"""Function that reports the step at which a process is."""
Method = Callable[[Any, StepReporter], Any]
"""Function that answers a question. Its arguments: the question's value, and the function for its steps."""


class NoAnswerError(Exception):
    """A node did not answer.

    Args:
        code: Exit code of the local process that connects to the node; `None` if that process still runs.
        reason: Last output of that process, or the reason why it is not waited for any longer.
    """

    def __init__(self, code: int | None, reason: str):
        super().__init__(reason)
        self.code = code
        self.reason = reason


async def ask(node: NodeProcess, method: str, value: Any = None, seconds: float = ANSWER_TIMEOUT) -> Any:
    """Ask a node, and return its answer. After a NoAnswerError, do not ask this node again.

    Args:
        node: Process to ask.
        method: Name of the question.
        value: Argument of the question, as JSON can express it.
        seconds: Time limit for the answer.

    Raises:
        NoAnswerError: There was no answer within the time limit, or the process ended.
    """
    node.send({"ask": method, "with": value})
    try:
        async with asyncio.timeout(seconds):
            message = await node.receive()
    except TimeoutError:
        raise NoAnswerError(None, f"no answer within {seconds:g} s, still at: {node.step}") from None
    if message is None:
        code = await node.close()
        raise NoAnswerError(code, await node.read_stderr())
    return message["answer"]


async def ask_all(
    nodes: Iterable[NodeProcess], question: Callable[[NodeProcess], Awaitable[Result]]
) -> tuple[dict[str, Result], dict[str, NoAnswerError]]:
    """Ask all nodes at the same time. The console names the nodes that are slow to answer.

    Returns:
        Answers by node, and errors by node for those that did not answer. Both have the order of `nodes`.
    """

    async def attempt(node: NodeProcess) -> Result | NoAnswerError:
        try:
            return await question(node)
        except NoAnswerError as error:
            return error

    by_name = {node.name: node for node in nodes}
    tasks = {name: asyncio.create_task(attempt(node)) for name, node in by_name.items()}
    if tasks:
        await wait_and_report(tasks, lambda name: f"{name} ({by_name[name].step})")
    results = {name: task.result() for name, task in tasks.items()}
    answers = {name: result for name, result in results.items() if not isinstance(result, NoAnswerError)}
    errors = {name: result for name, result in results.items() if isinstance(result, NoAnswerError)}
    return answers, errors


async def clock_offset(node: NodeProcess) -> float:
    """Return the seconds by which a node's clock is ahead; negative if it is behind.

    The offset is known up to half the round trip, and this uncertainty is subtracted: the result is the
    offset that is certain. Of three measurements, the one with the shortest round trip counts.
    """
    measurements = []
    for _ in range(3):
        sent = time.time()
        remote = float(await ask(node, "time"))
        received = time.time()
        measurements.append((received - sent, remote - (sent + received) / 2))
    round_trip, offset = min(measurements)
    return max(0.0, abs(offset) - round_trip / 2) * (1 if offset > 0 else -1)


def own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return standard input and output for messages alone; later prints go to standard error.

    A library may print, and its lines must not mix with the messages. The streams are not the buffers of
    sys.stdin and sys.stdout: Python aborts at its exit if a thread waits in those.
    """
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return questions, answers


def serve(
    questions: BinaryIO,
    answers: BinaryIO,
    methods: Mapping[str, Method],
    at_end: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Answer questions until their stream ends. Then the process ends, even in the middle of an answer.

    Args:
        questions: Stream of questions, one per line.
        answers: Stream for the answers.
        methods: Name of a question -> the function that answers it.
        at_end: Called before the process ends.
    """
    waiting: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in questions:
                waiting.put(line)
        at_end()
        os._exit(0)

    def send(message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the doctor is gone, and `read` ends the process
            answers.write(encode_message(message))
            answers.flush()

    threading.Thread(target=read, daemon=True).start()
    while True:
        question = decode_message(waiting.get())
        if question is not None:
            method = methods[question["ask"]]
            send({"answer": method(question["with"], lambda step: send({"step": step}))})
