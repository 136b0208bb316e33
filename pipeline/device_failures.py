"""What to tell of a device that is out of memory or failed: one line, where, the numbers, what helps.

Looks at what torch, CUDA, NCCL and the system say; asks a device that failed nothing.
"""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from pipeline.config.settings import Settings
from pipeline.distributed.diagnosis import advise
from pipeline.distributed.machine import memory_now, own_limit
from pipeline.distributed.process_group import Job, describe_device
from pipeline.distributed.progress import Phase, phase_of
from pipeline.distributed.stacks import thread_position
from pipeline.errors import DeviceFailedError, DeviceMemoryError, PipelineError, one_line
from pipeline.files import GIB, format_bytes
from pipeline.planning.account import Account, HeldMemory, Planned
from pipeline.remedies import Changing, Remedies, Remedying, Shortage, changes_of, elsewhere

log = logging.getLogger(__name__)

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


def explain(error: BaseException, device: torch.device | None, remedies: Remedying) -> PipelineError | None:
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
def explained(device: torch.device, remedies: Remedying) -> Iterator[None]:
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


def _of_memory(error: BaseException, phase: Phase | None, device: torch.device, remedies: Remedying) -> str:
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
    facts = [", ".join(numbers) or one_line(error), told.held and f"held: {told.held}", told.planned]
    return (
        f"out of memory on {device}{where}: {'; '.join(filter(None, facts))}. What "
        f"helps, most first: {'; '.join(levers)}"
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


def of_training(settings: Settings, job: Job | None, account: Account, shortage: Shortage) -> Remedies:
    """For a run with these settings.

    Args:
        job: None: it is not joined yet.
        account: What is known of the rank's memory.
    """
    held, resolved = _held(account, shortage), None
    told, planned = "" if held is None else str(held), _planned(account)
    if job is not None:
        device = describe_device(job.device)
        with suppress(PipelineError):
            resolved = settings.resolve(job.ranks.world_size, device)
    is_beside = job is not None and job.device.type == "cuda" and shortage.kind == "cpu"
    said = "" if planned is None or is_beside else str(planned)
    if job is None or resolved is None:
        return Remedies("", [*elsewhere(shortage.kind), "a smaller model"], told, said)
    changing = Changing(settings, resolved, device, job.ranks.local_world_size, shortage, held)
    doing = "" if resolved.plan.is_open else f" at micro_batch_size {resolved.plan.micro_batch_size}"
    return Remedies(doing, changes_of(changing, planned), told, said)


def _planned(account: Account) -> Planned | None:
    """What the plan says: worked out here, where it costs no run a moment."""
    try:
        return None if account.plan is None else account.plan()
    except Exception:  # of a formula, or for want of memory: the plan is not the news
        log.debug("no plan beside what ran out of memory", exc_info=True)
        return None


def of_killed(settings: Settings, job: Job, account: Account) -> str:
    """What helps where a rank of the run was killed for the host's memory, as one that is left knows."""
    with suppress(PipelineError, RuntimeError, MemoryError):  # beside the thread that trains
        remedies = of_training(settings, job, account, Shortage("cpu"))
        return f"what helps, most first: {'; '.join(remedies.levers)}"
    return advise()


def _held(account: Account, shortage: Shortage) -> HeldMemory | None:
    """What the rank's engine holds on what is out of memory; None: there is no engine."""
    if account.states is None:
        return None
    total, before = shortage.allocated, 0
    if shortage.kind == "cpu":
        total, before = memory_now().resident, account.before
    elif total is None:
        total = torch.cuda.memory_allocated()
    with suppress(RuntimeError, AttributeError, MemoryError):  # closed meanwhile; not a byte is left
        return HeldMemory(account.states(shortage.kind), total, before)
    return None


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
