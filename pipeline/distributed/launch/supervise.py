"""Runs a launcher with a guard on every node, which forwards signals and ends all ranks if a node is lost.

The exit code comes from the ranks, not from the launcher: deepspeed ends with 0 if a part of it was killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.command_lines import format_pipeline_command
from pipeline.distributed.diagnosis import ADVICE
from pipeline.distributed.launch.ssh import NodeProcess, start_process, wait_and_report
from pipeline.distributed.signals import STOP_SIGNALS, detach_closed_terminal
from pipeline.errors import DeviceFailedError, DeviceMemoryError, LaunchError

KEEP_ALIVE = 5.0  # seconds between two messages to a guard
READY = 300.0  # seconds a guard has to answer; ssh gives up a machine that is gone within 20
STRAGGLING = 15.0  # seconds the other nodes have once one has ended with a failure
SAVING = 60.0  # seconds ranks have to save once their launcher is gone
LEAVING = 5.0  # the same where a node failed or is lost: nothing can be saved together
SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
HUNG, BAD_INPUT = 124, 2
OUT_OF_MEMORY, DEVICE_FAILED = DeviceMemoryError.exit_code, DeviceFailedError.exit_code  # ENOMEM, EFAULT
TERMINATED = 143
STOPS = {129, 130, 138, TERMINATED}  # with a checkpoint, by a closed terminal, Ctrl-C, SIGUSR1, SIGTERM

ExitRecords = Mapping[int, Mapping[str, int]]
"""Rank -> its `code` and the `world_size` it knew of; a rank that was killed has none."""


def ranks_without_exit_code(records: ExitRecords, ranks: Iterable[int]) -> list[int]:
    """Return the ranks without a record, of those that were to run or, if unknown, of all known."""
    known = range(max((record["world_size"] for record in records.values()), default=0))
    return [rank for rank in list(ranks) or known if rank not in records]


def choose_exit_code(records: ExitRecords, ranks: Iterable[int], launcher: int) -> int:
    """Return the exit code of a run.

    It is 0 only if every rank has said so; else their common code, that of a hang, of the device's end or of
    bad input if any rank has it, else the launcher's.

    Args:
        records: Exit records of the ranks that wrote one.
        ranks: Ranks that were to run; empty if only the launcher knew.
        launcher: The launcher's exit code; negative for the signal that killed it.
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
    """State of a node."""

    process: NodeProcess
    exit_records: dict[str, dict[str, int]] = field(default_factory=dict)
    is_gone: bool = False
    """Its part of the run is over."""
    is_lost: bool = False
    has_ended: bool = False
    killed: int = 0
    killed_for_memory: int = 0
    """Processes on the node that the kernel killed for memory while the run was there."""

    @property
    def has_failed(self) -> bool:
        """Return whether it is lost, or its ranks are gone and did not all tell of a good end."""
        well = bool(self.exit_records) and all(record["code"] == 0 for record in self.exit_records.values())
        return self.is_lost or (self.is_gone and not well)

    @property
    def name(self) -> str:
        return self.process.name


class Supervisor:
    """One run: its guards, its launcher, and how it ends."""

    def __init__(
        self, guards: Mapping[str, Sequence[str]], document: Mapping[str, Any], places: Mapping[int, str]
    ):
        """Prepare one run.

        Args:
            guards: The nodes in order, and the command that starts the guard on each.
            document: What each guard is given: folder, environment, arguments.
            places: The node of each rank; empty if only the launcher knows how many there will be.
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
        """Start the guards, then the launcher; wait for all to end, and return the exit code.

        Args:
            start: Gives the launcher's command, from what the first node says of itself (`address`, `port`).
            environment: The launcher's.

        Raises:
            LaunchError: A node does not answer.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._pass_on, number)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # unheard, it would be taken for dead
        tasks: list[asyncio.Task[None]] = []
        try:
            # Known once all of them are there: a signal meanwhile must not be a guard's first message.
            self._states = [_NodeState(await start_process(*guard)) for guard in self._guards.items()]
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
            await asyncio.gather(*(state.process.close() for state in self._states))

    async def _handshake(self) -> list[dict[str, Any]]:
        """Return what each node says of itself."""
        greetings = {state.name: asyncio.create_task(self._greet(state)) for state in self._states}
        await wait_and_report(greetings)
        answers = [each.result() for each in greetings.values()]
        problems = [answer for answer in answers if isinstance(answer, str)]
        if problems:
            raise LaunchError(
                f"the run was not started: {'; '.join(problems)}; what is wrong there: "
                f"{format_pipeline_command('doctor', '--hostfile', 'HOSTFILE')}"
            )
        return [answer for answer in answers if isinstance(answer, dict)]

    async def _greet(self, state: _NodeState) -> dict[str, Any] | str:
        """Return what the guard says of its node, or as a string why it says nothing."""
        try:
            async with asyncio.timeout(READY):
                state.process.send(self._document)
                answer = await state.process.receive()
                if answer is None:
                    return f"{state.name}: {(await state.process.last_words()).splitlines()[-1]}"
        except TimeoutError:
            return f"{state.name}: no answer within {READY:.0f} s"
        except OSError as error:
            return str(error)
        if "ready" not in answer:
            return f"{state.name}: {answer.get('problem')}"
        ready: dict[str, Any] = answer["ready"]
        return ready

    async def _listen(self, state: _NodeState) -> None:
        while (message := await state.process.receive()) is not None:
            if "gone" in message:
                state.is_gone, state.exit_records = True, message["gone"]
            if "ended" in message:
                state.has_ended, state.exit_records, state.killed = True, message["ended"], message["killed"]
                state.killed_for_memory = message["killed_for_memory"]
            self._changed.set()
        if not state.has_ended:
            state.is_lost = True
            _say(f"{state.name} is lost: {(await state.process.last_words()).splitlines()[-1]}")
        self._changed.set()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE)
            self._send_all({})

    async def _wait_for_launcher(self, child: asyncio.subprocess.Process) -> None:
        """Return when the launcher has ended, or what it started can no longer end well."""
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
        """Have every node end what is left of the run, and say how its ranks ended."""
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
        """Wait until something has changed, at most until the deadline of the loop's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        self._changed.clear()

    def _conclude(self) -> int:
        """Return the exit code; name the ranks that left none, and what had to be killed."""
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
            if (count := state.killed_for_memory) and (silent or not records):
                killed = f"the kernel killed {count} process{'es' * (count > 1)} for memory"
                _say(f"{state.name}: {killed}; {ADVICE}, or start fewer ranks there")
        code = choose_exit_code(records, self._places, launcher or 0)
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
            state.process.send(message)

    def _any_lost(self) -> bool:
        return any(state.is_lost for state in self._states)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
