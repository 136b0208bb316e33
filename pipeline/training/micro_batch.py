"""Finds the largest micro-batch that fits, for `batch.micro_batch_size: auto`.

Sizes are tried in the run's own engine before its first step; another engine would cost a second start. A
trial is a real step that the engine refuses: it leaves no trace. The run is therefore equal, bit by bit, to a
run whose recipe gives the number. Each size that was found is cached in a small file.

A rank that runs out of memory inside a collective makes all other ranks wait. Trials therefore begin small,
and the memory of each further size is predicted first. On a CPU the kernel kills a process that takes too
much memory. The size is therefore written to the disk before its trial, for the next start to read.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeline.config.batch_plan import BatchPlan
from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.data.batches import Batch, describe_value, iter_tensors
from pipeline.data.loader import TrainLoader
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.machine import available_memory, read_memory_usage
from pipeline.distributed.process_group import Job
from pipeline.distributed.watchdog import may_be_from_peer
from pipeline.engine.interface import Engine, StepLimits
from pipeline.engine.memory import trim_heap
from pipeline.errors import ConfigError, Terminated
from pipeline.files import GIB, MAX_CONFIGURATION_BYTES, read_regular_file, replace_file
from pipeline.models.blocks import reset_compilation
from pipeline.monitoring.metrics import read_peak_resident_bytes, read_resident_bytes, reset_resident_peak
from pipeline.objectives import Objective
from pipeline.training.device_failures import is_out_of_memory
from pipeline.training.safeguard import add_noise_keys

log = logging.getLogger(__name__)

MAX_TRIALS = 6
USABLE_SHARE = 0.90
"""Share of a rank's memory limit that a step may take: rows differ a little, and freed blocks leave gaps."""
TRIAL_SHARE = 0.95
"""Largest predicted share of the limit at which a size is still tried. If the prediction lies between
USABLE_SHARE and this, the measurement decides."""
MAX_GROWTH = 8
"""Largest ratio of a trial's size to the largest size tried before it."""
DOUBLING_RATIO = 4
"""Ratio of a size to the only size tried so far, above which its predicted memory per row is doubled."""
CACHE_FOLDER = "micro_batch_sizes"
PAGE_BYTES = 4096
REFUSE_STEP = StepLimits(-torch.inf, -torch.inf)
"""Limits that every step exceeds, so that the engine changes nothing."""
GROUPS_READ = 8
"""Number of steps' batches read from a user's own data set, whose rows may differ in length; the trial takes
the largest."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank in a trial, in bytes."""

    forward_increase: int
    """Largest increase during the forward of a micro-batch."""
    backward_peak: int
    """Peak from the first forward to the last backward."""
    update_peak: int
    """Peak from the optimizer's step on, which does not depend on the number of rows."""
    limit: int
    """Bytes that the rank may use in all."""

    @property
    def peak(self) -> int:
        """Peak over the whole step."""
        return max(self.backward_peak, self.update_peak)


TrialResults = Mapping[int, Sequence[MemoryUse]]
"""Memory of each rank, in the order of ranks, by micro-batch size."""


def fits_every_rank(uses: Sequence[MemoryUse]) -> bool:
    """Return whether a size fits on every rank."""
    return all(use.peak <= USABLE_SHARE * use.limit for use in uses)


def find_largest_fitting(tried: TrialResults) -> int | None:
    """Return the largest of the sizes tried that fits; `None` if none does."""
    return max((size for size, uses in tried.items() if fits_every_rank(uses)), default=None)


def predict_bytes(size: int, tried: TrialResults) -> list[float]:
    """Return the peak memory of each rank that is predicted for a size, in bytes.

    The peak of the backward grows linearly with the rows. The line goes through the two trials nearest to
    `size`. With a single trial, its slope is the increase of the forward per row.
    """
    sizes = sorted(tried)
    predicted = []
    for rank in range(len(tried[sizes[0]])):
        peaks = {each: tried[each][rank].backward_peak for each in sizes}
        if len(sizes) == 1:
            high = sizes[0]
            slope = tried[high][rank].forward_increase / high
            if size > DOUBLING_RATIO * high:  # a backward that recomputes adds more than the forward
                slope *= 2
        else:
            low, high = min(pairwise(sizes), key=lambda pair: abs(pair[0] + pair[1] - 2 * size))
            slope = max(0.0, (peaks[high] - peaks[low]) / (high - low))
        # The smallest, because after a larger trial the heap may keep memory that the update does not need.
        update_peak = min(uses[rank].update_peak for uses in tried.values())
        predicted.append(max(peaks[high] + slope * (size - high), update_peak))
    return predicted


def predict_share(size: int, tried: TrialResults) -> float:
    """Return the largest share of its memory limit that any rank is predicted to need for a size."""
    limits = (use.limit for use in tried[max(tried)])
    return max(peak / limit for peak, limit in zip(predict_bytes(size, tried), limits, strict=True))


def next_trial(candidates: Sequence[int], tried: TrialResults, guess: int | None) -> int | None:
    """Return the size to try next; `None` if the largest size that fits is known well enough.

    The first trial is a quarter of the guess, which may be twice too large, or else the smallest candidate. A
    second trial at a neighboring size gives the slope of the memory per row. From then on the largest size
    that is predicted to fit is tried, until the next larger one is measured or predicted not to fit.

    Args:
        candidates: Possible sizes, ascending.
        tried: Results of the trials so far.
        guess: Estimate of the largest size that fits; `None` without one.
    """
    if len(tried) >= MAX_TRIALS:
        return None
    if not tried:
        return max((size for size in candidates if size <= (guess or 0) / 4), default=candidates[0])
    best = find_largest_fitting(tried) or 0
    too_large = min(
        (size for size, uses in tried.items() if not fits_every_rank(uses)), default=candidates[-1] + 1
    )
    undecided = [size for size in candidates if best < size < too_large]
    if not undecided:
        return None
    expected_to_fit = [size for size in undecided if predict_share(size, tried) <= USABLE_SHARE]
    if not best:
        return expected_to_fit[-1] if expected_to_fit else undecided[0]
    farthest = max(MAX_GROWTH * max(tried), undecided[0])
    allowed = [size for size in undecided if size <= farthest and predict_share(size, tried) <= TRIAL_SHARE]
    if len(tried) > 1:
        promising = [size for size in allowed if size in expected_to_fit]
        if promising:
            return promising[-1]
        return allowed[0] if allowed else None
    smaller = [size for size in candidates if size < best]
    if allowed and (allowed[0] <= 2 * best or not smaller):
        return allowed[0]
    return smaller[-1] if smaller else None


class PeakMemory:
    """Measures a rank's peak memory: allocated by torch on a GPU, resident in the process on a CPU.

    Args:
        device: Device of the rank.
        local_world_size: Number of ranks on this machine, which share its free memory.
    """

    def __init__(self, device: torch.device, local_world_size: int):
        self._cuda = device if device.type == "cuda" else None
        self._local_world_size = local_world_size

    def begin(self) -> None:
        """Free unused memory and start a measurement."""
        gc.collect()
        if self._cuda is not None:
            torch.cuda.empty_cache()
        else:
            trim_heap()
        self.read_and_reset()

    def read_and_reset(self) -> int:
        """Return the peak in bytes since the last call or since `begin`, and start a new measurement."""
        if self._cuda is not None:
            peak = torch.cuda.max_memory_allocated(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
        else:
            peak = read_peak_resident_bytes()
            reset_resident_peak()
        return peak

    def read_current(self) -> int:
        """Return the bytes in use now."""
        return read_resident_bytes() if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def read_limit(self) -> int:
        """Return the bytes that this rank may use: those in use now and its share of the free memory."""
        if self._cuda is None:
            return read_resident_bytes() + available_memory() // self._local_world_size
        free, _ = torch.cuda.mem_get_info(self._cuda)  # excludes memory that CUDA and NCCL use themselves
        return free + torch.cuda.memory_reserved(self._cuda)


@contextmanager
def allocate_optimizer_states() -> Iterator[list[int]]:
    """Make optimizer states resident during a refused step, as they are after a step that counts.

    States of zeros take no memory on a CPU until something writes to them, so each page is written to.

    Yields:
        A list of one number, set by the optimizer's step: bytes of states that a refused step does not
        create, as for Muon.
    """
    missing_bytes = [0]

    def write_to_states(optimizer: Optimizer, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.Muon):  # creates no state for parameters without a gradient
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            stateless = [p for p in parameters if p not in optimizer.state]
            missing_bytes[0] = sum(p.numel() * p.element_size() for p in stateless)
        for state in list(optimizer.state.values()):
            if not isinstance(state, dict):
                continue
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.is_contiguous():
                    value.detach().view(-1)[:: max(1, PAGE_BYTES // value.element_size())].mul_(1)

    handle = register_optimizer_step_post_hook(write_to_states)
    try:
        yield missing_bytes
    finally:
        handle.remove()


@dataclass
class MicroBatchCache:
    """Results of earlier starts of one recipe on one kind of device, in one JSON file."""

    file: Path
    conditions: Mapping[str, Any]
    """JSON values that decide the size. Written for a person who reads the file."""
    found: int | None = None
    """Size that a search found; `None` if none has ended."""
    needed_bytes: int = 0
    """Peak memory of the fullest rank with the size `found`."""
    failed: int | None = None
    """Size whose trial never ended or ran out of memory; `None` if there is none."""

    def read(self) -> None:
        """Read the file of earlier starts. A file that cannot be read counts as empty."""
        try:
            content = json.loads(read_regular_file(self.file, MAX_CONFIGURATION_BYTES))
            found = content["found"]
            needed_bytes = content["needs"]
            failed = content["trying"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError):
            return
        if type(needed_bytes) is int and all(size is None or type(size) is int for size in (found, failed)):
            self.found = found
            self.needed_bytes = needed_bytes
            self.failed = failed

    def write(self, peaks: Mapping[str, int]) -> None:
        """Replace the file atomically. A folder that cannot be written is a warning.

        Args:
            peaks: Bytes of the fullest rank by size tried, for a person who reads the file.
        """
        content = {
            "found": self.found,
            "needs": self.needed_bytes,
            "trying": self.failed,
            "tried": peaks,
            "known": self.conditions,
        }
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.file, json.dumps(content, indent=2))
        except OSError as error:
            log.warning(
                "the micro_batch_size found is not saved, so the next start searches again: %s: %s",
                self.file,
                error.strerror,
            )


@dataclass
class MicroBatchSearch:
    """Finds the largest micro-batch that fits, for one run. Every method is collective."""

    config: RunConfig
    resolved: ResolvedSettings
    job: Job
    engine: Engine
    objective: Objective
    build_loader: Callable[[BatchPlan], TrainLoader]
    """Function that returns a loader of this rank's batches for a plan."""
    cache_folder: Path
    """The recipe's cache folder, for the results of earlier starts."""
    guess: int | None = None
    """The planner's estimate of the largest size that fits; `None` without one."""
    limit: int | None = None
    """Bytes that a rank may use; `None` for what it uses now plus its share of the device's free memory."""

    def __post_init__(self) -> None:
        self._memory = PeakMemory(self.job.device, self.job.ranks.local_world_size)
        self._tried: dict[int, list[MemoryUse]] = {}

    def resolve_auto(self) -> ResolvedSettings:
        """Return the settings with a number in place of `auto`, and set the engine to it.

        Raises:
            RuntimeError, MemoryError, OSError: A trial ran out of memory, although its prediction fit; the
                next start tries only smaller sizes.
            ConfigError: Memory cannot be measured on this system.
        """
        plan = self.resolved.batch_plan
        if not plan.is_provisional:
            return self.resolved
        size = self.find() if len(plan.candidates) > 1 else plan.candidates[0]
        found = self.resolved.with_micro_batch_size(size)
        self.engine.set_batch_division(size, found.batch_plan.gradient_accumulation_steps)
        return found

    def find(self) -> int:
        """Return the largest size that fits, from the cache or by trials. Resets the engine's phase times."""
        cache = self._cache = self._read_cache()
        candidates = self.resolved.batch_plan.candidates
        if cache.found in candidates and self._has_room_for_cached():
            self._log_on_main_rank(
                f"micro_batch_size {cache.found}, found at an earlier start (to search again, delete "
                f"{cache.file})"
            )
            return cache.found
        guess = self.guess
        if cache.failed is not None:
            self._log_on_main_rank(
                f"micro_batch_size {cache.failed} ran out of memory or was interrupted at an earlier start "
                f"({cache.file})"
            )
            if smaller := [size for size in candidates if size < cache.failed]:
                candidates = smaller
            else:
                guess = None  # try the smallest again and grow from there
        while (size := next_trial(candidates, self._tried, guess)) is not None:
            with self._record_trial(size):
                self._tried[size] = self.measure(size)
        self._begin_measurement()  # frees the memory of the last trial
        size = find_largest_fitting(self._tried) or min(self._tried)
        if cache.failed is not None and fits_every_rank(self._tried[size]) and size >= cache.failed:
            cache.failed = None  # that trial was interrupted for another reason
        cache.found = size
        cache.needed_bytes = max(use.peak for use in self._tried[size])
        self._write_cache()
        self._log_on_main_rank(self._format_summary(size))
        if self.resolved.compile:
            reset_compilation(self.engine.module)
        self.engine.phases.restart()
        return size

    def _read_cache(self) -> MicroBatchCache:
        """Read the results of earlier starts under the same conditions, equal on all ranks."""
        conditions = self._describe_conditions()
        name = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:32]
        cache = MicroBatchCache(self.cache_folder / CACHE_FOLDER / f"{name}.json", conditions)
        self.job.run_on_main_rank(cache.read)
        results = (cache.found, cache.needed_bytes, cache.failed)
        cache.found, cache.needed_bytes, cache.failed = self.job.broadcast_object(results)
        return cache

    def _write_cache(self) -> None:
        if self.job.ranks.is_main_process:
            peaks = {str(size): max(use.peak for use in uses) for size, uses in self._tried.items()}
            self._cache.write(peaks)

    def _has_room_for_cached(self) -> bool:
        """Return whether every rank's device has room for the memory that the cached size needed.

        If so, the size is used even if a trial failed later: less memory was free at that time.
        """
        return all(self.job.gather_object(self._cache.needed_bytes <= TRIAL_SHARE * self._read_limit()))

    def measure(self, size: int) -> list[MemoryUse]:
        """Run a trial step with micro-batches of this size, and return the memory of each rank.

        Peaks are read where phases end. The optimizer's step needs the same memory for any number of rows. If
        it needed the most, the peak of the whole step would not show how forward and backward grow.

        Leaves the engine with this batch division.
        """
        engine = self.engine
        stages = self.resolved.split.pipeline_stages
        plan = self.resolved.batch_plan.with_micro_batch_size(size)
        # The second micro-batch adds to the first one's gradients; each pipeline stage needs one to be busy.
        count = min(plan.gradient_accumulation_steps, max(2, stages))
        batches = self._read_batches(replace(plan, gradient_accumulation_steps=count))
        engine.set_batch_division(size, count)
        seed_step(self.config.seed, 0, engine.seed_rank)
        if self.resolved.compile:  # compiling takes memory itself, so it comes before the measured step
            reset_compilation(engine.module)
            engine.train_step(batches, self.objective, 0.0, 0, REFUSE_STEP)
        self._begin_measurement()
        limit = self._read_limit()
        before_forward = self._memory.read_current()
        peaks: dict[str, int] = {}
        forward_increase = 0

        def read_peak(phase: str) -> None:
            nonlocal before_forward, forward_increase
            peak = self._memory.read_and_reset()
            peaks[phase] = max(peaks.get(phase, 0), peak)
            if phase == "forward":
                forward_increase = max(forward_increase, peak - before_forward)
            elif phase != "communication":  # ZeRO 3 interrupts a forward to gather parameters
                before_forward = self._memory.read_current()

        with allocate_optimizer_states() as missing_bytes, engine.phases.notify_phase_ends(read_peak):
            engine.train_step(batches, self.objective, 0.0, 0, REFUSE_STEP)
        read_peak("other")
        update_peak = peaks.pop("optimizer", 0) + missing_bytes[0]
        use = MemoryUse(
            forward_increase=forward_increase,
            backward_peak=max(peaks.values()) + missing_bytes[0],
            update_peak=update_peak,
            limit=min(limit, self._read_limit()),  # NCCL allocates its buffers in the first step
        )
        return self.job.gather_object(use)

    def _read_batches(self, plan: BatchPlan) -> list[Batch]:
        """Return the micro-batches of one step of the plan, with rows of the training data."""
        loader = self.build_loader(plan)
        config = self.config
        is_custom = ":" in config.data.kind  # an import path of the user's own data set
        num_groups = GROUPS_READ if is_custom else 1
        groups = [loader.read_again(number * plan.global_batch_size) for number in range(num_groups)]
        group = max(groups, key=_count_bytes)
        return group if config.model.neftune_alpha is None else add_noise_keys(group, config.seed, 0)

    def _begin_measurement(self) -> None:
        """Free unused memory and start a measurement.

        Raises:
            ConfigError: Memory cannot be measured on this system.
        """
        try:
            self._memory.begin()
        except OSError as error:
            raise ConfigError(
                f"batch.micro_batch_size: auto: memory cannot be measured here ({error}); give a number"
            ) from None

    def _read_limit(self) -> int:
        return self.limit or self._memory.read_limit()

    @contextmanager
    def _record_trial(self, size: int) -> Iterator[None]:
        """Record a trial in the cache file while it runs, so that the next start finds a killed one."""
        cache = self._cache
        job = self.job
        failed_before = cache.failed
        cache.failed = size
        self._write_cache()
        job.barrier()
        try:
            yield
        except BaseException as error:
            # A launcher sends SIGTERM if another rank has ended, which may have run out of memory.
            is_by_launcher = isinstance(error, Terminated) and job.ranks.world_size > 1
            if is_out_of_memory(error):
                log.warning(
                    "batch.micro_batch_size: auto: the trial of %d ran out of memory; run the same command "
                    "again, and it tries smaller sizes only (%s)",
                    size,
                    cache.file,
                )
            elif not is_by_launcher and not may_be_from_peer(error):
                cache.failed = failed_before
                self._write_cache()
            raise
        cache.failed = failed_before

    def _log_on_main_rank(self, line: str) -> None:
        if self.job.ranks.is_main_process:
            log.info("%s", line)

    def _format_summary(self, size: int) -> str:
        """Return one line with the sizes tried, their memory and the choice."""
        limit = min(use.limit for use in self._tried[size])
        peaks = ", ".join(
            f"{max(use.peak for use in uses) / GIB:.2f} at {each}" for each, uses in self._tried.items()
        )
        line = f"micro_batch_size {size}, found by trials (GiB of the fullest rank): {peaks}; "
        line += f"a step may take {USABLE_SHARE * limit / GIB:.2f} of {limit / GIB:.2f}"
        if not fits_every_rank(self._tried[size]):
            line += "; this size takes more, and no smaller one is possible: the run may run out of memory"
        return f"{line}; saved in {self._cache.file}"

    def _describe_conditions(self) -> dict[str, Any]:
        """Return everything that the size depends on, as JSON values; their hash names the cache file."""
        config = self.config
        resolved = self.resolved
        device = self.job.device
        single_row = replace(resolved.batch_plan.with_micro_batch_size(1), gradient_accumulation_steps=1)
        (row,) = self.build_loader(single_row).read_again(0)
        if device.type == "cuda":
            card = torch.cuda.get_device_properties(device)
            device_name = card.name
            device_bytes = card.total_memory
        else:
            device_name = "cpu"
            device_bytes = read_memory_usage().limit
        sections = ("model", "adapter", "objective", "optimizer")
        return config.model_dump(mode="json", include=set(sections)) | {
            "row": {key: describe_value(value) for key, value in row.items()},
            "split": str(resolved.split),
            "ranks": [resolved.split.world_size, self.job.ranks.local_world_size],
            "compile": resolved.compile,
            "tf32": resolved.tf32,
            "deepspeed": resolved.deepspeed,
            "samples": resolved.batch_plan.global_batch_size,
            "device": device_name,
            "memory_gib": round(device_bytes / GIB, 1),
            "limit": self.limit,
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "deepspeed")},
        }


def _count_bytes(group: Sequence[Batch]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in iter_tensors(group))
