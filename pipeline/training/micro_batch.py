"""Finds the largest micro-batch that fits, for `batch.micro_batch_size: auto`.

Sizes are tried in the run's own engine before its first step; another engine would cost a second start. A
trial is a real step that is refused and leaves no trace, so the run equals one with the number given, to the
last bit. Sizes that were found are cached in one small file each.

No rank may run out of memory inside a collective, where the others would wait. So sizes only grow, and each
is predicted from smaller ones first. On a CPU nothing fails: the kernel kills the process. So the size is
written to the disk before its trial, and the next start reads which size was being tried.
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
from pipeline.distributed.watchdog import is_from_peers
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

MOST_TRIALS = 6
MARGIN = 0.90
"""Share of a rank's memory limit that a step may take: rows differ a little, and freed blocks leave gaps."""
TRIED_UP_TO = 0.95
"""Largest predicted share at which a size is tried. Between MARGIN and this, the measurement decides."""
LONGEST_STRIDE = 8
"""Largest ratio of a trial to the largest trial before it."""
FAR = 4
"""Ratio to the first trial above which a prediction from that trial alone doubles its slope."""
FOLDER = "micro_batch_sizes"
PAGE = 4096
NOTHING_STAYS = StepLimits(-torch.inf, -torch.inf)
LOOKED_AT = 8
"""Number of groups read from a user's own data set, whose rows may differ in length; the largest is tried."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank in a trial, in bytes."""

    forward: int
    """Largest increase during a forward."""
    work: int
    """Peak before the optimizer's step."""
    update: int
    """Peak from the optimizer's step on, which does not depend on the number of rows."""
    limit: int
    """Bytes that the rank may hold."""

    @property
    def most(self) -> int:
        """Peak over the whole step."""
        return max(self.work, self.update)


TrialResults = Mapping[int, Sequence[MemoryUse]]
"""Memory of each rank, in the order of ranks, by micro-batch size."""


def fits_every_rank(uses: Sequence[MemoryUse]) -> bool:
    """Return whether a size fits on every rank."""
    return all(use.most <= MARGIN * use.limit for use in uses)


def find_largest_fitting(tried: TrialResults) -> int | None:
    """Return the largest size that was tried and fits; `None` if none does."""
    return max((size for size, uses in tried.items() if fits_every_rank(uses)), default=None)


def predict_bytes(size: int, tried: TrialResults) -> list[float]:
    """Return the predicted bytes of each rank.

    The peak before the update grows with the rows: along the line through the two nearest trials, or from a
    single trial by the increase of its forward.
    """
    sizes = sorted(tried)
    found = []
    for rank in range(len(tried[sizes[0]])):
        work = {each: tried[each][rank].work for each in sizes}
        if len(sizes) == 1:
            high = sizes[0]
            slope = tried[sizes[0]][rank].forward / sizes[0]
            slope *= 2 if size > FAR * high else 1  # a backward that recomputes adds more than the forward
        else:
            low, high = min(pairwise(sizes), key=lambda pair: abs(pair[0] + pair[1] - 2 * size))
            slope = max(0.0, (work[high] - work[low]) / (high - low))
        update = min(uses[rank].update for uses in tried.values())  # a heap may keep more of larger ones
        found.append(max(work[high] + slope * (size - high), update))
    return found


def predict_share(size: int, tried: TrialResults) -> float:
    """Return the largest predicted share of any rank's memory limit."""
    limits = (use.limit for use in tried[max(tried)])
    return max(held / limit for held, limit in zip(predict_bytes(size, tried), limits, strict=True))


def next_trial(candidates: Sequence[int], tried: TrialResults, guess: int | None) -> int | None:
    """Return the size to try next; `None` if `find_largest_fitting` is the answer.

    The first trial is a quarter of the guess, which may be twice too large, or else the smallest candidate. A
    second trial next to it gives a line. Then the largest size that is predicted to fit is confirmed, until
    the next larger one is measured or predicted not to fit.

    Args:
        candidates: Possible sizes, ascending.
        tried: Results of the trials so far.
        guess: Estimate of the answer; `None` without one.
    """
    if len(tried) >= MOST_TRIALS:
        return None
    if not tried:
        return max((size for size in candidates if size <= (guess or 0) / 4), default=candidates[0])
    best = find_largest_fitting(tried) or 0
    too_large = min(
        (size for size, uses in tried.items() if not fits_every_rank(uses)), default=candidates[-1] + 1
    )
    left = [size for size in candidates if best < size < too_large]
    if not left:
        return None
    expected = [size for size in left if predict_share(size, tried) <= MARGIN]
    if not best:
        return (expected or left[:1])[-1]
    farthest = max(LONGEST_STRIDE * max(tried), left[0])
    within = [size for size in left if size <= farthest and predict_share(size, tried) <= TRIED_UP_TO]
    if len(tried) > 1:
        return max((size for size in within if size in expected), default=within[0] if within else None)
    smaller = [size for size in candidates if size < best]
    if within and (within[0] <= 2 * best or not smaller):
        return within[0]
    return smaller[-1] if smaller else None


class PeakMemory:
    """Measures a rank's peak memory: allocated by torch on a GPU, resident in the process on a CPU.

    Args:
        device: Device of the rank.
        sharers: Number of ranks on this machine.
    """

    def __init__(self, device: torch.device, sharers: int):
        self._cuda = device if device.type == "cuda" else None
        self._sharers = sharers

    def begin(self) -> None:
        """Free unused memory and start a measurement."""
        gc.collect()
        if self._cuda is not None:
            torch.cuda.empty_cache()
        else:
            trim_heap()
        self.read_and_reset()

    def read_and_reset(self) -> int:
        """Return the peak in bytes since the last call or since `begin`, and start anew."""
        if self._cuda is not None:
            most = torch.cuda.max_memory_allocated(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
        else:
            most = read_peak_resident_bytes()
            reset_resident_peak()
        return most

    def now(self) -> int:
        """Return the bytes held now."""
        return read_resident_bytes() if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def limit(self) -> int:
        """Return the bytes that this rank may hold: those it holds now and its share of the free memory."""
        if self._cuda is None:
            return read_resident_bytes() + available_memory() // self._sharers
        free, _ = torch.cuda.mem_get_info(self._cuda)  # excludes memory that CUDA and NCCL use themselves
        return free + torch.cuda.memory_reserved(self._cuda)


@contextmanager
def allocate_optimizer_states() -> Iterator[list[int]]:
    """Make optimizer states resident during a refused step, as a step that counts would.

    States of zeros take no memory on a CPU until something writes to them, so each page is written to.

    Yields:
        One number in a list: bytes of states that a refused step does not create, as for Muon.
    """
    unmade = [0]

    def look(optimizer: Optimizer, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.Muon):  # creates no state for parameters without a gradient
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            unmade[0] = sum(p.numel() * p.element_size() for p in parameters if p not in optimizer.state)
        for state in list(optimizer.state.values()):
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.is_contiguous():
                    value.detach().view(-1)[:: max(1, PAGE // value.element_size())].mul_(1)

    handle = register_optimizer_step_post_hook(look)
    try:
        yield unmade
    finally:
        handle.remove()


@dataclass
class MicroBatchCache:
    """Results of earlier starts of one recipe on one kind of device, in one file."""

    file: Path
    known: Mapping[str, Any]
    """JSON values that decide the size."""
    found: int | None = None
    """Size that was found; `None` if none was."""
    needs: int = 0
    """Bytes that the fullest rank held with the size found."""
    trying: int | None = None
    """Size whose trial never ended or ran out of memory; `None` if there is none."""

    def read(self) -> None:
        """Read the file of earlier starts. A file that cannot be read counts as empty."""
        try:
            kept = json.loads(read_regular_file(self.file, MAX_CONFIGURATION_BYTES))
            found, needs, trying = (kept[name] for name in ("found", "needs", "trying"))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError):
            return
        if type(needs) is int and all(each is None or type(each) is int for each in (found, trying)):
            self.found = found
            self.needs = needs
            self.trying = trying

    def write(self, tried: Mapping[str, int]) -> None:
        """Replace the file atomically. If the folder cannot be written, each start searches again."""
        content = {"found": self.found, "needs": self.needs, "trying": self.trying}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.file, json.dumps(content | {"tried": tried, "known": self.known}, indent=2))
        except OSError as error:
            log.warning(
                "the micro_batch_size found is not saved, so the next start searches again: %s: %s",
                self.file,
                error.strerror,
            )


@dataclass
class MicroBatchSearch:
    """Finds the largest fitting micro-batch for one run. Every method is collective."""

    config: RunConfig
    resolved: ResolvedSettings
    job: Job
    engine: Engine
    objective: Objective
    loader: Callable[[BatchPlan], TrainLoader]
    """Function that returns a loader of this rank's batches for a plan."""
    cache: Path
    """Folder of the results of earlier starts."""
    guess: int | None = None
    """Estimate of the answer by the planner; `None` without one."""
    limit: int | None = None
    """Bytes that a rank may hold; `None` for the rank's share of its device."""

    def __post_init__(self) -> None:
        self._memory = PeakMemory(self.job.device, self.job.ranks.local_world_size)
        self._tried: dict[int, list[MemoryUse]] = {}

    def resolve_auto(self) -> ResolvedSettings:
        """Return the settings with a number in place of `auto`, and set the engine to it.

        Raises:
            DeviceMemoryError: A trial took more memory than predicted; the next start begins below it.
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
        """Return the largest size that fits, from the cache or by trials."""
        job = self.job
        known = self._describe_conditions()
        name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
        kept = self._kept = MicroBatchCache(self.cache / FOLDER / f"{name}.json", known)
        job.run_on_main_rank(kept.read)
        kept.found, kept.needs, kept.trying = job.broadcast_object((kept.found, kept.needs, kept.trying))
        candidates = self.resolved.batch_plan.candidates
        guess = self.guess
        if kept.trying is not None:
            self._tell(f"{kept.trying} ran out of memory at an earlier start, or was cut off ({kept.file})")
            if smaller := [size for size in candidates if size < kept.trying]:
                candidates = smaller
            else:
                guess = None  # try the smallest again and grow from there
        if kept.found in candidates and self._fits_still():
            self._tell(f"micro_batch_size {kept.found}, found before ({kept.file}; without it, found anew)")
            return kept.found
        while (size := next_trial(candidates, self._tried, guess)) is not None:
            with self._record_trial(size):
                self._tried[size] = self.measure(size)
        self._begin()  # frees the memory of the last trial
        size = find_largest_fitting(self._tried) or min(self._tried)
        if kept.trying is not None and fits_every_rank(self._tried[size]) and size >= kept.trying:
            kept.trying = None  # it was cut off for another reason
        kept.found = size
        kept.needs = max(use.most for use in self._tried[size])
        self._write()
        self._tell(self._format_summary(size))
        if self.resolved.compile:
            reset_compilation(self.engine.module)
        self.engine.phases.restart()
        return size

    def _write(self) -> None:
        if self.job.ranks.is_main_process:
            self._kept.write({str(size): max(use.most for use in uses) for size, uses in self._tried.items()})

    def _fits_still(self) -> bool:
        """Return whether every rank's device has room for the memory measured at an earlier start."""
        return all(self.job.gather_object(self._kept.needs <= TRIED_UP_TO * self._limit()))

    def measure(self, size: int) -> list[MemoryUse]:
        """Run a trial step with micro-batches of this size, and return the memory of each rank.

        Peaks are read where phases end. The optimizer's step needs the same memory for any number of rows, so
        a single peak would hide the growth of the others.
        """
        engine = self.engine
        stages = self.resolved.split.pipeline_stages
        plan = self.resolved.batch_plan.with_micro_batch_size(size)
        # The second micro-batch adds to the first one's gradients; each pipeline stage needs one to be busy.
        count = min(plan.gradient_accumulation_steps, max(2, stages))
        batches = self._batches(replace(plan, gradient_accumulation_steps=count))
        engine.set_batch_division(size, count)
        seed_step(self.config.seed, 0, engine.seed_rank)
        if self.resolved.compile:  # compiling takes memory itself, so it comes before the measured step
            reset_compilation(engine.module)
            engine.train_step(batches, self.objective, 0.0, 0, NOTHING_STAYS)
        self._begin()
        limit = self._limit()
        began = self._memory.now()
        most: dict[str, int] = {}
        forward = 0

        def ends(phase: str) -> None:
            nonlocal began, forward
            peak = self._memory.read_and_reset()
            most[phase] = max(most.get(phase, 0), peak)
            if phase == "forward":
                forward = max(forward, peak - began)
            elif phase != "communication":  # ZeRO 3 interrupts a forward to gather parameters
                began = self._memory.now()

        with allocate_optimizer_states() as unmade, engine.phases.notify_phase_ends(ends):
            engine.train_step(batches, self.objective, 0.0, 0, NOTHING_STAYS)
        ends("other")
        update = most.pop("optimizer", 0) + unmade[0]
        work = max(most.values()) + unmade[0]
        limit = min(limit, self._limit())  # NCCL allocates its buffers in the first step
        return self.job.gather_object(MemoryUse(forward, work, update, limit))

    def _batches(self, plan: BatchPlan) -> list[Batch]:
        """Read a group of real rows."""
        loader = self.loader(plan)
        config = self.config
        looked_at = LOOKED_AT if ":" in config.data.kind else 1
        groups = [loader.read_again(number * plan.global_batch_size) for number in range(looked_at)]
        group = max(groups, key=_bytes_of)
        return group if config.model.neftune_alpha is None else add_noise_keys(group, config.seed, 0)

    def _begin(self) -> None:
        try:
            self._memory.begin()
        except OSError as error:
            raise ConfigError(
                f"batch.micro_batch_size: auto: memory cannot be measured here ({error}); give a number"
            ) from None

    def _limit(self) -> int:
        return self.limit or self._memory.limit()

    @contextmanager
    def _record_trial(self, size: int) -> Iterator[None]:
        """Record a trial on the disk while it runs, so that the next start knows of one that never ended."""
        kept = self._kept
        job = self.job
        before = kept.trying
        kept.trying = size
        self._write()
        job.barrier()
        try:
            yield
        except BaseException as error:
            # A launcher sends SIGTERM if another rank has ended.
            is_told = isinstance(error, Terminated) and job.ranks.world_size > 1
            if is_out_of_memory(error):
                log.warning(
                    "micro_batch_size auto: the trial of %d ran out of memory; the same command starts "
                    "below it (%s)",
                    size,
                    kept.file,
                )
            elif not is_told and not is_from_peers(error):
                kept.trying = before
                self._write()
            raise
        kept.trying = before

    def _tell(self, line: str) -> None:
        if self.job.ranks.is_main_process:
            log.info("%s", line)

    def _format_summary(self, size: int) -> str:
        """Return one line with the sizes tried, their memory and the choice."""
        limit = min(use.limit for use in self._tried[size])
        tried = ", ".join(
            f"{each} {max(use.most for use in uses) / GIB:.2f}" for each, uses in self._tried.items()
        )
        line = f"micro_batch_size {size}, found by trials (GiB of the fullest rank): {tried}; "
        line += f"a step may take {MARGIN * limit / GIB:.2f} of {limit / GIB:.2f}"
        if not fits_every_rank(self._tried[size]):
            line += "; this is the smallest size possible, and it takes more"
        return f"{line}; kept in {self._kept.file}"

    def _describe_conditions(self) -> dict[str, Any]:
        """Return everything that the answer depends on, as JSON values; its hash names the cache file."""
        config = self.config
        resolved = self.resolved
        device = self.job.device
        smallest = self.loader(
            replace(resolved.batch_plan.with_micro_batch_size(1), gradient_accumulation_steps=1)
        )
        (row,) = smallest.read_again(0)
        name = "cpu"
        memory = read_memory_usage().limit
        if device.type == "cuda":
            card = torch.cuda.get_device_properties(device)
            name = card.name
            memory = card.total_memory
        sections = ("model", "adapter", "objective", "optimizer")
        return config.model_dump(mode="json", include=set(sections)) | {
            "row": {key: describe_value(value) for key, value in row.items()},
            "split": str(resolved.split),
            "ranks": [resolved.split.world_size, self.job.ranks.local_world_size],
            "compile": resolved.compile,
            "tf32": resolved.tf32,
            "deepspeed": resolved.deepspeed,
            "samples": resolved.batch_plan.global_batch_size,
            "device": name,
            "memory_gib": round(memory / GIB, 1),
            "limit": self.limit,
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "deepspeed")},
        }


def _bytes_of(group: Sequence[Batch]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in iter_tensors(group))
