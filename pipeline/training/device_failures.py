"""Explains in one line that a device ran out of memory or failed: where, with which numbers, what helps.

Advice on memory is a list of changes, the best first: overrides to append to the command, with their gains if
there is a forecast, and remedies outside of the run. The planner's changes are listed only if the settings
accept them. The phase comes from the tag on the exception, see distributed.progress. Nothing here calls a
failed device.
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
from pipeline.distributed import diagnosis
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

MAX_CHANGES = 3
"""Largest number of changes in the advice of TrainingAdvice; of the planner's, at most one of each kind."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryShortage:
    """Facts about memory that ran out on this rank."""

    kind: str
    """Kind of memory: `cuda` or `cpu`."""
    phase: Phase | None = None
    """Phase of the run; `None` if it is not known."""
    missing: int = 0
    """Bytes requested beyond the free memory; a change must save at least these. 0 if they are not known."""
    allocated: int | None = None
    """Bytes allocated according to the allocator's message; `None` to read the current number."""


class MemoryAdvice(NamedTuple):
    """Changes that need less memory, and facts for the message."""

    changes: list[str]
    """Texts of changes, the best first."""
    circumstances: str = ""
    """Text after the phase in the message, such as ` at micro_batch_size 8`; may be empty."""
    facts: tuple[str, ...] = ()
    """Texts about the memory in use by owner, and about the forecast."""


@dataclass
class TrainingAdvice:
    """Advises on the memory of a training run on this rank. Its fields are filled as the run is built."""

    settings: Settings
    job: Job | None
    """Ranks of the job; `None` before the process has joined it."""
    resident_before: int = 0
    """Resident bytes of the process before the model was built."""
    count_states: Callable[[str], dict[str, int]] | None = None
    """Function that returns the engine's bytes on `cuda` or `cpu` by owner, such as `parameters`; `None`
    before there is an engine."""
    forecast: Callable[[Settings], Forecast] | None = None
    """Function that forecasts the run with given settings; `None` before the data is known."""

    def __call__(self, shortage: MemoryShortage) -> MemoryAdvice:
        """Return the advice for a shortage of memory."""
        facts = []
        in_use = self._describe_used_memory(shortage)
        if in_use is not None:
            facts.append(f"this rank's memory: {in_use}")
        circumstances = ""
        changes: list[ConfigChange] = []
        if self.job is not None:
            with suppress(PipelineError):
                device = describe_device(self.job.device)
                batch = self.settings.resolve(self.job.ranks.world_size, device).batch_plan
                if not batch.is_provisional:
                    circumstances = f" at micro_batch_size {batch.micro_batch_size}"
                if shortage.kind == device.kind:  # else the host's memory ran out although the run uses a GPU
                    forecast_changes = self._forecast_changes(shortage)
                    if forecast_changes is None:
                        changes = list(self._list_accepted_changes())
                    else:
                        forecast_text, changes = forecast_changes
                        facts.append(forecast_text)
        if shortage.phase in LOADING:
            changes = [change for change in changes if change.kind not in ACTIVATION_KINDS]
        best_of_kind = {change.kind: change for change in reversed(changes)}
        texts = [str(change) for change in changes if best_of_kind[change.kind] is change]
        if shortage.kind == "cpu":
            texts += self._list_host_changes()
        if not texts:
            texts = [*list_outside_remedies(shortage.kind), "a smaller model"]
        return MemoryAdvice(texts[:MAX_CHANGES], circumstances, tuple(facts))

    def advise_on_killed(self) -> str:
        """Return the advice that other ranks show if a rank was killed because the host's memory ran out.

        May run on another thread than training.
        """
        with suppress(PipelineError, RuntimeError, MemoryError):  # the training thread may change the engine
            return f"what helps, best first: {'; '.join(self(MemoryShortage('cpu')).changes)}"
        return diagnosis.advise()

    def _forecast_changes(self, shortage: MemoryShortage) -> tuple[str, list[ConfigChange]] | None:
        """Return the forecast as a text and the changes that need less memory; `None` without a forecast."""
        if self.forecast is None:
            return None
        try:
            now = self.forecast(self.settings)
            if not now.memory.is_complete:
                return None
            # The refused allocation is only the first of those that the step still needs.
            missing = max(shortage.missing, now.peak // 10, now.peak - now.hardware.memory)
            text = f"the plan expected {format_bytes(now.peak)} of {format_bytes(now.hardware.memory)}"
            changes = price_changes(self.settings, now, self.forecast)
            return text, sort_by_memory_gain(changes, now, missing)
        except Exception:  # a mistake in a formula, or too little memory: the message goes without a forecast
            log.debug("no forecast for the message about memory", exc_info=True)
            return None

    def _list_accepted_changes(self) -> Iterator[ConfigChange]:
        """Yield the changes that the settings accept, without gains. For a run without a forecast."""
        assert self.job is not None
        device = describe_device(self.job.device)
        ranks = self.job.ranks.world_size
        for change in list_candidates(self.settings, self.settings.resolve(ranks, device), device):
            if change.kind == BACK_TO_DEVICE:  # needs more memory of the device
                continue
            with suppress(PipelineError, OSError):
                self.settings.with_arguments(change.overrides).resolve(ranks, device)
                yield change

    def _list_host_changes(self) -> Iterator[str]:
        """Yield texts of changes that need less of the host's memory."""
        workers = self.settings.config.loader.num_workers
        if workers:
            yield f"loader.num_workers=0 (now {workers} processes per rank)"
        if self.job is None:
            return
        for name, values in (("optimizer", "optimizer states"), ("param", "parameters")):
            key = f"zero_optimization.offload_{name}.device"
            if self.job.device.type == "cuda" and get_dotted(self.settings.deepspeed or {}, key) == "cpu":
                yield f"ds.{key}=none ({values} in the GPUs' memory)"
        ranks = self.job.ranks.local_world_size
        if ranks > 1:
            half = ranks // 2
            yield (
                f"{half} of {ranks} ranks on this machine (torchrun --nproc-per-node {half}, deepspeed "
                f"--num_gpus {half})"
            )

    def _describe_used_memory(self, shortage: MemoryShortage) -> str | None:
        """Return the memory that this rank uses, by owner, as a text.

        Call this while the exception still references its stack frames, which keep the activations alive. The
        engine's tensors are counted once per storage. On a GPU the rest of the allocated memory counts as
        activations; on a CPU, the rest of the memory that became resident since the model was built.

        Returns:
            `None` before there is an engine, or if its memory cannot be counted.
        """
        if self.count_states is None:
            return None
        total = shortage.allocated
        before = 0
        if shortage.kind == "cpu":
            total = read_memory_usage().resident
            before = self.resident_before
        elif total is None:
            total = torch.cuda.memory_allocated()
        # The engine may be closed by now, or no memory may be left to count.
        with suppress(RuntimeError, AttributeError, MemoryError):
            states = self.count_states(shortage.kind)
            rest = max(0, total - sum(states.values()) - before)
            owners = states | {"activations and temporaries": rest, "libraries and data": before}
            return ", ".join(f"{format_bytes(size)} {owner}" for owner, size in owners.items() if size)
        return None


def advise_on_evaluation(
    micro_batch_size: int, sequence_length: int | None, shortage: MemoryShortage
) -> MemoryAdvice:
    """Return advice for an evaluation of a checkpoint in this process alone.

    Args:
        micro_batch_size: Micro-batch size of the evaluation.
        sequence_length: Tokens per row; `None` if rows have no fixed length.
        shortage: Facts about the memory that ran out.
    """
    smaller = []
    if micro_batch_size > 1:
        half = micro_batch_size // 2
        smaller.append(f"batch.micro_batch_size={half} (now {micro_batch_size}), which changes no result")
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
    """Return remedies that need no override, for memory of kind `cuda` or `cpu`."""
    if kind == "cuda":
        return [
            "a GPU that no other process uses (nvidia-smi), or a larger one",
            "CUDA_VISIBLE_DEVICES= (empty), to compute on the CPU",
        ]
    command = "ps -eo rss,user,comm --sort=-rss | head"
    return [f"to end other processes that use much memory here ({command})", "a higher memory limit"]


# Messages of cuBLAS, cuDNN, NCCL and the CPU's allocator.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|can't allocate memory|Cannot allocate memory|Unable to allocate"
)
_DEVICE_FAILED = re.compile(
    r"device-side assert triggered|illegal memory access|illegal instruction|misaligned address"
    r"|unspecified launch failure|uncorrectable ECC error|fallen off the bus"
    r"|(CUBLAS|CUDNN)_STATUS_EXECUTION_FAILED"
)
_SIZE = r"([\d.]+ [KMGTPE]?i?B)"
# Sizes in the allocator's message: the text shown for a size, and the pattern that finds the size.
_REQUESTED = "asked for {}"
_FREE = "{} were free"
_ALLOCATED = "{} allocated"
_SIZE_PATTERNS = {
    _REQUESTED: rf"[Tt]ried to allocate {_SIZE}",
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
        error: Exception; the exceptions that caused it are searched, too.
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
        if isinstance(each, RuntimeError) and _DEVICE_FAILED.search(str(each)):
            return DeviceFailedError(_describe_device_failure(each, device))
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception or one of its causes means that memory ran out."""
    return any(
        isinstance(each, DeviceMemoryError) or _is_memory_error(each) for each in _iterate_causes(error)
    )


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes or contexts, the newest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_memory_error(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out. Its causes are not searched."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _describe_shortage(
    error: BaseException,
    phase: Phase | None,
    device: torch.device,
    advise: Callable[[MemoryShortage], MemoryAdvice],
) -> str:
    """Return the message of a DeviceMemoryError: place, numbers, owners of the memory, and advice."""
    # The message of the CPU's allocator has bytes.
    text = re.sub(r"(\d+) bytes", lambda match: format_bytes(int(match[1])), str(error))
    if isinstance(error, (MemoryError, OSError)) or "DefaultCPUAllocator" in text:
        device = torch.device("cpu")  # host memory, even if the run computes on a GPU
    matches = {template: re.search(pattern, text) for template, pattern in _SIZE_PATTERNS.items()}
    sizes = {template: match[1] for template, match in matches.items() if match is not None}
    numbers = [template.format(size) for template, size in sizes.items()]
    if device.type == "cuda":
        if len(numbers) < 3:  # the message is not the allocator's
            numbers += _describe_gpu_memory(device)
    else:
        numbers.append(str(read_memory_usage()))
        process_limit = describe_process_limit()
        if process_limit:
            numbers.append(process_limit)
    requested = _parse_bytes(sizes.get(_REQUESTED)) or 0
    free = _parse_bytes(sizes.get(_FREE)) or 0
    allocated = _parse_bytes(sizes.get(_ALLOCATED))
    advice = advise(MemoryShortage(device.type, phase, max(0, requested - free), allocated))
    changes = advice.changes
    if device.type == "cuda" and "more reserved" in " ".join(numbers):
        fragments = "PYTORCH_ALLOC_CONF=expandable_segments:True, if much is reserved and not allocated"
        changes = [*changes, fragments]
    during = "" if phase is None else f" {phase}"
    place = thread_position(traceback.extract_tb(error.__traceback__)).place
    facts = [", ".join(numbers) or summarize_error(error), *advice.facts]
    return (
        f"out of memory on {device}{during}{advice.circumstances}, at {place}: {'; '.join(facts)}. What "
        f"helps, best first: {'; '.join(changes)}"
    )


def _parse_bytes(text: str | None) -> int | None:
    """Return the bytes of a text such as `2.50 GiB`; `None` for `None`."""
    if text is None:
        return None
    number, unit = text.split()
    prefix = " " if unit == "B" else unit[0]
    return int(float(number) * 1024 ** " KMGTPE".index(prefix))


def _describe_gpu_memory(device: torch.device) -> list[str]:
    """Return torch's peaks on a GPU and its free memory, as texts; empty if the device does not answer."""
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
    name = str(device or "the device")
    if "ECC" in text or "fallen off" in text:
        return (
            f"{name} failed: {text}; the hardware is at fault: see dmesg | grep -i xid, and do not use this "
            "GPU before a reset"
        )
    index = " (most often an index out of range: token ids, labels or positions)" if "assert" in text else ""
    place = thread_position(traceback.extract_tb(error.__traceback__)).place
    return (
        f"{name} failed{index}, at {place} or at an earlier line: {text}; nothing in its memory is saved. "
        "For the exact line, run the same command again with CUDA_LAUNCH_BLOCKING=1 in the environment"
    )
