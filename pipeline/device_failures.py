"""How a run dies of its device, out of memory or failed: one line, the numbers, the largest lever first.

Looks at what torch, CUDA, NCCL and the system say; asks a device that failed nothing.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from contextlib import suppress

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


def explain(error: BaseException, settings: Settings, job: Job | None) -> PipelineError | None:
    """What to tell of an exception; None where it is not the device's memory, nor the device.

    Args:
        error: Also one that came of the other while everything was closed.
        job: None: it is not joined yet.
    """
    for each in _chain(error):
        if _is_of_memory(each):
            return DeviceMemoryError(_of_memory(each, settings, job))
        if isinstance(each, RuntimeError) and _FAILED.search(str(each)):
            return DeviceFailedError(_of_device(each, job))
    return None


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


def _of_memory(error: BaseException, settings: Settings, job: Job | None) -> str:
    device = job.device if job is not None else torch.device("cpu")
    text = re.sub(
        r"(\d+) bytes", lambda found: f"{int(found[1]) / GIB:.2f} GiB", str(error)
    )  # the CPU's allocator
    numbers = [words.format(found[1]) for words, how in _TOLD.items() if (found := re.search(how, text))]
    if device.type == "cuda":
        if len(numbers) < 3:  # another's message than the allocator's
            numbers += _peaks(device)
    else:
        numbers.append(str(memory_now()))
    resolved = None
    if job is not None:
        with suppress(PipelineError):
            resolved = settings.resolve(job.ranks.world_size, describe_device(device))
    plan = f" at micro_batch_size {resolved.plan.micro_batch_size}" if resolved is not None else ""
    levers = _levers(settings, resolved, device.type)
    if device.type == "cuda" and "more reserved" in " ".join(numbers):
        levers.append("PYTORCH_ALLOC_CONF=expandable_segments:True, where much is reserved and not allocated")
    return (
        f"out of memory on {device}{plan}, {_place(error)}: {', '.join(numbers) or one_line(error)}. What "
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
    length = getattr(settings.config.data, "sequence_length", None)
    shorter = f"a shorter data.sequence_length (now {length})" if length else "smaller samples"
    return [*found, f"{shorter}, or a smaller model"]


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


def _of_device(error: RuntimeError, job: Job | None) -> str:
    text = one_line(error)
    where = f"{job.device} failed" if job is not None else "the device failed"
    if "ECC" in text or "fallen off" in text:
        return (
            f"{where}: {text}; the card is at fault: see dmesg | grep -i xid, and leave it out until a reset"
        )
    index = " (an index outside of a table: ids, labels or positions)" if "assert" in text else ""
    return (
        f"{where}{index}, {_place(error)}, or before: {text}; nothing of what it held is saved. Run the same "
        "again with CUDA_LAUNCH_BLOCKING=1 in the environment, and the line is the right one (the traceback: "
        "logs/ of the run)"
    )


def _place(error: BaseException) -> str:
    return f"at {thread_position(traceback.extract_tb(error.__traceback__)).place}"
