"""Sends questions to a node that the doctor examines, and answers them there, one after another."""

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

ANSWER_LIMIT = 300.0
"""Seconds that a node has for an answer. ssh itself gives up a machine that is gone within 20."""
Result = TypeVar("Result")
Tell = Callable[[str], None]
Method = Callable[[Any, Tell], Any]
"""Answers a question with a value; it is also given a function that says which step it is at."""


class SilentError(Exception):
    """A node did not answer.

    Args:
        code: Exit code of the process that leads to it; None if that process still runs.
        said: Last words of that process.
    """

    def __init__(self, code: int | None, said: str):
        super().__init__(said)
        self.code = code
        self.said = said


async def ask(node: NodeProcess, method: str, value: Any = None, seconds: float = ANSWER_LIMIT) -> Any:
    """Return a node's answer. One that was silent once is not to be asked again.

    Raises:
        SilentError: There was no answer within the time, or the process ended.
    """
    node.send({"ask": method, "with": value})
    try:
        async with asyncio.timeout(seconds):
            message = await node.receive()
    except TimeoutError:
        raise SilentError(None, f"no answer within {seconds:g} s, still at: {node.step}") from None
    if message is None:
        code = await node.close()
        raise SilentError(code, await node.last_words())
    return message["answer"]


async def ask_all(
    nodes: Iterable[NodeProcess], question: Callable[[NodeProcess], Awaitable[Result]]
) -> tuple[dict[str, Result], dict[str, SilentError]]:
    """Ask all nodes at the same time, and say on the console which of them are waited for.

    Returns:
        The answers, and why there is none, both by node and in the order of the nodes.
    """

    async def attempt(node: NodeProcess) -> Result | SilentError:
        try:
            return await question(node)
        except SilentError as error:
            return error

    by_name = {node.name: node for node in nodes}
    tasks = {name: asyncio.create_task(attempt(node)) for name, node in by_name.items()}
    if tasks:
        await wait_and_report(tasks, lambda name: f"{name} ({by_name[name].step})")
    results = {name: task.result() for name, task in tasks.items()}
    answers = {name: each for name, each in results.items() if not isinstance(each, SilentError)}
    return answers, {name: each for name, each in results.items() if isinstance(each, SilentError)}


async def clock_offset(node: NodeProcess) -> float:
    """Return the seconds that a node's clock is ahead, as far as the way there and back proves it."""
    tries = []
    for _ in range(3):
        sent = time.time()
        there = float(await ask(node, "time"))
        back = time.time()
        tries.append((back - sent, there - (sent + back) / 2))
    way, offset = min(tries)
    return max(0.0, abs(offset) - way / 2) * (1 if offset > 0 else -1)


def own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return standard input and output, for messages alone: what a library prints goes to standard error.

    These are not sys.stdin's own buffers: Python aborts at its exit if a thread waits in those.
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
    """Answer questions until there are no more. Then the process ends, whatever it is doing.

    Args:
        questions: Stream of questions, one a line.
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
        with contextlib.suppress(OSError, ValueError):  # whoever asked is gone: `read` finds out
            answers.write(encode_message(message))
            answers.flush()

    threading.Thread(target=read, daemon=True).start()
    while True:
        question = decode_message(waiting.get())
        if question is not None:
            method = methods[question["ask"]]
            send({"answer": method(question["with"], lambda step: send({"step": step}))})
