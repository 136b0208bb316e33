"""Implements both ends of the conversation between the doctor and a node that it examines.

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
"""Function that answers a question. Its arguments are the value of the question and a StepReporter."""


class NoAnswerError(Exception):
    """A node did not answer.

    Args:
        code: Exit code of the local process that connects to the node; `None` if it still runs or if there
            is no such process.
        reason: Output of that process, or a sentence about the time limit.
    """

    def __init__(self, code: int | None, reason: str):
        super().__init__(reason)
        self.code = code
        self.reason = reason


async def ask(node: NodeProcess, method: str, value: Any = None, seconds: float = ANSWER_TIMEOUT) -> Any:
    """Ask a node, and return its answer. After a NoAnswerError, do not ask this node again.

    Args:
        node: Process to ask.
        method: Name of the question: a key of the methods that the node serves.
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

    Args:
        nodes: Processes to ask.
        question: Function that asks one node, such as a call of `ask`.

    Returns:
        Name of each node that answered -> its answer; name of each node that did not -> its error. Both have
        the order of `nodes`.
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


async def measure_clock_offset(node: NodeProcess) -> float:
    """Return the seconds by which a node's clock is certainly ahead; negative if it is behind.

    A measurement has an uncertainty of half its round trip, which is subtracted from the size of the offset.
    Of three measurements, the one with the shortest round trip counts.

    Raises:
        NoAnswerError: The node did not answer.
    """
    measurements = []
    for _ in range(3):
        sent = time.time()
        remote = float(await ask(node, "time"))
        received = time.time()
        measurements.append((received - sent, remote - (sent + received) / 2))
    round_trip, offset = min(measurements)
    certain = max(0.0, abs(offset) - round_trip / 2)
    return certain if offset > 0 else -certain


def reserve_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return standard input and output as streams for messages alone, and redirect prints to standard error.

    A library may print, and its lines must not mix with the messages. The streams are new, since Python
    aborts at its exit if a thread waits in the buffers of sys.stdin or sys.stdout.

    Returns:
        Stream of questions, and stream for answers.
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
    """Answer questions until their stream ends; then end the process, even in the middle of an answer.

    Args:
        questions: Stream of questions, one per line.
        answers: Stream for the answers.
        methods: Name of a question -> the function that answers it.
        at_end: Function that is called, on another thread, before the process ends.
    """
    unanswered: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in questions:
                unanswered.put(line)
        at_end()
        os._exit(0)

    def send(message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the doctor is gone, and `read` ends the process
            answers.write(encode_message(message))
            answers.flush()

    threading.Thread(target=read, daemon=True).start()
    while True:
        question = decode_message(unanswered.get())
        if question is None:
            continue
        method = methods[question["ask"]]
        answer = method(question["with"], lambda step: send({"step": step}))
        send({"answer": answer})
