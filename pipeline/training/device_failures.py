"""Explains in one line that a device ran out of memory or failed: where, with which numbers, what helps.

Advice on memory is a list of overrides to append to the command, each with its gain. A change is listed only
if the settings accept it. The phase is read from the functions on the exception's stack, so that no step has
to record it. Nothing here calls a failed device.
"""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipeline.config.loading import get_dotted
from pipeline.config.settings import Settings
from pipeline.distributed.diagnosis import advise
from pipeline.distributed.machine import describe_process_limit, read_memory_usage
from pipeline.distributed.process_group import Job, describe_device
from pipeline.distributed.progress import LOADING, Phase, find_phase
from pipeline.distributed.watchdog import thread_position
from pipeline.errors import DeviceFailedError, DeviceMemoryError, PipelineError, summarize_error
from pipeline.files import GIB, format_bytes
from pipeline.planner.changes import (
    ACTIVATION_KINDS,
    BACK_TO_DEVICE,
    ConfigChange,
    list_candidates,
    price_changes,
    sort_by_memory_gain,
)
from pipeline.planner.forecast import Forecast

MOST = 3
"""Largest number of changes that are listed, one of each kind."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryShortage:
    """Facts about memory that ran out."""

    kind: str
    """Kind of memory: `cuda` or `cpu`."""
    phase: Phase | None = None
    """Phase of the run; `None` if it is not known."""
    missing: int = 0
    """Bytes requested beyond the free memory: the least that has to be saved."""
    allocated: int | None = None
    """Bytes allocated, by the allocator's message; `None` to read the current number."""


class MemoryAdvice(NamedTuple):
    """Changes that take less memory, and facts for the message."""

    levers: list[str]
    """Changes, the best first."""
    doing: str = ""
    """Circumstances for the message, such as ` at micro_batch_size 8`; may be empty."""
    facts: tuple[str, ...] = ()
    """Memory by owner, and the forecast."""


@dataclass
class TrainingAdvice:
    """Advises on the memory of a training run on this rank. Its fields are filled as the run is built."""

    settings: Settings
    job: Job | None
    """Ranks of the job; `None` before the process has joined it."""
    before: int = 0
    """Resident bytes of the process before the model was built."""
    states: Callable[[str], dict[str, int]] | None = None
    """Function that counts the engine's bytes on `cuda` or `cpu`; `None` before there is an engine."""
    plan: Callable[[Settings], Forecast] | None = None
    """Function that forecasts the run with given settings; `None` before the data is known."""

    def __call__(self, shortage: MemoryShortage) -> MemoryAdvice:
        """Return the advice for a shortage of memory."""
        facts = []
        doing = ""
        found = list[ConfigChange]()
        if (held := self._describe_held_memory(shortage)) is not None:
            facts.append(f"held: {held}")
        if self.job is not None:
            with suppress(PipelineError):
                device = describe_device(self.job.device)
                batch = self.settings.resolve(self.job.ranks.world_size, device).batch_plan
                doing = "" if batch.is_provisional else f" at micro_batch_size {batch.micro_batch_size}"
                if shortage.kind == device.kind:  # not the host's memory beside a GPU
                    said, found = self._forecast_changes(shortage) or (
                        "",
                        list(self._list_accepted_changes()),
                    )
                    facts += [said] if said else []
        if shortage.phase in LOADING:
            found = [each for each in found if each.kind not in ACTIVATION_KINDS]
        best = {each.kind: each for each in reversed(found)}
        told = [str(each) for each in found if best[each.kind] is each]
        if shortage.kind == "cpu":
            told += self._list_host_changes()
        return MemoryAdvice(
            told[:MOST] or [*list_outside_remedies(shortage.kind), "a smaller model"], doing, tuple(facts)
        )

    def advise_on_killed(self) -> str:
        """Return the advice to show on other ranks if the kernel killed a rank for the host's memory."""
        with suppress(PipelineError, RuntimeError, MemoryError):  # runs on another thread than training
            return f"what helps, most first: {'; '.join(self(MemoryShortage('cpu')).levers)}"
        return advise()

    def _forecast_changes(self, shortage: MemoryShortage) -> tuple[str, list[ConfigChange]] | None:
        """Return the forecast in words and the changes that take less memory; `None` without a forecast."""
        if self.plan is None:
            return None
        try:
            now = self.plan(self.settings)
            if not now.memory.is_complete:
                return None
            # The refused allocation is only the first of those that the step still needs.
            missing = max(shortage.missing, now.peak // 10, now.peak - now.hardware.memory)
            said = f"the plan had said {format_bytes(now.peak)} of {format_bytes(now.hardware.memory)}"
            return said, sort_by_memory_gain(price_changes(self.settings, now, self.plan), now, missing)
        except Exception:  # a mistake in a formula, or too little memory: the message goes without a forecast
            log.debug("no forecast for the message about memory", exc_info=True)
            return None

    def _list_accepted_changes(self) -> Iterator[ConfigChange]:
        """Yield the changes that the settings accept, without gains, for a run without a forecast."""
        assert self.job is not None
        device = describe_device(self.job.device)
        ranks = self.job.ranks.world_size
        for change in list_candidates(self.settings, self.settings.resolve(ranks, device), device):
            if change.kind == BACK_TO_DEVICE:
                continue
            with suppress(PipelineError, OSError):
                self.settings.with_arguments(change.overrides).resolve(ranks, device)
                yield change

    def _list_host_changes(self) -> Iterator[str]:
        """Yield changes that take less of the host's memory."""
        if workers := self.settings.config.loader.num_workers:
            yield f"loader.num_workers=0 (now {workers} processes a rank)"
        if self.job is None:
            return
        for what in ("optimizer", "param"):
            key = f"zero_optimization.offload_{what}.device"
            if self.job.device.type == "cuda" and get_dotted(self.settings.deepspeed or {}, key) == "cpu":
                yield f"ds.{key}=none (on the GPUs again)"
        if (ranks := self.job.ranks.local_world_size) > 1:
            half = ranks // 2
            yield (
                f"{half} of {ranks} ranks on this machine (--nproc-per-node {half}, of deepspeed --num_gpus "
                f"{half})"
            )

    def _describe_held_memory(self, shortage: MemoryShortage) -> str | None:
        """Return the memory of this rank by owner, in words; `None` before there is an engine.

        Called while the exception still holds its frames. Tensors of the engine are counted once per storage;
        activations are the rest of what was allocated, or on a CPU of what became resident.
        """
        if self.states is None:
            return None
        total = shortage.allocated
        before = 0
        if shortage.kind == "cpu":
            total = read_memory_usage().resident
            before = self.before
        elif total is None:
            total = torch.cuda.memory_allocated()
        # The engine may be closed by now, or no memory may be left to count.
        with suppress(RuntimeError, AttributeError, MemoryError):
            states = self.states(shortage.kind)
            rest = max(0, total - sum(states.values()) - before)
            named = states | {"activations and temporaries": rest, "libraries and data": before}
            return ", ".join(f"{format_bytes(each)} {name}" for name, each in named.items() if each)
        return None


def advise_on_evaluation(
    micro_batch_size: int, sequence_length: int | None, shortage: MemoryShortage
) -> MemoryAdvice:
    """Return advice for evaluating a whole model in this process."""
    smaller = []
    if micro_batch_size > 1:
        half = micro_batch_size // 2
        smaller.append(f"batch.micro_batch_size={half} (now {micro_batch_size}), which changes no number")
    if sequence_length:
        smaller.append(f"a shorter data.sequence_length (now {sequence_length})")
    return MemoryAdvice(
        [*smaller, *list_outside_remedies(shortage.kind)], f" at micro_batch_size {micro_batch_size}"
    )


def advise_on_generation(max_new_tokens: int, shortage: MemoryShortage) -> MemoryAdvice:
    """Return advice for generating text after a prompt."""
    fewer = f"fewer tokens (max_new_tokens, now {max_new_tokens})"
    return MemoryAdvice([fewer, "a shorter prompt", *list_outside_remedies(shortage.kind)])


def advise_on_files(shortage: MemoryShortage) -> MemoryAdvice:
    """Return advice for a command that reads, converts or writes files and loads no model."""
    return MemoryAdvice(list_outside_remedies(shortage.kind))


def list_outside_remedies(kind: str) -> list[str]:
    """Return remedies outside of the run."""
    if kind == "cuda":
        return [
            "a GPU that nothing else uses (nvidia-smi), or a larger one",
            "CUDA_VISIBLE_DEVICES= (empty), which leaves it to the CPU",
        ]
    look = "ps -eo rss,user,comm --sort=-rss | head"
    return [f"an end to what else takes memory here ({look})", "a higher limit"]


# Messages of torch.OutOfMemoryError, cuBLAS, cuDNN, NCCL and the CPU's allocator.
_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|can't allocate memory|Cannot allocate memory|Unable to allocate"
)
_FAILED = re.compile(
    r"device-side assert triggered|illegal memory access|illegal instruction|misaligned address"
    r"|unspecified launch failure|uncorrectable ECC error|fallen off the bus"
    r"|(CUBLAS|CUDNN)_STATUS_EXECUTION_FAILED"
)
_SIZE = r"([\d.]+ [KMGTPE]?i?B)"
# Numbers in the allocator's message: our words, and the pattern that finds the number.
_ASKED = "asked for {}"
_FREE = "{} were free"
_ALLOCATED = "{} allocated"
_TOLD = {
    _ASKED: rf"[Tt]ried to allocate {_SIZE}",
    "of {} in all": rf"total capacity of {_SIZE}",
    _FREE: rf"of which {_SIZE} is free",
    _ALLOCATED: rf"{_SIZE} is allocated by PyTorch",
    "{} more reserved": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


def explain_failure(
    error: BaseException, device: torch.device | None, advise: Callable[[MemoryShortage], MemoryAdvice]
) -> PipelineError | None:
    """Return the error that explains an exception; `None` if neither memory nor the device caused it.

    Args:
        error: Exception; its causes and contexts are searched, too.
        device: Device of the computation; `None` if it is not known yet.
        advise: Returns the advice for a shortage of memory.
    """
    raised: list[BaseException] = []
    for each in _iterate_causes(error):
        raised.insert(0, each)
        if isinstance(each, (DeviceMemoryError, DeviceFailedError)):
            return each
        if _is_memory_error(each):
            return DeviceMemoryError(
                _describe_shortage(each, find_phase(raised), device or torch.device("cpu"), advise)
            )
        if isinstance(each, RuntimeError) and _FAILED.search(str(each)):
            return DeviceFailedError(_describe_device_failure(each, device))
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception or one of its causes means that memory ran out."""
    return any(
        isinstance(each, DeviceMemoryError) or _is_memory_error(each) for each in _iterate_causes(error)
    )


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torchs = isinstance(error, RuntimeError) and _MEMORY.search(str(error)) is not None
    return is_torchs or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _describe_shortage(
    error: BaseException,
    phase: Phase | None,
    device: torch.device,
    advise: Callable[[MemoryShortage], MemoryAdvice],
) -> str:
    # The CPU's allocator counts in bytes.
    text = re.sub(r"(\d+) bytes", lambda found: format_bytes(int(found[1])), str(error))
    if isinstance(error, (MemoryError, OSError)) or "DefaultCPUAllocator" in text:
        device = torch.device("cpu")  # host memory, even if the run computes on a GPU
    sizes = {words: found[1] for words, how in _TOLD.items() if (found := re.search(how, text))}
    numbers = [words.format(number) for words, number in sizes.items()]
    if device.type == "cuda":
        if len(numbers) < 3:  # the message is not the allocator's
            numbers += _describe_peaks(device)
    else:
        numbers += [str(read_memory_usage()), *filter(None, [describe_process_limit()])]
    frames = traceback.extract_tb(error.__traceback__)
    asked, free, allocated = (_parse_bytes(sizes.get(words)) for words in (_ASKED, _FREE, _ALLOCATED))
    missing = max(0, (asked or 0) - (free or 0))
    told = advise(MemoryShortage(device.type, phase, missing, allocated))
    levers = told.levers
    if device.type == "cuda" and "more reserved" in " ".join(numbers):
        fragments = "PYTORCH_ALLOC_CONF=expandable_segments:True, if much is reserved and not allocated"
        levers = [*levers, fragments]
    where = f"{'' if phase is None else f' {phase}'}{told.doing}, at {thread_position(frames).place}"
    facts = [", ".join(numbers) or summarize_error(error), *told.facts]
    return (
        f"out of memory on {device}{where}: {'; '.join(facts)}. What helps, most first: {'; '.join(levers)}"
    )


def _parse_bytes(told: str | None) -> int | None:
    """Return the bytes of a text such as `2.50 GiB`."""
    if told is None:
        return None
    number, unit = told.split()
    return int(float(number) * 1024 ** " KMGTPE".index(unit[0] if unit != "B" else " "))


def _describe_peaks(device: torch.device) -> list[str]:
    with suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.max_memory_allocated(device) / GIB
        reserved = torch.cuda.max_memory_reserved(device) / GIB
        return [
            f"{allocated:.2f} GiB allocated and {reserved:.2f} GiB reserved at the peak",
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB free now",
        ]
    return []


def _describe_device_failure(error: RuntimeError, device: torch.device | None) -> str:
    text = summarize_error(error)
    frames = traceback.extract_tb(error.__traceback__)
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
