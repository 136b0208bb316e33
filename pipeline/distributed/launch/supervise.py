"""Runs a launcher with a guard on every node: signals reach the ranks, a lost node ends all, nothing stays.

The exit code is what the ranks say of their end, not what the launcher makes of it: deepspeed ends with 0
where a part of it was killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from pipeline.config.command_lines import own_command
from pipeline.distributed.diagnosis import ADVICE, NEARLY_FULL
from pipeline.distributed.launch.ssh import pack, unpack
from pipeline.distributed.machine import killed_for_memory, kills, memory_now
from pipeline.distributed.signals import STOP_SIGNALS, detach_closed_terminal
from pipeline.errors import DeviceFailedError, DeviceMemoryError, LaunchError
from pipeline.files import format_bytes

SEARCH = 10  # looks between two searches for new ranks, which read all of /proc


class RanksMemory:
    """From the start of a run to its end.

    Args:
        find: Looks for the ranks that are there.
    """

    def __init__(self, find: Callable[[], Sequence[psutil.Process]]):
        self._find = find
        self._kills, self._since = kills(), time.monotonic()
        self._ranks: list[psutil.Process] = []
        self._resident: dict[int, int] = {}
        self._looks = 0

    def look(self) -> None:
        """About once a second. Until ranks are found, each look is a search."""
        if not self._ranks or self._looks % SEARCH == 0:
            self._ranks = list(self._find()) or self._ranks
        self._looks += 1
        for process in self._ranks:
            with suppress(psutil.Error):
                resident = process.memory_info().rss
                self._resident[process.pid] = max(resident, self._resident.get(process.pid, 0))

    def told(self) -> dict[str, Any]:
        """For the launch script: see `describe`."""
        by_kernel = {
            pid: held for pid, held in killed_for_memory(self._since).items() if pid in self._resident
        }
        now = memory_now()
        return {
            "kills": max(len(by_kernel), kills() - self._kills),
            "ranks": len(self._resident),
            "resident": max([*self._resident.values(), *by_kernel.values()], default=0),
            "limit": now.limit,
            "by_cgroup": now.by_cgroup,
        }


def describe(told: Mapping[str, Any], is_silent: bool) -> str | None:
    """Why ranks ended without a word: killed for memory; None: nothing says so.

    Args:
        told: Of a machine, by its guard; empty where that is gone too.
        is_silent: One of its own ranks may have.
    """
    if not told:
        return None
    ranks, resident, limit = told["ranks"], told["resident"], told["limit"]
    if not told["kills"] and not (is_silent and ranks * resident > NEARLY_FULL * limit):
        return None
    how = "killed for memory" if told["kills"] else "most likely killed for memory"
    whose = "its cgroup allows" if told["by_cgroup"] else "the machine has"
    several = f"{ranks} rank{'s' * (ranks > 1)} x {format_bytes(resident)}"
    against = f"{several}, and {whose} {format_bytes(limit)}"
    return f"{how}: {against}; {ADVICE}, or start fewer ranks there"


KEEP_ALIVE = 5.0  # seconds between two messages to a guard
READY = 60.0  # seconds a guard has to answer
STRAGGLING = 15.0  # seconds the other nodes have once one has ended with a failure
SAVING = 60.0  # seconds ranks have to save once their launcher is gone
LEAVING = 5.0  # the same where a node failed or is lost: nothing can be saved together
SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
HUNG, BAD_INPUT = 124, 2
OUT_OF_MEMORY, DEVICE_FAILED = DeviceMemoryError.exit_code, DeviceFailedError.exit_code  # ENOMEM, EFAULT
TERMINATED = 143
STOPS = {129, 130, 138, TERMINATED}  # with a checkpoint, by a closed terminal, Ctrl-C, SIGUSR1, SIGTERM

ExitRecords = Mapping[int, Mapping[str, int]]
"""Rank -> its `code` and the `world_size` it knew of; a rank that was killed said nothing."""


def ranks_without_exit_code(records: ExitRecords, ranks: Iterable[int]) -> list[int]:
    """The ranks that said nothing, of those that were to run; `ranks` empty: of those the records tell of."""
    known = range(max((record["world_size"] for record in records.values()), default=0))
    return [rank for rank in list(ranks) or known if rank not in records]


def exit_code(records: ExitRecords, ranks: Iterable[int], launcher: int) -> int:
    """0 only where every rank has said so; their common code; a hang, the device's end or bad input whatever
    came of it; else the launcher's.

    Args:
        ranks: Those that were to run; empty where only the launcher knew.
        launcher: Its exit code; negative: the signal that killed it.
    """
    codes = {record["code"] for record in records.values()}
    launched = launcher if launcher >= 0 else 128 - launcher
    if codes <= STOPS and len(codes) == 2:
        codes -= {TERMINATED}  # the launcher's, for ranks that were just leaving
    if len(codes) == 1 and not ranks_without_exit_code(records, ranks):
        # Finished, and then the launcher was ended: nothing was lost.
        return codes.pop() or max(launcher, 0)
    for code in (HUNG, OUT_OF_MEMORY, DEVICE_FAILED, BAD_INPUT):
        if code in codes:
            return code
    return launched or max(codes | {1})


@dataclass
class _NodeState:
    """What is known of a node."""

    name: str
    process: asyncio.subprocess.Process
    exit_records: dict[str, dict[str, int]] = field(default_factory=dict)
    is_gone: bool = False
    """Its part of the run is over."""
    is_lost: bool = False
    has_ended: bool = False
    killed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    """See ranks_memory.describe."""

    @property
    def has_failed(self) -> bool:
        """Whether it is lost, or its ranks are gone and did not all tell of a good end."""
        well = bool(self.exit_records) and all(record["code"] == 0 for record in self.exit_records.values())
        return self.is_lost or (self.is_gone and not well)

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(pack(message))

    async def receive(self) -> dict[str, Any] | None:
        """The guard's next message; None: it is gone. What a login shell prints is passed over."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if (message := unpack(line)) is not None:
                return message
        return None

    async def last_error(self) -> str:
        assert self.process.stderr is not None
        text = (await self.process.stderr.read()).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "the connection was closed"


class Supervisor:
    """One run: its guards, its launcher, and how it ends."""

    def __init__(
        self, guards: Mapping[str, Sequence[str]], document: Mapping[str, Any], places: Mapping[int, str]
    ):
        """
        Args:
            guards: The nodes in order, and the command that starts the guard on each.
            document: What each guard is handed: folder, environment, arguments.
            places: The node of each rank; empty where only the launcher knows how many there will be.
        """
        self._guards = guards
        self._document = document
        self._places = places
        self._states: list[_NodeState] = []
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
            # Known once all of them are there: a signal meanwhile must not be a guard's first message.
            self._states = [_NodeState(name, await _spawn(words)) for name, words in self._guards.items()]
            first = (await self._handshake())[0]
            tasks = [asyncio.create_task(self._listen(state)) for state in self._states]
            tasks.append(asyncio.create_task(self._keep_alive()))
            if not self._signals:
                # A session of its own: Ctrl-C goes to the ranks, not to the launcher, which would kill them.
                self._child = await asyncio.create_subprocess_exec(
                    *start(first), env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
                )
                await self._wait_for_launcher(self._child)
            await self._end_ranks(LEAVING if any(state.has_failed for state in self._states) else SAVING)
            return self._conclude()
        finally:
            for task in tasks:
                task.cancel()
            self._end_launcher()
            await asyncio.gather(*(_leave(state.process) for state in self._states))

    async def _handshake(self) -> list[dict[str, Any]]:
        """What each node says of itself."""
        answers = await asyncio.gather(*(self._greet(state) for state in self._states))
        problems = [answer for answer in answers if isinstance(answer, str)]
        if problems:
            raise LaunchError(
                f"the run was not started: {'; '.join(problems)}; what is wrong there: "
                f"{own_command('doctor', '--hostfile', 'HOSTFILE')}"
            )
        return [answer for answer in answers if isinstance(answer, dict)]

    async def _greet(self, state: _NodeState) -> dict[str, Any] | str:
        """What the guard says of its node; a string: why it says nothing."""
        try:
            async with asyncio.timeout(READY):
                state.send(self._document)
                answer = await state.receive()
                if answer is None:
                    return f"{state.name}: {await state.last_error()}"
        except TimeoutError:
            return f"{state.name}: no answer within {READY:.0f} s"
        except OSError as error:
            return str(error)
        if "ready" not in answer:
            return f"{state.name}: {answer.get('problem')}"
        ready: dict[str, Any] = answer["ready"]
        return ready

    async def _listen(self, state: _NodeState) -> None:
        while (message := await state.receive()) is not None:
            if "gone" in message:
                state.is_gone, state.exit_records = True, message["gone"]
            if "ended" in message:
                state.has_ended, state.exit_records, state.killed = True, message["ended"], message["killed"]
                state.memory = message["memory"]
            self._changed.set()
        if not state.has_ended:
            state.is_lost = True
            _say(f"{state.name} is lost: {await state.last_error()}")
        self._changed.set()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE)
            self._send_all({})

    async def _wait_for_launcher(self, child: asyncio.subprocess.Process) -> None:
        """Returns when the launcher has ended, or what it started can no longer end well."""
        waiter = asyncio.create_task(child.wait())
        waiter.add_done_callback(lambda _: self._changed.set())
        deadline: float | None = None
        clock = asyncio.get_running_loop().time
        while not waiter.done():
            await self._change(deadline)
            if self._any_lost() or len(self._signals) > 2:
                break
            if deadline is None and any(state.has_failed for state in self._states):
                deadline = clock() + STRAGGLING
            if deadline is not None and clock() >= deadline:
                late = [state.name for state in self._states if not state.is_gone]
                if late:
                    _say(f"ended: {', '.join(late)} went on {STRAGGLING:.0f} s after another node had failed")
                break
        waiter.cancel()

    async def _end_ranks(self, seconds: float) -> None:
        """Has every node end what is left of the run, and tell how its ranks ended."""
        if len(self._signals) > 2:
            seconds = 0.0
        self._send_all({"end": seconds})
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds + 15
        while not all(state.has_ended or state.is_lost for state in self._states) and clock() < deadline:
            await self._change(deadline)
        if self._child is not None and self._child.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._child.wait(), 5)

    async def _change(self, deadline: float | None) -> None:
        """Waits until something has changed, at most until the deadline of the loop's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        self._changed.clear()

    def _conclude(self) -> int:
        """The exit code; names the ranks that did not tell of their end, and what had to be killed."""
        records = {int(rank): record for state in self._states for rank, record in state.exit_records.items()}
        silent = ranks_without_exit_code(records, self._places)
        for state in self._states:
            if state.killed:
                _say(f"{state.name}: {state.killed} processes of the run were left, and killed")
        if self._child is None:
            return 128 + self._signals[0]
        launcher = self._child.returncode
        if silent and (records or launcher == 0):
            places = {rank: f" on {name}" for rank, name in self._places.items()}
            named = ", ".join(f"{rank}{places.get(rank, '')}" for rank in silent)
            _say(f"ended without a word, as if killed: rank {named}")
        for state in self._states:
            is_silent = not records or state.name in {self._places.get(rank, state.name) for rank in silent}
            if (silent or not records) and (why := describe(state.memory, is_silent)) is not None:
                _say(f"{state.name}: {why}")
        code = exit_code(records, self._places, launcher or 0)
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
        self._send_all({"signal": number})
        if self._child is None or len(self._signals) > 2:
            self._changed.set()

    def _send_all(self, message: Mapping[str, Any]) -> None:
        for state in self._states:
            state.send(message)

    def _any_lost(self) -> bool:
        return any(state.is_lost for state in self._states)


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
