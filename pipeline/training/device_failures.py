"""Messages about a device that is out of memory or failed: one line, where, the numbers, what helps.

Advice on memory comes as words to put behind the command, with what each gains. Asks a failed device nothing.
"""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from pipeline.config.batch_plan import BatchPlan
from pipeline.config.loading import get_dotted
from pipeline.config.settings import Resolved, Settings
from pipeline.config.split import Device, Split
from pipeline.distributed.diagnosis import advise
from pipeline.distributed.machine import memory_now, own_limit
from pipeline.distributed.process_group import Job, describe_device
from pipeline.distributed.progress import LOADING, Phase, phase_of
from pipeline.distributed.watchdog import thread_position
from pipeline.errors import DeviceFailedError, DeviceMemoryError, PipelineError, one_line
from pipeline.files import GIB, format_bytes
from pipeline.planner.forecast import Change, EngineStates, Planned, ranked

MOST = 3
ENOUGH, NOTHING = 10, 100
"""Parts of what was held: what gains less is not enough by itself, or not worth a word."""
# Measured of the shipped recipe, docs/how-to.md: what stays of activations where all blocks recompute, and
# how much longer a step takes.
KEPT_BY_RECOMPUTATION, SLOWER_BY_RECOMPUTATION = 1 / 11, 1.45
# If the network, or the processor's memory, is not the limit.
SLOWER_BY_ZERO3 = 1.1
SLOWER_BY_OFFLOAD = 1.5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shortage:
    """Memory that was out."""

    kind: str
    """`cuda` or `cpu`: whose."""
    phase: Phase | None = None
    """Of the run, where it has a name."""
    missing: int = 0
    """Bytes that were asked for and not there: the least that has to go."""
    allocated: int | None = None
    """Bytes, where the allocator said so; None: what is so now."""
    held: EngineStates | None = None
    """What held the memory; None: there was no engine."""
    is_beside: bool = False
    """Whether it is the host's memory beside a GPU's."""


class Remedies(NamedTuple):
    """What takes less memory, and what else is told."""

    levers: list[str]
    """Most first."""
    doing: str = ""
    """What was done: ` at micro_batch_size 8`; empty: nothing to say."""
    facts: tuple[str, ...] = ()
    """What was held by what, what the plan had said."""


@dataclass
class TrainingAdvice:
    """What is known of a run on this rank, and what to change of it. It is filled as the run is built."""

    settings: Settings
    job: Job | None
    """None: it is not joined yet."""
    before: int = 0
    """Bytes that the process had resident before there was a model."""
    states: Callable[[str], EngineStates] | None = None
    """What the engine holds on `cuda` or `cpu`; None: there is none yet."""
    plan: Callable[[], Planned | None] | None = None
    """None, or gives it: nothing is known of such a run."""

    def __call__(self, shortage: Shortage) -> Remedies:
        """Return what helps where memory is out."""
        is_beside = self.job is not None and self.job.device.type == "cuda" and shortage.kind == "cpu"
        held, planned = self._held(shortage), self._planned()
        shortage = replace(shortage, held=held, is_beside=is_beside)
        facts = [] if held is None else [f"held: {held}"]
        if planned is not None and not is_beside:
            facts.append(str(planned))
        if self.job is not None:
            with suppress(PipelineError):
                device = describe_device(self.job.device)
                resolved = self.settings.resolve(self.job.ranks.world_size, device)
                plan = resolved.plan
                doing = "" if plan.is_open else f" at micro_batch_size {plan.micro_batch_size}"
                found = [*_changes(self.settings, resolved, self.job, shortage)]
                return Remedies(_first(found, shortage, planned), doing, tuple(facts))
        return Remedies([*elsewhere(shortage.kind), "a smaller model"], "", tuple(facts))

    def of_killed(self) -> str:
        """Return what helps where a rank of the run was killed for the host's memory, as others know it."""
        with suppress(PipelineError, RuntimeError, MemoryError):  # beside the thread that trains
            return f"what helps, most first: {'; '.join(self(Shortage('cpu')).levers)}"
        return advise()

    def _planned(self) -> Planned | None:
        """Return what the plan says: worked out here, where it costs no run a moment."""
        try:
            return None if self.plan is None else self.plan()
        except Exception:  # of a formula, or for want of memory: the plan is not the news
            log.debug("no plan beside what ran out of memory", exc_info=True)
            return None

    def _held(self, shortage: Shortage) -> EngineStates | None:
        """Return what the rank holds on what is out of memory; None: there is no engine."""
        if self.states is None:
            return None
        total, before = shortage.allocated, 0
        if shortage.kind == "cpu":
            total, before = memory_now().resident, self.before
        elif total is None:
            total = torch.cuda.memory_allocated()
        with suppress(RuntimeError, AttributeError, MemoryError):  # closed meanwhile; not a byte is left
            states = self.states(shortage.kind)
            return replace(states, activations=max(0, total - states.total - before), before=before)
        return None


def _changes(settings: Settings, resolved: Resolved, job: Job, shortage: Shortage) -> Iterator[Change]:
    """Yield the changes that there are, each accepted by the settings."""
    device = describe_device(job.device)
    for change in (
        *_of_batches(settings, resolved.plan, shortage),
        *_of_states(settings, resolved.split, shortage),
        *_of_the_host(settings, device, job.ranks.local_world_size, shortage),
        *_of_rows(settings, shortage),
    ):
        if not change.overrides or _is_accepted(change.overrides, settings, resolved, device):
            yield change


def _is_accepted(words: tuple[str, ...], settings: Settings, resolved: Resolved, device: Device) -> bool:
    with suppress(PipelineError, OSError):
        settings.followed_by(words).resolve(resolved.split.world_size, device)
        return True
    return False


def _share(share: float, shortage: Shortage) -> int | None:
    """Return so much of the activations, and of what was refused, which is one where a batch is computed."""
    if shortage.held is None:
        return None
    is_one = shortage.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION)
    return int(share * (shortage.held.activations + is_one * shortage.missing))


def _of_batches(settings: Settings, plan: BatchPlan, shortage: Shortage) -> Iterator[Change]:
    """What makes activations smaller."""
    if shortage.phase in LOADING or shortage.is_beside:
        return
    if (smaller := smaller_parts(plan)) is not None:
        words, parts = smaller
        why = f"the same step in {parts} times as many parts"
        yield Change("smaller micro-batch", words, _share(1 - 1 / parts, shortage), None, why)
    model = settings.config.model.language_model
    if model is not None and model.activation_checkpointing != "full":
        why, words = "blocks are computed again in the backward", ("model.activation_checkpointing=full",)
        gain = _share(1 - KEPT_BY_RECOMPUTATION, shortage)
        yield Change("recomputation", words, gain, SLOWER_BY_RECOMPUTATION, why)


def _of_rows(settings: Settings, shortage: Shortage) -> Iterator[Change]:
    length = settings.config.data.tokens_per_row
    if length and length > 1 and shortage.phase not in LOADING and not shortage.is_beside:
        why = f"now {length}: other rows, another curve"
        yield Change(
            name="shorter rows",
            overrides=(f"data.sequence_length={length // 2}",),
            gain=None,
            slower=None,
            why=why,
            other_curve=True,
        )


def _of_states(settings: Settings, split: Split, shortage: Shortage) -> Iterator[Change]:
    """What divides weights, gradients and optimizer, or moves them to the host."""
    states = shortage.held
    ranks, stage = split.dp_world_size * split.sequence_parallel, split.zero_stage
    has_json = settings.deepspeed is not None
    if ranks > 1 and stage < 3 and split.pipeline_stages == 1 and not shortage.is_beside:
        gain = None
        if states is not None:
            whole = (states.parameters, states.gradients * (stage < 2), states.optimizer * (stage < 1))
            gain = int(sum(whole) * (1 - 1 / ranks))
        words = ("ds.zero_optimization.stage=3",) if has_json else ("--deepspeed", "zero3")
        why = f"weights, gradients and optimizer divided over the {ranks} ranks"
        yield Change("ZeRO 3", words, gain, SLOWER_BY_ZERO3, why)
    offloads = get_dotted(settings.deepspeed or {}, "zero_optimization.offload_optimizer.device")
    if shortage.kind == "cuda" and offloads in (None, "none"):
        words = ("--deepspeed", "zero3_offload")
        if has_json and stage:
            words = ("ds.zero_optimization.offload_optimizer.device=cpu",)
        gain = None if states is None else states.optimizer
        yield Change("offload", words, gain, SLOWER_BY_OFFLOAD, "the optimizer in the host's memory")


def _of_the_host(settings: Settings, device: Device, ranks_here: int, shortage: Shortage) -> Iterator[Change]:
    """What makes less of the machine's memory."""
    if shortage.kind != "cpu":
        return
    config, json = settings.config, settings.deepspeed or {}
    if config.loader.num_workers:
        why = f"now {config.loader.num_workers} processes a rank"
        yield Change("fewer workers", ("loader.num_workers=0",), None, None, why)
    for what in ("optimizer", "param"):
        key = f"zero_optimization.offload_{what}.device"
        if device.kind == "cuda" and get_dotted(json, key) == "cpu":
            yield Change("no offload", (f"ds.{key}=none",), None, None, "on the GPUs again")
    if ranks_here > 1:
        half = ranks_here // 2
        name = f"{half} of {ranks_here} ranks on this machine"
        yield Change(name, (), None, None, f"--nproc-per-node {half}, of deepspeed --num_gpus {half}")


def smaller_parts(plan: BatchPlan) -> tuple[tuple[str, ...], int] | None:
    """The same step in smaller parts: half, or the next part that divides; and how many parts of one."""
    if plan.is_open:
        return None
    size = plan.micro_batch_size
    parts = next((n for n in range(2, size + 1) if size % n == 0), None)
    if parts is None:
        return None
    steps = plan.gradient_accumulation_steps * parts
    return (f"batch.micro_batch_size={size // parts}", f"batch.gradient_accumulation_steps={steps}"), parts


def _first(found: list[Change], shortage: Shortage, planned: Planned | None) -> list[str]:
    """Return the first three, and what is left where there are none: by what was measured, and what a plan
    knows besides.
    """
    held = 0 if shortage.held is None else shortage.held.total
    # What was refused is only the first of what the step still needs.
    missing = max(shortage.missing, held // ENOUGH)
    some = [each for each in found if each.gain is None or each.gain > held // NOTHING]
    if planned is not None and not shortage.is_beside:
        missing = max(missing, planned.peak - planned.there)
        known = {each.overrides for each in some}
        some += [each for each in planned.changes if each.overrides not in known]
    told = [str(change) for change in ranked(some, lambda each: (each.gain or 0) >= missing)[:MOST]]
    return told or [*elsewhere(shortage.kind), "a smaller model"]


def of_evaluation(micro_batch_size: int, sequence_length: int | None, shortage: Shortage) -> Remedies:
    """For a model that is whole in this process, and evaluated."""
    smaller = (
        [f"batch.micro_batch_size={micro_batch_size // 2} (now {micro_batch_size}), which changes no number"]
        if micro_batch_size > 1
        else []
    )
    if sequence_length:
        smaller.append(f"a shorter data.sequence_length (now {sequence_length})")
    return Remedies([*smaller, *elsewhere(shortage.kind)], f" at micro_batch_size {micro_batch_size}")


def of_generation(max_new_tokens: int, shortage: Shortage) -> Remedies:
    """For a model that writes after a prompt."""
    fewer = f"fewer tokens (max_new_tokens, now {max_new_tokens})"
    return Remedies([fewer, "a shorter prompt", *elsewhere(shortage.kind)])


def of_files(shortage: Shortage) -> Remedies:
    """For what reads, converts or writes files and loads no model."""
    return Remedies(elsewhere(shortage.kind))


def elsewhere(kind: str) -> list[str]:
    """What is not the run's own."""
    if kind == "cuda":
        return [
            "a GPU that nothing else uses (nvidia-smi), or a larger one",
            "CUDA_VISIBLE_DEVICES= (empty), which leaves it to the CPU",
        ]
    look = "ps -eo rss,user,comm --sort=-rss | head"
    return [f"an end to what else takes memory here ({look})", "a higher limit"]


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
