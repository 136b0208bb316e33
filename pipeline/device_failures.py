"""What to tell of a device that is out of memory or failed: one line, the numbers, the largest lever first.

Looks at what torch, CUDA, NCCL and the system say; asks a device that failed nothing.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from pipeline.config.batch import BatchPlan
from pipeline.config.loading import get_dotted
from pipeline.config.settings import Resolved, Settings
from pipeline.distributed.machine import memory_now
from pipeline.distributed.process_group import Job, describe_device
from pipeline.distributed.stacks import thread_position
from pipeline.errors import DeviceFailedError, DeviceMemoryError, PipelineError, one_line

GIB = 2**30
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
_TOLD = {
    "asked for {}": rf"[Tt]ried to allocate {_SIZE}",
    "of {} in all": rf"total capacity of {_SIZE}",
    "{} were free": rf"of which {_SIZE} is free",
    "{} allocated": rf"{_SIZE} is allocated by PyTorch",
    "{} more reserved": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


class Remedies(NamedTuple):
    """What was done, and what takes less memory."""

    doing: str
    """` at micro_batch_size 8`; empty: nothing to say."""
    levers: list[str]
    """Most first."""


Remedying = Callable[[str], Remedies]
"""Of the kind of device, `cuda` or `cpu`, whose memory is out."""


def explain(error: BaseException, device: torch.device | None, remedies: Remedying) -> PipelineError | None:
    """What to tell of an exception; None where it is not the device's memory, nor the device.

    Args:
        error: Also one that came of the other while everything was closed.
        device: That was computed on; None: not known yet.
    """
    for each in _chain(error):
        if isinstance(each, (DeviceMemoryError, DeviceFailedError)):
            return each
        if _is_of_memory(each):
            return DeviceMemoryError(_of_memory(each, device or torch.device("cpu"), remedies))
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


def _of_memory(error: BaseException, device: torch.device, remedies: Remedying) -> str:
    text = re.sub(
        r"(\d+) bytes", lambda found: f"{int(found[1]) / GIB:.2f} GiB", str(error)
    )  # the CPU's allocator
    if isinstance(error, (MemoryError, OSError)) or "DefaultCPUAllocator" in text:
        device = torch.device("cpu")  # the host's, beside a GPU
    numbers = [words.format(found[1]) for words, how in _TOLD.items() if (found := re.search(how, text))]
    if device.type == "cuda":
        if len(numbers) < 3:  # another's message than the allocator's
            numbers += _peaks(device)
    else:
        numbers.append(str(memory_now()))
    doing, levers = remedies(device.type)
    if device.type == "cuda" and "more reserved" in " ".join(numbers):
        levers = [
            *levers,
            "PYTORCH_ALLOC_CONF=expandable_segments:True, where much is reserved and not allocated",
        ]
    return (
        f"out of memory on {device}{doing}, {_place(error)}: {', '.join(numbers) or one_line(error)}. What "
        f"helps, most first: {'; '.join(levers)}"
    )


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


def of_training(settings: Settings, job: Job | None, device: str) -> Remedies:
    """For a run with these settings.

    Args:
        job: None: it is not joined yet.
    """
    resolved = None
    if job is not None:
        with suppress(PipelineError):
            resolved = settings.resolve(job.ranks.world_size, describe_device(job.device))
    doing = f" at micro_batch_size {resolved.plan.micro_batch_size}" if resolved is not None else ""
    return Remedies(doing, _levers(settings, resolved, device))


def of_evaluation(micro_batch_size: int, sequence_length: int | None, device: str) -> Remedies:
    """For a model that is whole in this process, and evaluated."""
    smaller = (
        [f"batch.micro_batch_size={micro_batch_size // 2} (now {micro_batch_size}), which changes no number"]
        if micro_batch_size > 1
        else []
    )
    return Remedies(
        f" in an evaluation at micro_batch_size {micro_batch_size}",
        [*smaller, _shorter(sequence_length), *_elsewhere(device)],
    )


def of_generation(max_new_tokens: int, device: str) -> Remedies:
    """For a model that writes after a prompt."""
    fewer = f"fewer tokens (max_new_tokens, now {max_new_tokens})"
    return Remedies(" while text is generated", [fewer, "a shorter prompt", *_elsewhere(device)])


def of_files(device: str) -> Remedies:
    """For what reads, converts or writes files and loads no model."""
    return Remedies("", _elsewhere(device))


def _elsewhere(device: str) -> list[str]:
    if device == "cuda":
        return [
            "a GPU that nothing else uses (nvidia-smi), or a larger one",
            "CUDA_VISIBLE_DEVICES= (empty), which leaves it to the CPU",
        ]
    look = "ps -eo rss,user,comm --sort=-rss | head"
    return [f"an end to what else takes memory here ({look})", "a higher limit"]


def _levers(settings: Settings, resolved: Resolved | None, device: str) -> list[str]:
    found = []
    if resolved is not None and (halved := _smaller(resolved.plan)) is not None:
        found.append(halved)
    if getattr(settings.config.model, "activation_checkpointing", "full") != "full":
        found.append("model.activation_checkpointing=full")
    split, is_gpu = resolved.split if resolved is not None else None, device == "cuda"
    if split is not None and split.dp_world_size > 1 and split.zero_stage < 3 and split.pipeline_stages == 1:
        found.append("--deepspeed ds_configs/zero3.json, which divides model and optimizer over the ranks")
    json = settings.deepspeed or {}
    if is_gpu and get_dotted(json, "zero_optimization.offload_optimizer.device") in (None, "none"):
        found.append(
            "--deepspeed ds_configs/zero3_offload.json, which keeps the optimizer in the host's memory"
        )
    shorter = _shorter(getattr(settings.config.data, "sequence_length", None))
    return [*found, f"{shorter}, or a smaller model"]


def _shorter(length: int | None) -> str:
    return f"a shorter data.sequence_length (now {length})" if length else "smaller samples"


def _smaller(plan: BatchPlan) -> str | None:
    """The same step in smaller parts: half, or the next part that divides."""
    size = plan.micro_batch_size
    parts = next((n for n in range(2, size + 1) if size % n == 0), None)
    if parts is None:
        return None
    steps = plan.gradient_accumulation_steps
    return (
        f"batch.micro_batch_size={size // parts} batch.gradient_accumulation_steps={steps * parts} (now "
        f"{size} and {steps}), the same step with 1/{parts} of the activations"
    )


def _of_device(error: RuntimeError, device: torch.device | None) -> str:
    text = one_line(error)
    where = f"{device or 'the device'} failed"
    if "ECC" in text or "fallen off" in text:
        return (
            f"{where}: {text}; the card is at fault: see dmesg | grep -i xid, and leave it out until a reset"
        )
    index = " (an index outside of a table: ids, labels or positions)" if "assert" in text else ""
    return (
        f"{where}{index}, {_place(error)}, or before: {text}; nothing of what it held is saved. Run the same "
        "again with CUDA_LAUNCH_BLOCKING=1 in the environment, and the line is the right one"
    )


def _place(error: BaseException) -> str:
    return f"at {thread_position(traceback.extract_tb(error.__traceback__)).place}"
