"""What to tell of a device that is out of memory or failed: one line, where, the numbers, what helps.

Looks at what torch, CUDA, NCCL and the system say; asks a device that failed nothing.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from pipeline.distributed.machine import memory_now, own_limit
from pipeline.distributed.progress import Phase, phase_of
from pipeline.distributed.stacks import thread_position
from pipeline.errors import DeviceFailedError, DeviceMemoryError, PipelineError, one_line
from pipeline.files import GIB, format_bytes
from pipeline.training.oom_advice import Remedies, Shortage

# torch.OutOfMemoryError, and what cuBLAS, cuDNN, NCCL and the CPU's allocator say.
_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|can't allocate memory|Cannot allocate memory|Unable to allocate"
)
_FAILED = re.compile(
    r"device-side assert triggered|illegal memory access|illegal instruction|misaligned address"
    r"|unspecified launch failure|uncorrectable ECC error|fallen off the bus"
    r"|(CUBLAS|CUDNN)_STATUS_EXECUTION_FAILED"
)
_SIZE = r"([\d.]+ [KMGTPE]?i?B)"
# Of the allocator's own message, which knows how it was at that moment.
_ASKED, _FREE, _ALLOCATED = "asked for {}", "{} were free", "{} allocated"
_TOLD = {
    _ASKED: rf"[Tt]ried to allocate {_SIZE}",
    "of {} in all": rf"total capacity of {_SIZE}",
    _FREE: rf"of which {_SIZE} is free",
    _ALLOCATED: rf"{_SIZE} is allocated by PyTorch",
    "{} more reserved": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


def explain(
    error: BaseException, device: torch.device | None, remedies: Callable[[Shortage], Remedies]
) -> PipelineError | None:
    """What to tell of an exception; None where it is not the device's memory, nor the device.

    Args:
        error: Also one that came of the other while everything was closed.
        device: That was computed on; None: not known yet.
    """
    raised: list[BaseException] = []
    for each in _chain(error):
        raised.insert(0, each)
        if isinstance(each, (DeviceMemoryError, DeviceFailedError)):
            return each
        if _is_of_memory(each):
            return DeviceMemoryError(
                _of_memory(each, phase_of(raised), device or torch.device("cpu"), remedies)
            )
        if isinstance(each, RuntimeError) and _FAILED.search(str(each)):
            return DeviceFailedError(_of_device(each, device))
    return None


@contextmanager
def explained(device: torch.device, remedies: Callable[[Shortage], Remedies]) -> Iterator[None]:
    """Around what computes; or a decorator.

    Raises:
        DeviceMemoryError, DeviceFailedError: in place of torch's or the system's own, which is the cause.
    """
    try:
        yield
    except Exception as error:
        mistake = None if isinstance(error, PipelineError) else explain(error, device, remedies)
        if mistake is None:
            raise
        raise mistake from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torchs = isinstance(error, RuntimeError) and _MEMORY.search(str(error)) is not None
    return is_torchs or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _of_memory(
    error: BaseException, phase: Phase | None, device: torch.device, remedies: Callable[[Shortage], Remedies]
) -> str:
    # The CPU's allocator counts in bytes.
    text = re.sub(r"(\d+) bytes", lambda found: format_bytes(int(found[1])), str(error))
    if isinstance(error, (MemoryError, OSError)) or "DefaultCPUAllocator" in text:
        device = torch.device("cpu")  # the host's, beside a GPU
    sizes = {words: found[1] for words, how in _TOLD.items() if (found := re.search(how, text))}
    numbers = [words.format(number) for words, number in sizes.items()]
    if device.type == "cuda":
        if len(numbers) < 3:  # another's message than the allocator's
            numbers += _peaks(device)
    else:
        numbers += [str(memory_now()), *filter(None, [own_limit()])]
    frames = traceback.extract_tb(error.__traceback__)
    asked, free, allocated = (_bytes(sizes.get(words)) for words in (_ASKED, _FREE, _ALLOCATED))
    missing = max(0, (asked or 0) - (free or 0))
    told = remedies(Shortage(device.type, phase, missing, allocated))
    levers = told.levers
    if device.type == "cuda" and "more reserved" in " ".join(numbers):
        levers = [
            *levers,
            "PYTORCH_ALLOC_CONF=expandable_segments:True, where much is reserved and not allocated",
        ]
    where = f"{'' if phase is None else f' {phase}'}{told.doing}, at {thread_position(frames).place}"
    facts = [", ".join(numbers) or one_line(error), *told.facts]
    return (
        f"out of memory on {device}{where}: {'; '.join(facts)}. What helps, most first: {'; '.join(levers)}"
    )


def _bytes(told: str | None) -> int | None:
    """Of `2.50 GiB`."""
    if told is None:
        return None
    number, unit = told.split()
    return int(float(number) * 1024 ** " KMGTPE".index(unit[0] if unit != "B" else " "))


def _peaks(device: torch.device) -> list[str]:
    with suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.max_memory_allocated(device) / GIB
        reserved = torch.cuda.max_memory_reserved(device) / GIB
        return [
            f"{allocated:.2f} GiB allocated and {reserved:.2f} GiB reserved at the peak",
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB free now",
        ]
    return []


def _of_device(error: RuntimeError, device: torch.device | None) -> str:
    text, frames = one_line(error), traceback.extract_tb(error.__traceback__)
    where = f"{device or 'the device'} failed"
    if "ECC" in text or "fallen off" in text:
        return (
            f"{where}: {text}; the card is at fault: see dmesg | grep -i xid, and leave it out until a reset"
        )
    index = " (an index outside of a table: ids, labels or positions)" if "assert" in text else ""
    place = thread_position(frames).place
    return (
        f"{where}{index}, at {place}, or before: {text}; nothing of what it held is saved. Run the same "
        "again with CUDA_LAUNCH_BLOCKING=1 in the environment, and the line is the right one"
    )
