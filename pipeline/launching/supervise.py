"""Runs a launcher with a guard on every node: signals reach the ranks, a lost node ends all, nothing stays.

The exit code is what the ranks say of their end, not what the launcher makes of it: deepspeed ends with 0
where a part of it was killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pipeline.distributed.signals import STOP_SIGNALS, detach_closed_terminal
from pipeline.errors import LaunchError
from pipeline.launching.exit_codes import exit_code, ranks_without_exit_code

BEAT = 5.0  # seconds between two words to a guard
READY = 60.0  # seconds a guard has to answer
STRAGGLING = 15.0  # seconds the other nodes have once one has ended with a failure
SAVING = 60.0  # seconds ranks have to save once their launcher is gone
LEAVING = 5.0  # the same where a node failed or is lost: nothing can be saved together
SIGNALS = (signal.SIGINT, *STOP_SIGNALS)


@dataclass(frozen=True)
class Post:
    """A node of the run, and the command that starts the guard on it."""

    name: str
    command: Sequence[str]


@dataclass
class _Watch:
    """What is known of a node."""

    name: str
    process: asyncio.subprocess.Process
    words: dict[str, dict[str, int]] = field(default_factory=dict)
    is_gone: bool = False
    """Its part of the run is over."""
    is_lost: bool = False
    has_ended: bool = False
    killed: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether it is lost, or its ranks are gone and did not all tell of a good end."""
        well = bool(self.words) and all(word["code"] == 0 for word in self.words.values())
        return self.is_lost or (self.is_gone and not well)

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def hear(self) -> dict[str, Any] | None:
        """The guard's next word; None: it is gone. What a login shell prints is passed over."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            with suppress(ValueError, TypeError, KeyError):
                message: dict[str, Any] = json.loads(line)["guard"]
                return message
        return None

    async def last_error(self) -> str:
        assert self.process.stderr is not None
        text = (await self.process.stderr.read()).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "the connection was closed"


class Supervisor:
    """One run: its guards, its launcher, and how it ends."""

    def __init__(self, posts: Sequence[Post], document: Mapping[str, Any], places: Mapping[int, str]):
        """
        Args:
            document: What each guard is handed: folder, environment, arguments.
            places: The node of each rank; empty where only the launcher knows how many there will be.
        """
        self._posts = posts
        self._document = document
        self._places = places
        self._watches: list[_Watch] = []
        self._child: asyncio.subprocess.Process | None = None
        self._signals: list[int] = []
        self._changed = asyncio.Event()

    async def run(
        self, start: Callable[[Mapping[str, Any]], Sequence[str]], environment: Mapping[str, str]
    ) -> int:
        """Starts guards, then the launcher; waits for all to end, and returns the exit code.

        Args:
            start: The launcher's command, given what the first node says of itself (`address`, `port`).
            environment: The launcher's.

        Raises:
            LaunchError: a node does not answer.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._pass_on, number)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # unheard, it would be taken for dead
        tasks: list[asyncio.Task[None]] = []
        try:
            self._watches = [_Watch(post.name, await _spawn(post.command)) for post in self._posts]
            first = (await self._greet())[0]
            tasks = [asyncio.create_task(self._listen(watch)) for watch in self._watches]
            tasks.append(asyncio.create_task(self._beat()))
            if not self._signals:
                # A session of its own: Ctrl-C goes to the ranks, not to the launcher, which would kill them.
                self._child = await asyncio.create_subprocess_exec(
                    *start(first), env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
                )
                await self._wait_for_launcher(self._child)
            await self._dismiss(LEAVING if any(watch.has_failed for watch in self._watches) else SAVING)
            return self._conclude()
        finally:
            for task in tasks:
                task.cancel()
            self._end_launcher()
            await asyncio.gather(*(_leave(watch.process) for watch in self._watches))

    async def _greet(self) -> list[dict[str, Any]]:
        async def one(watch: _Watch) -> dict[str, Any]:
            watch.tell(self._document)
            answer = await watch.hear()
            if answer is not None and "ready" in answer:
                ready: dict[str, Any] = answer["ready"]
                return ready
            raise LaunchError(
                f"{watch.name}: {await watch.last_error() if answer is None else answer.get('problem')}"
            )

        waiting = [asyncio.wait_for(one(watch), READY) for watch in self._watches]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        greetings, problems = [], []
        for watch, answer in zip(self._watches, answers, strict=True):
            if isinstance(answer, dict):
                greetings.append(answer)
            elif isinstance(answer, TimeoutError | asyncio.TimeoutError):
                problems.append(f"{watch.name}: no answer within {READY:.0f} s")
            elif isinstance(answer, LaunchError | OSError):
                problems.append(str(answer))
            else:
                raise answer
        if problems:
            raise LaunchError(
                f"the run was not started: {'; '.join(problems)} "
                "(see `python -m pipeline doctor --hostfile HOSTFILE`)"
            )
        return greetings

    async def _listen(self, watch: _Watch) -> None:
        while (message := await watch.hear()) is not None:
            if "gone" in message:
                watch.is_gone, watch.words = True, message["gone"]
            if "ended" in message:
                watch.has_ended, watch.words, watch.killed = True, message["ended"], message["killed"]
            self._changed.set()
        if not watch.has_ended:
            watch.is_lost = True
            _say(f"{watch.name} is lost: {await watch.last_error()}")
        self._changed.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self._tell_all({})

    async def _wait_for_launcher(self, child: asyncio.subprocess.Process) -> None:
        """Returns when the launcher has ended, or what it started can no longer end well."""
        waiter = asyncio.ensure_future(child.wait())
        deadline: float | None = None
        clock = asyncio.get_running_loop().time
        while not waiter.done():
            change = asyncio.ensure_future(self._changed.wait())
            left = None if deadline is None else max(0.0, deadline - clock())
            await asyncio.wait({waiter, change}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            self._changed.clear()
            if self._any_lost() or len(self._signals) > 2:
                break
            if deadline is None and any(watch.has_failed for watch in self._watches):
                deadline = clock() + STRAGGLING
            if deadline is not None and clock() >= deadline:
                late = [watch.name for watch in self._watches if not watch.is_gone]
                if late:
                    _say(f"ended: {', '.join(late)} went on {STRAGGLING:.0f} s after another node had failed")
                break
        waiter.cancel()

    async def _dismiss(self, seconds: float) -> None:
        """Has every node end what is left of the run, and tell how its ranks ended."""
        if len(self._signals) > 2:
            seconds = 0.0
        self._tell_all({"end": seconds})
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds + 15
        while not all(watch.has_ended or watch.is_lost for watch in self._watches) and clock() < deadline:
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - clock()))
            self._changed.clear()
        if self._child is not None and self._child.returncode is None:
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._child.wait(), 5)

    def _conclude(self) -> int:
        """The exit code; names the ranks that did not tell of their end, and what had to be killed."""
        words = {int(rank): word for watch in self._watches for rank, word in watch.words.items()}
        silent = ranks_without_exit_code(words, self._places)
        for watch in self._watches:
            if watch.killed:
                _say(f"{watch.name}: {watch.killed} processes of the run were left, and killed")
        if self._child is None:
            return 128 + self._signals[0]
        launcher = self._child.returncode
        if silent and (words or launcher == 0):
            places = {rank: f" on {name}" for rank, name in self._places.items()}
            named = ", ".join(f"{rank}{places.get(rank, '')}" for rank in silent)
            _say(f"ended without a word, as if killed: rank {named}")
        code = exit_code(words, self._places, launcher or 0)
        return 1 if code == 0 and self._any_lost() else code

    def _end_launcher(self) -> None:
        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _pass_on(self, number: int) -> None:
        detach_closed_terminal()
        if number == signal.SIGHUP in self._signals:
            return  # the kernel and the shell both send it: nobody asks twice
        self._signals.append(number)
        self._tell_all({"signal": number})
        if self._child is None or len(self._signals) > 2:
            self._changed.set()

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for watch in self._watches:
            watch.tell(message)

    def _any_lost(self) -> bool:
        return any(watch.is_lost for watch in self._watches)


async def _spawn(command: Sequence[str]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    # A session of its own: Ctrl-C must not end the connection.
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )


async def _leave(process: asyncio.subprocess.Process) -> None:
    """Closes the connection, and lets the guard take its folder away."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 5)
    except TimeoutError:
        process.kill()
        await process.wait()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
