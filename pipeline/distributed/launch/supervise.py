"""Runs a launcher with a guard on every node, forwards signals, and ends all ranks if a node is lost.

The exit code comes from the ranks. The launcher's code is not enough, because deepspeed ends with 0 after its
launch.py was killed.
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
from pipeline.distributed.diagnosis import MEMORY_ADVICE
from pipeline.distributed.launch.ssh import NodeProcess, start_process, wait_and_report
from pipeline.distributed.signals import STOP_SIGNALS, detach_closed_terminal
from pipeline.errors import DeviceFailedError, DeviceMemoryError, LaunchError

KEEP_ALIVE_PERIOD = 5.0  # seconds between two messages to a guard
READY_TIMEOUT = 300.0  # seconds that a guard has to answer; ssh reports an unreachable machine within 20 s
STRAGGLER_TIMEOUT = 15.0  # seconds that the other nodes have to end after one node has failed
SAVE_TIMEOUT = 60.0  # seconds that ranks have to save and end after their launcher has ended
# Seconds that ranks have to end after a node has failed or is lost. Without that node they cannot save.
EXIT_TIMEOUT = 5.0
FORWARDED_SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
# Exit codes of ranks.
HUNG_CODE = 124
BAD_INPUT_CODE = 2
OUT_OF_MEMORY_CODE = DeviceMemoryError.exit_code  # ENOMEM
DEVICE_FAILED_CODE = DeviceFailedError.exit_code  # EFAULT
TERMINATED_CODE = 143
# Codes of ranks that saved a checkpoint and ended, after a closed terminal, Ctrl-C, SIGUSR1 or SIGTERM.
STOP_CODES = {129, 130, 138, TERMINATED_CODE}

ExitRecords = Mapping[int, Mapping[str, int]]
"""Rank -> its exit `code` and the `world_size` that it knew; a rank that was killed has no record."""


def ranks_without_exit_code(records: ExitRecords, ranks: Iterable[int]) -> list[int]:
    """Return the ranks that have no exit record.

    Args:
        records: Exit records of the ranks that wrote one.
        ranks: All ranks of the run; if empty, the world size in the records gives their number.
    """
    world_size = max((record["world_size"] for record in records.values()), default=0)
    all_ranks = list(ranks) or range(world_size)
    return [rank for rank in all_ranks if rank not in records]


def choose_exit_code(records: ExitRecords, ranks: Iterable[int], launcher: int) -> int:
    """Return the exit code of a run.

    The first rule that applies gives the code:

    1. All ranks reported the same code other than 0: that code. If the ranks reported 143 and one other of
       the STOP_CODES, only the other one counts.
    2. All ranks reported 0: 0, or the launcher's code if it is positive.
    3. Any rank reported a hang, a lack of memory, a failed device or bad input: the first of these.
    4. The launcher's code is not 0: that code (128 + the number of a signal that killed the launcher).
    5. The highest code of the ranks, and at least 1.

    Args:
        records: Exit records of the ranks that wrote one.
        ranks: All ranks of the run; empty if only the launcher knows them.
        launcher: The launcher's exit code; the negative number of a signal if that killed it.
    """
    codes = {record["code"] for record in records.values()}
    launcher_code = launcher if launcher >= 0 else 128 - launcher
    if codes <= STOP_CODES and len(codes) == 2:
        codes -= {TERMINATED_CODE}  # the launcher sends SIGTERM to ranks that are still about to end
    if len(codes) == 1 and not ranks_without_exit_code(records, ranks):
        # A signal that ended the launcher after all ranks had finished does not matter: the run is complete.
        return codes.pop() or max(launcher, 0)
    for code in (HUNG_CODE, OUT_OF_MEMORY_CODE, DEVICE_FAILED_CODE, BAD_INPUT_CODE):
        if code in codes:
            return code
    return launcher_code or max(codes | {1})


@dataclass
class _NodeState:
    """State of one node of the run, from the messages of its guard."""

    process: NodeProcess
    """Connection to the guard."""
    exit_records: dict[str, dict[str, int]] = field(default_factory=dict)
    """Exit record of each rank of the node that wrote one, keyed by the rank as text."""
    has_no_process: bool = False
    """Whether all processes of the run on the node have ended."""
    is_lost: bool = False
    """Whether the connection to the guard broke before its final report."""
    has_report: bool = False
    """Whether the guard has ended the remaining processes and reported the result."""
    num_killed: int = 0
    """Number of processes that the guard had to kill at the end."""
    num_kernel_kills: int = 0
    """Number of processes on the node that the kernel killed for memory during the run."""

    @property
    def has_failed(self) -> bool:
        """Return whether the node is lost, or its ranks have ended and not all reported success."""
        are_all_zero = all(record["code"] == 0 for record in self.exit_records.values())
        has_succeeded = bool(self.exit_records) and are_all_zero
        return self.is_lost or (self.has_no_process and not has_succeeded)

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.process.name


class Supervisor:
    """Runs one launcher and its guards, and determines the exit code of the run."""

    def __init__(
        self, guards: Mapping[str, Sequence[str]], document: Mapping[str, Any], rank_nodes: Mapping[int, str]
    ):
        """Store the description of the run; `run` starts it.

        Args:
            guards: Command that starts the guard on each node, by the name of the node, in order.
            document: First message to each guard, with the fields `folder`, `environment` and `arguments`.
            rank_nodes: Rank -> name of its node; empty if only the launcher knows the number of ranks.
        """
        self._guards = guards
        self._document = document
        self._rank_nodes = rank_nodes
        self._states: list[_NodeState] = []
        self._launcher: asyncio.subprocess.Process | None = None
        self._received_signals: list[int] = []
        self._change_event = asyncio.Event()

    async def run(
        self, build_command: Callable[[Mapping[str, Any]], Sequence[str]], environment: Mapping[str, str]
    ) -> int:
        """Start the guards and the launcher, wait until all have ended, and return the exit code.

        Args:
            build_command: Function that returns the launcher's command. Its argument has the `address` of the
                first node and a free `port` there.
            environment: Environment of the launcher.

        Raises:
            LaunchError: A node does not answer, or its guard cannot start.
        """
        loop = asyncio.get_running_loop()
        for number in FORWARDED_SIGNALS:
            # Under nohup SIGHUP is ignored, and stays so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._forward_signal, number)
        # While stopped by Ctrl-Z, this process would send nothing, and the guards would take it for dead.
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        tasks: list[asyncio.Task[None]] = []
        try:
            # The first message to a guard must be the document. So the list is assigned only when it is
            # complete: until then no signal is forwarded.
            self._states = [_NodeState(await start_process(*guard)) for guard in self._guards.items()]
            first = (await self._start_guards())[0]
            tasks = [asyncio.create_task(self._receive_messages(state)) for state in self._states]
            tasks.append(asyncio.create_task(self._keep_alive()))
            if not self._received_signals:
                # In a new session Ctrl-C does not reach the launcher, which would kill the ranks before they
                # have saved.
                self._launcher = await asyncio.create_subprocess_exec(
                    *build_command(first),
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
                await self._wait_for_launcher(self._launcher)
            has_failed = any(state.has_failed for state in self._states)
            await self._end_ranks(EXIT_TIMEOUT if has_failed else SAVE_TIMEOUT)
            return self._conclude()
        finally:
            for task in tasks:
                task.cancel()
            self._kill_launcher()
            await asyncio.gather(*(state.process.close() for state in self._states))

    async def _start_guards(self) -> list[dict[str, Any]]:
        """Start the run on every guard, and return the address and port that each node reports, in order.

        Raises:
            LaunchError: A guard could not start or did not answer.
        """
        tasks = {state.name: asyncio.create_task(self._start_guard(state)) for state in self._states}
        await wait_and_report(tasks)
        answers = [task.result() for task in tasks.values()]
        problems = [answer for answer in answers if isinstance(answer, str)]
        if problems:
            raise LaunchError(
                f"the run was not started: {'; '.join(problems)}; find the cause with "
                f"{format_pipeline_command('doctor', '--hostfile', 'HOSTFILE')}"
            )
        return [answer for answer in answers if isinstance(answer, dict)]

    async def _start_guard(self, state: _NodeState) -> dict[str, Any] | str:
        """Send the document to a guard, and return the address and port of its node.

        If the guard cannot start or does not answer, the result is the reason as a string.
        """
        try:
            async with asyncio.timeout(READY_TIMEOUT):
                state.process.send(self._document)
                answer = await state.process.receive()
                if answer is None:
                    last_line = (await state.process.read_stderr()).splitlines()[-1]
                    return f"{state.name}: {last_line}"
        except TimeoutError:
            return f"{state.name}: no answer within {READY_TIMEOUT:.0f} s"
        except OSError as error:
            return str(error)
        if "ready" not in answer:
            return f"{state.name}: {answer.get('problem')}"
        ready: dict[str, Any] = answer["ready"]
        return ready

    async def _receive_messages(self, state: _NodeState) -> None:
        """Update the state of a node from the messages of its guard until the connection closes."""
        while (message := await state.process.receive()) is not None:
            if "gone" in message:
                state.has_no_process = True
                state.exit_records = message["gone"]
            if "ended" in message:
                state.has_report = True
                state.exit_records = message["ended"]
                state.num_killed = message["killed"]
                state.num_kernel_kills = message["killed_for_memory"]
            self._change_event.set()
        if not state.has_report:
            state.is_lost = True
            last_line = (await state.process.read_stderr()).splitlines()[-1]
            _print_line(f"{state.name} is lost: {last_line}")
        self._change_event.set()

    async def _keep_alive(self) -> None:
        """Send every guard an empty message at intervals, so that none takes this process for dead."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_PERIOD)
            self._send_all({})

    async def _wait_for_launcher(self, launcher: asyncio.subprocess.Process) -> None:
        """Wait until the launcher has ended or the run can no longer succeed.

        It can no longer succeed if a node is lost, if a third signal arrives, or `STRAGGLER_TIMEOUT` after a
        node has failed.
        """
        waiter = asyncio.create_task(launcher.wait())
        waiter.add_done_callback(lambda _: self._change_event.set())
        deadline: float | None = None
        clock = asyncio.get_running_loop().time
        while not waiter.done():
            await self._wait_for_change(deadline)
            if self._has_lost_node() or len(self._received_signals) > 2:
                break
            if deadline is None and any(state.has_failed for state in self._states):
                deadline = clock() + STRAGGLER_TIMEOUT
            if deadline is not None and clock() >= deadline:
                running = [state.name for state in self._states if not state.has_no_process]
                if running:
                    _print_line(
                        f"stopping the run: a node failed {STRAGGLER_TIMEOUT:.0f} s ago, and ranks still run "
                        f"on {', '.join(running)}"
                    )
                break
        waiter.cancel()

    async def _end_ranks(self, seconds: float) -> None:
        """Make every guard end the remaining processes of the run, and wait for the final reports.

        Args:
            seconds: Time that the ranks have to save and end. After a third signal they have none.
        """
        if len(self._received_signals) > 2:
            seconds = 0.0
        self._send_all({"end": seconds})
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds + 15
        while not all(state.has_report or state.is_lost for state in self._states) and clock() < deadline:
            await self._wait_for_change(deadline)
        if self._launcher is not None and self._launcher.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._launcher.wait(), 5)

    async def _wait_for_change(self, deadline: float | None) -> None:
        """Wait until a message, a signal or the launcher's end changes something.

        Args:
            deadline: Time of the event loop's clock at which to stop waiting; `None` for no limit.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._change_event.wait()
        self._change_event.clear()

    def _conclude(self) -> int:
        """Print which ranks reported no exit code and which processes were killed; return the exit code."""
        records = {int(rank): record for state in self._states for rank, record in state.exit_records.items()}
        missing = ranks_without_exit_code(records, self._rank_nodes)
        for state in self._states:
            if state.num_killed:
                processes = _format_processes(state.num_killed, adjective="remaining ")
                _print_line(f"{state.name}: killed {processes} of the run")
        if self._launcher is None:  # a signal arrived before the launcher was started
            return 128 + self._received_signals[0]
        launcher_code = self._launcher.returncode
        # If the launcher failed and no rank wrote a record, most likely no rank was started.
        if missing and (records or launcher_code == 0):
            places = {rank: f" on {name}" for rank, name in self._rank_nodes.items()}
            names = ", ".join(f"{rank}{places.get(rank, '')}" for rank in missing)
            # The launcher also kills ranks that do not end after the watchdog has ended the others.
            has_diagnosis = any(record["code"] == HUNG_CODE for record in records.values())
            cause = "see the diagnosis above" if has_diagnosis else "most likely killed"
            _print_line(f"ended without an exit code, {cause}: rank {names}")
        has_incomplete_records = bool(missing) or not records
        for state in self._states:
            if state.num_kernel_kills and has_incomplete_records:
                processes = _format_processes(state.num_kernel_kills)
                _print_line(
                    f"{state.name}: the kernel killed {processes} for memory; {MEMORY_ADVICE}, or start "
                    "fewer ranks on it"
                )
        code = choose_exit_code(records, self._rank_nodes, launcher_code or 0)
        return 1 if code == 0 and self._has_lost_node() else code

    def _kill_launcher(self) -> None:
        """Kill the launcher and its process group, if it still runs."""
        if self._launcher is not None and self._launcher.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)

    def _forward_signal(self, number: int) -> None:
        """Record a signal that this process received, and send it to the ranks of all nodes."""
        detach_closed_terminal()
        if number == signal.SIGHUP and number in self._received_signals:
            return  # the kernel and the shell both send SIGHUP, so a second SIGHUP is no second request
        self._received_signals.append(number)
        self._send_all({"signal": number})
        if self._launcher is None or len(self._received_signals) > 2:
            self._change_event.set()

    def _send_all(self, message: Mapping[str, Any]) -> None:
        """Send a message to the guard of every node."""
        for state in self._states:
            state.process.send(message)

    def _has_lost_node(self) -> bool:
        """Return whether the connection to any node is lost."""
        return any(state.is_lost for state in self._states)


def _format_processes(count: int, adjective: str = "") -> str:
    """Return `1 process` or `2 processes`, with an adjective (and a space) before the noun."""
    noun = "processes" if count > 1 else "process"
    return f"{count} {adjective}{noun}"


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
