"""Conversations with processes of ours, and one rank of the doctor's all-reduce, a process of its own.

It is asked by the probe (probe.py): on rank 0 to serve the store, then with a Part. Says where it is as it
goes on, so that one that hangs can be ended.
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
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypedDict

from pipeline.distributed.launch.ssh import pack, unpack
from pipeline.errors import one_line

if TYPE_CHECKING:
    import torch

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


MEBIBYTE = 1 << 20
BUDGET = 0.15
"""Seconds that a transfer is meant to take: its size follows from a first, small one."""

TRANSFERS = 4
"""Over each link; the fastest counts: the first makes the connection, and others may use the machine."""

STEPS = ("loading torch", "joining", "the first all-reduce", "transfers", "the large all-reduce", "the end")


class Part(TypedDict):
    """What this rank does in the all-reduce."""

    rank: int
    world_size: int
    device: int | None
    """GPU of this machine; None: the processor."""
    address: str
    port: int
    rounds: list[list[tuple[int, int]]]
    """Transfers (from, to); those of a round run at the same time."""
    seconds: float
    """Limit."""


class Measured(TypedDict, total=False):
    """What is known of a rank, as far as it came. Bytes, bytes a second."""

    rank: int
    step: str
    """What it did last: one of STEPS. The probe adds both."""
    problem: str
    links: list[tuple[int, int, float]]
    """(from, to, speed) of the transfers that it received."""
    bandwidth: float
    """Of the all-reduce, as each rank's link sees it: 2 (n - 1) / n x size / time."""
    size: int


def main() -> None:
    """Serves standard input until it closes; then the process ends, whatever it is doing."""
    questions, answers = own_streams()
    waiting = read_questions(questions)

    def tell(step: str) -> None:
        say(answers, {"step": step})

    import torch
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    stores: list[TCPStore] = []

    def serve(address: str) -> dict[str, int]:
        stores.append(TCPStore(address, 0, is_master=True, wait_for_workers=False))
        return {"port": stores[0].port}

    def take_part(part: Part) -> Measured:
        return _take_part(part, stores[0] if stores else None, tell)

    answer_all(waiting, answers, {"serve": serve, "reduce": take_part})


def _take_part(part: Part, store: Any, tell: Callable[[str], None]) -> Measured:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    measured = Measured()
    try:
        tell("joining")
        limit = timedelta(seconds=part["seconds"])
        if store is None:
            store = TCPStore(part["address"], part["port"], is_master=False, timeout=limit)
        device = torch.device("cpu") if part["device"] is None else torch.device("cuda", part["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=store,
            rank=part["rank"],
            world_size=part["world_size"],
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
        )
        tell("the first all-reduce")
        ones = torch.full((1024,), float(part["rank"] + 1), device=device)
        dist.all_reduce(ones)
        expected = part["world_size"] * (part["world_size"] + 1) / 2
        if ones.ne(expected).any().item():
            raise ValueError(f"the sum over all ranks is {ones[0].item():g}, not {expected:g}")
        tell("transfers")
        measured["links"] = _transfer(part, device)
        tell("the large all-reduce")
        measured["size"], measured["bandwidth"] = _all_reduce(part, measured["links"], device)
        tell("the end")
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # gloo, NCCL and the store each raise their own
        measured["problem"] = one_line(error, 300)
    return measured


def _transfer(part: Part, device: torch.device) -> list[tuple[int, int, float]]:
    """The receiver asks, with the size, and holds the watch: ranks that are late to a round do not count."""
    import torch
    import torch.distributed as dist

    largest = (256 if device.type == "cuda" else 16) * MEBIBYTE
    buffer = torch.zeros(largest, dtype=torch.uint8, device=device)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    found = []
    for pairs in part["rounds"]:
        for source, target in pairs:
            if part["rank"] == source:
                for _ in range(TRANSFERS):
                    dist.recv(size, target)
                    dist.send(buffer[: int(size)], target)
            elif part["rank"] == target:
                amount, best = MEBIBYTE // 16, 0.0
                for _ in range(TRANSFERS):
                    size.fill_(amount)
                    started = _now(device)
                    dist.send(size, source)
                    dist.recv(buffer[:amount], source)
                    speed = amount / (_now(device) - started)
                    best = max(best, speed)
                    amount = int(min(max(speed * BUDGET, MEBIBYTE // 16), largest))
                found.append((source, target, best))
        dist.barrier()
    return found


def _all_reduce(part: Part, links: list[tuple[int, int, float]], device: torch.device) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    largest = (256 if device.type == "cuda" else 16) * MEBIBYTE
    slowest = torch.tensor([min([speed for *_, speed in links], default=1e12)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    size = int(min(max(slowest.item() * BUDGET, MEBIBYTE // 4), largest)) // 4 * 4
    values = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(3):
        dist.barrier()
        started = _now(device)
        dist.all_reduce(values)
        seconds.append(_now(device) - started)
    share = 2 * (part["world_size"] - 1) / part["world_size"]
    return size, share * size / min(seconds)


def _now(device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
