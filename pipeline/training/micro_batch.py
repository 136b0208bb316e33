"""`batch.micro_batch_size: auto`: the largest that fits, tried in the run's own engine before its first step.

A trial is a real step of which nothing stays (engine.refusal), so that a run is the one with the number
given, to the last bit. Sizes that were found are cached, one small file each.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeline.config.batch_plan import BatchPlan
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.data.batches import Batch, described, tensors
from pipeline.data.loader import TrainLoader
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.machine import available_memory, memory_now
from pipeline.distributed.process_group import Job
from pipeline.distributed.watchdog import is_from_peers
from pipeline.engine.interface import Engine, Limits
from pipeline.engine.memory import give_back
from pipeline.errors import ConfigError, DeviceMemoryError, Terminated
from pipeline.files import CONFIGURATION_LIMIT, GIB, read_plain, replace_file
from pipeline.models.blocks import compile_again
from pipeline.monitoring.metrics import forget_peak, resident_now, resident_peak
from pipeline.objectives import Objective
from pipeline.training.device_failures import Remedies, explain
from pipeline.training.safeguard import with_keys

MOST_TRIALS = 6
MARGIN = 0.90
"""Of what a rank may take: what a step may, measured. Rows differ a little, and freed blocks leave gaps."""
TRIED_UP_TO = 0.95
"""The same of what a trial may be predicted to take: what lies between the two is decided by measuring."""
LONGEST_STRIDE = 8
"""A trial is at most so many times the largest one before it: what comes of it is known from those alone."""
FAR = 4
"""The same behind the first one, before it counts as far."""


@dataclass(frozen=True)
class Use:
    """Bytes that one rank held in a trial."""

    forward: int
    """The most in the last forward, above what there was before it."""
    work: int
    """The most before the optimizer stepped."""
    update: int
    """The most from then on, which no number of rows changes."""
    limit: int
    """What the rank may hold."""

    @property
    def most(self) -> int:
        """Over the whole step."""
        return max(self.work, self.update)


Tried = Mapping[int, Sequence[Use]]
"""Micro-batch size -> what each rank held, in the order of ranks."""


def fits(uses: Sequence[Use]) -> bool:
    """Whether it does on every rank."""
    return all(use.most <= MARGIN * use.limit for use in uses)


def largest(tried: Tried) -> int | None:
    """The largest that was tried and fits; None: none does."""
    return max((size for size, uses in tried.items() if fits(uses)), default=None)


def predicted(size: int, tried: Tried) -> list[float]:
    """Bytes that each rank would hold. What comes before the update grows with the rows: by the line through
    the two trials that are nearest, or of a single one by what its forward added.
    """
    sizes = sorted(tried)
    found = []
    for rank in range(len(tried[sizes[0]])):
        work = {each: tried[each][rank].work for each in sizes}
        if len(sizes) == 1:
            high, slope = sizes[0], tried[sizes[0]][rank].forward / sizes[0]
            slope *= 2 if size > FAR * high else 1  # a backward that recomputes adds more than the forward
        else:
            low, high = min(pairwise(sizes), key=lambda pair: abs(pair[0] + pair[1] - 2 * size))
            slope = max(0.0, (work[high] - work[low]) / (high - low))
        update = min(uses[rank].update for uses in tried.values())  # a heap may keep more of larger ones
        found.append(max(work[high] + slope * (size - high), update))
    return found


def share(size: int, tried: Tried) -> float:
    """The same as a share of what the rank may hold, of the rank where that is largest."""
    limits = (use.limit for use in tried[max(tried)])
    return max(held / limit for held, limit in zip(predicted(size, tried), limits, strict=True))


def next_trial(candidates: Sequence[int], tried: Tried, guess: int | None) -> int | None:
    """What to try next; None: `largest` is the answer.

    The first two are a quarter and a half of a guess, which may be twice too large, or the two smallest. Then
    what is predicted to fit is confirmed, until the next larger one is known, or predicted, not to.

    Args:
        candidates: Ascending.
        guess: Of the answer.
    """
    if len(tried) >= MOST_TRIALS:
        return None
    if not tried:
        return _up_to(candidates, guess / 4) if guess else candidates[0]
    best = largest(tried)
    too_large = min((size for size, uses in tried.items() if not fits(uses)), default=None)
    left = [
        size
        for size in candidates
        if size > (best or 0) and (too_large is None or size < too_large) and size not in tried
    ]
    if best is None:
        smaller = [size for size in left if share(size, tried) <= MARGIN]
        return smaller[-1] if smaller else candidates[0] if candidates[0] not in tried else None
    within = [
        size
        for size in left
        if size <= max(LONGEST_STRIDE * max(tried), left[0]) and share(size, tried) <= TRIED_UP_TO
    ]
    if len(tried) == 1 and left:
        return _second(candidates, within, best, guess)
    if not within:
        return None
    expected = [size for size in within if share(size, tried) <= MARGIN]
    return expected[-1] if expected else within[0]


def _second(candidates: Sequence[int], within: Sequence[int], first: int, guess: int | None) -> int | None:
    """Behind a first one that fits: a larger one nearby, else a smaller one, for a line to reach further."""
    if within and within[0] <= 2 * first:
        return max(within[0], _up_to(within, (guess or 0) / 2))
    smaller = [size for size in candidates if size < first]
    return smaller[-1] if smaller else within[0] if within else None


def _up_to(candidates: Sequence[int], most: float) -> int:
    return max((size for size in candidates if size <= most), default=candidates[0])


PAGE = 4096


class Peaks(ABC):
    """Bytes."""

    @abstractmethod
    def begin(self) -> None:
        """Gives back what is held for nothing, and starts to look."""

    @abstractmethod
    def take(self) -> int:
        """The most since the last call, or since `begin`."""

    @abstractmethod
    def now(self) -> int:
        """What is held."""

    @abstractmethod
    def limit(self) -> int:
        """What this rank may hold: what it does, and its share of what is free."""


class OfGpu(Peaks):
    """What torch's allocator has given out, without the blocks that it keeps."""

    def __init__(self, device: torch.device):
        self._device = device

    def begin(self) -> None:
        """See Peaks."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def take(self) -> int:
        """See Peaks. Waits for nothing: the books are the host's."""
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return most

    def now(self) -> int:
        """See Peaks."""
        return torch.cuda.memory_allocated(self._device)

    def limit(self) -> int:
        """See Peaks. What CUDA and NCCL take for themselves is gone from it."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


class OfHost(Peaks):
    """What is resident of this process.

    Args:
        sharers: Ranks on this machine.
    """

    def __init__(self, sharers: int):
        self._sharers = sharers

    def begin(self) -> None:
        """See Peaks."""
        gc.collect()
        give_back()
        forget_peak()

    def take(self) -> int:
        """See Peaks."""
        most = resident_peak()
        forget_peak()
        return most

    def now(self) -> int:
        """See Peaks."""
        return resident_now()

    def limit(self) -> int:
        """See Peaks. Of the tightest cgroup, or of the machine."""
        return resident_now() + available_memory() // self._sharers


def peaks_on(device: torch.device, sharers: int) -> Peaks:
    """Of the kind of memory that is scarce where is computed."""
    return OfGpu(device) if device.type == "cuda" else OfHost(sharers)


@contextmanager
def as_if_stepped() -> Iterator[list[int]]:
    """Around a step of which nothing stays: what optimizers keep is in memory as a step would leave it.

    [bytes that are not made in such a step, but in the first that counts]. States of zeros take no memory on
    a CPU until somebody writes to them, so each page is written to, its own value.
    """
    unmade = [0]

    def look(optimizer: Optimizer, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.Muon):  # passes over what has no gradient
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


FOLDER = "micro_batch_sizes"


@dataclass
class KeptSize:
    """What is known of one recipe on one kind of device.

    Args:
        cache: Folder of all that is kept.
        known: JSON values that decide the size.
    """

    cache: Path
    known: Mapping[str, Any]
    found: int | None = None
    needs: int = 0
    """Bytes that the fullest rank held with it."""
    trying: int | None = None
    """A trial that no process has told the end of, or of which memory ran out."""
    tried: Mapping[str, int] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Where it lies, or will."""
        text = json.dumps(self.known, sort_keys=True)
        return self.cache / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def read(self) -> None:
        """Takes up what an earlier start has left; what cannot be read is nothing."""
        try:
            kept = json.loads(read_plain(self.file, CONFIGURATION_LIMIT))
            numbers = {name: kept[name] for name in ("found", "needs", "trying")}
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError):
            return
        if (
            all(value is None or type(value) is int for value in numbers.values())
            and numbers["needs"] is not None
        ):
            self.found, self.needs, self.trying = numbers["found"], numbers["needs"], numbers["trying"]

    def write(self) -> None:
        """Whole or not at all; a folder that cannot be written costs a search at each start."""
        content = {
            "found": self.found,
            "needs": self.needs,
            "trying": self.trying,
            "tried": self.tried,
            "known": self.known,
        }
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.file, json.dumps(content, indent=2))
        except OSError as error:
            log.warning("micro_batch_size is not kept for the next start: %s: %s", self.file, error.strerror)


log = logging.getLogger(__name__)

NOTHING_STAYS = Limits(-torch.inf, -torch.inf)
LOOKED_AT = 8
"""Groups of own data, whose rows may differ in length, of which the largest is tried."""


@dataclass(frozen=True)
class Search:
    """All that a search needs of a run."""

    config: RunConfig
    resolved: Resolved
    job: Job
    engine: Engine
    objective: Objective
    loader: Callable[[BatchPlan], TrainLoader]
    """Reads this rank's batches of a plan."""
    cache: Path
    """Folder of what is kept between starts."""
    guess: int | None = None
    """Of the answer, from a plan; None: there is none."""
    limit: int | None = None
    """Bytes that a rank may hold; None: what its device has for it."""


def settle(search: Search) -> Resolved:
    """With the number in place of `auto`, which the engine then keeps to. Collective.

    Raises:
        DeviceMemoryError: a trial took more than was to be expected; the next start begins below it.
        ConfigError: memory cannot be measured here.
    """
    plan = search.resolved.plan
    if not plan.is_open:
        return search.resolved
    size = Trials(search).find() if len(plan.candidates) > 1 else plan.candidates[0]
    found = search.resolved.divided(size)
    search.engine.divide(size, found.plan.gradient_accumulation_steps)
    return found


class Trials:
    """One search. Every method is collective."""

    def __init__(self, search: Search):
        self._of = search
        self._peaks: Peaks = peaks_on(search.job.device, search.job.ranks.local_world_size)
        self._tried: dict[int, list[Use]] = {}
        self._kept = KeptSize(search.cache, self._known())

    def find(self) -> int:
        """The size."""
        job, kept = self._of.job, self._kept
        job.on_main(kept.read)
        kept.found, kept.needs, kept.trying = job.broadcast_object((kept.found, kept.needs, kept.trying))
        candidates, guess = self._of.resolved.plan.candidates, self._of.guess
        if kept.trying is not None:
            self._tell(f"{kept.trying} ran out of memory at an earlier start, or was cut off ({kept.file})")
            if smaller := [size for size in candidates if size < kept.trying]:
                candidates = smaller
            else:
                guess = None  # the smallest once more, and from there
        if kept.found in candidates and self._still_fits():
            self._tell(f"micro_batch_size {kept.found}, found before ({kept.file}; without it, found anew)")
            return kept.found
        while (size := next_trial(candidates, self._tried, guess)) is not None:
            with self._written_down(size):
                self._tried[size] = self.measure(size)
        self._begin()  # what the last trial left is not the run's
        size = largest(self._tried) or min(self._tried)
        if kept.trying is not None and fits(self._tried[size]) and size >= kept.trying:
            kept.trying = None  # it was cut off for another reason
        kept.found, kept.needs = size, max(use.most for use in self._tried[size])
        kept.tried = {str(each): max(use.most for use in uses) for each, uses in self._tried.items()}
        if job.ranks.is_main_process:
            kept.write()
        self._tell(self._summary(size, candidates))
        if self._of.resolved.compile:
            compile_again(self._of.engine.module)
        self._of.engine.phases.restart()
        return size

    def _still_fits(self) -> bool:
        """Whether every rank's device has room for what was measured before."""
        return all(self._of.job.gather_object(self._kept.needs <= TRIED_UP_TO * self._limit()))

    def measure(self, size: int) -> list[Use]:
        """What a step of such micro-batches holds on each rank."""
        of, stages = self._of, self._of.resolved.split.pipeline_stages
        plan = of.resolved.plan.divided(size)
        # The second one finds the gradients of the first; stages are filled by as many as there are.
        count = min(plan.gradient_accumulation_steps, max(2, stages))
        batches, further = self._batches(replace(plan, gradient_accumulation_steps=count))
        of.engine.divide(size, count)
        seed_step(of.config.seed, 0, of.engine.seed_rank)
        if of.resolved.compile:  # which takes memory of its own, once
            compile_again(of.engine.module)
            of.engine.train_step(batches, of.objective, 0.0, 0, NOTHING_STAYS)
        self._begin()
        limit = self._limit()
        ear = _Ear(self._peaks)
        with as_if_stepped() as unmade, of.engine.phases.heard_by(ear.ends):
            of.engine.train_step(batches, of.objective, 0.0, 0, NOTHING_STAYS)
        ear.ends("other")
        limit = min(limit, self._limit())  # NCCL takes its own with the first step
        add = unmade[0] + further
        return of.job.gather_object(
            Use(ear.forward, ear.work + add, ear.most.get("optimizer", 0) + add, limit)
        )

    def _batches(self, plan: BatchPlan) -> tuple[list[Batch], int]:
        """A group of real rows; and bytes that a run holds of them besides: a GPU has two whole steps'."""
        loader, config = self._of.loader(plan), self._of.config
        looked_at = LOOKED_AT if ":" in config.data.kind else 1
        groups = [loader.read_again(number * plan.global_batch_size) for number in range(looked_at)]
        group = max(groups, key=_bytes_of)
        further = 0
        if self._of.job.device.type == "cuda":
            share = self._of.resolved.plan.gradient_accumulation_steps / (plan.micro_batch_size * len(group))
            further = int(2 * share * _bytes_of(group))
        return with_keys(group, config.seed, 0) if _adds_noise(config) else group, further

    def _begin(self) -> None:
        try:
            self._peaks.begin()
        except OSError as error:
            raise ConfigError(
                f"batch.micro_batch_size: auto: memory cannot be measured here ({error}); give a number"
            ) from None

    def _limit(self) -> int:
        return self._of.limit or self._peaks.limit()

    @contextmanager
    def _written_down(self, size: int) -> Iterator[None]:
        """Around a trial: what does not come back from it is known to the next start."""
        kept, job = self._kept, self._of.job
        before, kept.trying = kept.trying, size
        if job.ranks.is_main_process:
            kept.write()
        job.barrier()
        try:
            yield
        except BaseException as error:
            is_memory = isinstance(explain(error, job.device, lambda _: Remedies([])), DeviceMemoryError)
            if is_memory:
                log.warning(
                    "micro_batch_size auto: the trial of %d ran out of memory; the same command starts "
                    "below it (%s)",
                    size,
                    kept.file,
                )
            elif job.ranks.is_main_process and not self._may_be_of_peers(error):
                kept.trying = before
                kept.write()
            raise
        kept.trying = before

    def _may_be_of_peers(self, error: BaseException) -> bool:
        """A launcher sends SIGTERM where another rank has ended."""
        is_told = isinstance(error, Terminated) and self._of.job.ranks.world_size > 1
        return is_told or is_from_peers(error)

    def _tell(self, line: str) -> None:
        if self._of.job.ranks.is_main_process:
            log.info("%s", line)

    def _summary(self, size: int, candidates: Sequence[int]) -> str:
        """What was tried, what each took, what was chosen and why not more."""

        def of(uses: Sequence[Use]) -> str:
            return f"{max(use.most for use in uses) / GIB:.2f}"

        limit = min(use.limit for use in self._tried[size])
        tried = ", ".join(f"{each} {of(uses)}" for each, uses in self._tried.items())
        line = (
            f"micro_batch_size {size}, found by trials (GiB of the fullest rank): {tried}; a step may take "
        )
        line += f"{MARGIN * limit / GIB:.2f} of {limit / GIB:.2f}"
        larger = next((each for each in candidates if each > size), None)
        if not fits(self._tried[size]):
            line += "; nothing smaller than this, which takes more"
        elif larger is None:
            line += "; there is no larger one" + (" below" if self._kept.trying else " in the global batch")
        elif larger not in self._tried:
            line += f"; {larger} would take about {max(predicted(larger, self._tried)) / GIB:.2f}"
        return f"{line}; kept in {self._kept.file}"

    def _known(self) -> dict[str, Any]:
        """All that decides the answer."""
        of, config = self._of, self._of.config
        resolved, device = of.resolved, of.job.device
        smallest = self._of.loader(replace(resolved.plan.divided(1), gradient_accumulation_steps=1))
        (row,) = smallest.read_again(0)
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            memory = torch.cuda.get_device_properties(device).total_memory
        else:
            name, memory = "cpu", memory_now().limit
        return {
            "row": {key: described(value) for key, value in row.items()},
            "model": config.model.model_dump(mode="json"),
            "adapter": None if config.adapter is None else config.adapter.model_dump(mode="json"),
            "objective": config.objective.model_dump(mode="json"),
            "optimizer": config.optimizer.model_dump(mode="json"),
            "split": str(resolved.split),
            "ranks": [resolved.split.world_size, of.job.ranks.local_world_size],
            "compile": resolved.compile,
            "tf32": resolved.tf32,
            "deepspeed": resolved.deepspeed,
            "samples": resolved.plan.global_batch_size,
            "device": name,
            "memory_gib": round(memory / GIB, 1),
            "limit": of.limit,
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "deepspeed")},
        }


class _Ear:
    """Takes the peak of each phase where it ends."""

    def __init__(self, peaks: Peaks):
        self._peaks = peaks
        self._began = peaks.now()
        self.most: dict[str, int] = {}
        self.forward = 0

    def ends(self, phase: str) -> None:
        """See Phases.heard_by."""
        most = self._peaks.take()
        self.most[phase] = max(self.most.get(phase, 0), most)
        if phase == "forward":
            self.forward = max(self.forward, most - self._began)
        elif phase != "communication":  # what ZeRO 3 gathers in between interrupts a forward
            self._began = self._peaks.now()

    @property
    def work(self) -> int:
        """Before the update."""
        return max((most for phase, most in self.most.items() if phase != "optimizer"), default=0)


def _bytes_of(group: Sequence[Batch]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(group))


def _adds_noise(config: RunConfig) -> bool:
    return config.model.neftune_alpha is not None
