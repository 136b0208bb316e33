"""What a run is expected to take, told before its first step; at its end what it took, told and kept.

Rank 0's own memory stands for all: it is what metrics.jsonl has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median

import torch
from torch import nn

from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved, Settings
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job, describe_device
from pipeline.errors import ModelError, PipelineError, one_line
from pipeline.files import GIB
from pipeline.models import sizes
from pipeline.monitoring.events import PLAN, Event
from pipeline.monitoring.metrics import process_peak
from pipeline.planner.forecast import Forecast, Planned, forecast_of, job_of, largest_that_fits
from pipeline.planner.place import History, Kind, Measured, Place, here, history_of, on_gpus
from pipeline.planner.proposals import smaller
from pipeline.planner.shapes import model_of

log = logging.getLogger(__name__)

LEAST_ROWS = 3
"""With a speed, behind the first one, which has the compiler's time: fewer say little."""


class Expectation:
    """Compares what a run takes with what was expected of it."""

    def __init__(
        self, found: Forecast | None, history: History | None, length: int | None, before: float = 0.0
    ):
        """
        Args:
            found: None: nothing is known of such a run.
            history: Where it is kept; None: nowhere.
            length: Tokens of a row.
            before: GiB that the process had resident at the most before its first step.
        """
        self.found, self._before = found, before
        self._history, self._length = history, length

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together; None: not known."""
        time = None if self.found is None else self.found.time
        return None if time is None else time.tokens_per_second * time.gpus

    @property
    def line(self) -> str | None:
        """What is expected, for the lines before the first step."""
        found = self.found
        if found is None:
            return None
        least = "" if found.memory.is_complete else "at least "
        memory = f"{least}{found.peak / GIB:.2f} GiB of {found.place.memory / GIB:.2f} expected"
        if found.fits is False:
            memory += ", which does not fit"
        speed = "" if self.tokens_per_second is None else f"; {self.tokens_per_second:,.0f} tokens/s expected"
        runs = found.correction.runs
        learnt = f" (corrected by {runs} run{'s' * (runs > 1)} here)" if runs else ""
        return f"{memory}{speed}{learnt}"

    def conclusion(self, peak_gib: float, speeds: Sequence[float]) -> Event | None:
        """Return what was expected and measured, and keep it in the history.

        Args:
            peak_gib: Most memory that a row has shown; 0: there was no row.
            speeds: Samples per second of each row.

        Returns:
            `None` if nothing was expected, or too little measured.
        """
        found = self.found
        if found is None:
            return None
        fields: dict[str, str | float] = {}
        told: list[str] = []
        memory = self._memory(found, peak_gib, fields, told)
        speed, flops = self._speed(found, speeds, fields, told)
        if self._history is not None and (memory or speed or flops):
            kind = Kind.of(found.place.gpu.name, found.model, found.config, found.resolved)
            self._history.add(Measured(kind, memory, speed, flops))
        if not told:
            return None
        return Event(PLAN, f"plan: {'; '.join(told)}", level="info", fields=fields)

    def _memory(
        self, found: Forecast, peak: float, fields: dict[str, str | float], told: list[str]
    ) -> float | None:
        """Adds what is to be told of it; the peak over the formulas', None: not known."""
        expected = found.peak / GIB
        # The system knows a process's peak alone, and a notebook's may have held more before.
        is_hidden = found.place.device.kind == "cpu" and self._before >= expected
        if not peak or is_hidden:
            return None
        fields |= {"memory_expected_gib": expected, "memory_measured_gib": peak}
        told.append(f"memory {peak:.2f} GiB of {expected:.2f} expected")
        return peak / expected * found.correction.memory if found.memory.is_complete else None

    def _speed(
        self, found: Forecast, speeds: Sequence[float], fields: dict[str, str | float], told: list[str]
    ) -> tuple[float | None, float | None]:
        """The same of tokens a second; and FLOPs a second of a rank."""
        if len(speeds) <= LEAST_ROWS or not self._length:
            return None, None
        measured, expected = median(speeds[1:]) * self._length, self.tokens_per_second
        fields["tokens_per_second_measured"] = measured
        if expected is None:
            return None, self._flops(found, measured)
        fields["tokens_per_second_expected"] = expected
        told.append(f"{measured:,.0f} tokens/s of {expected:,.0f} expected")
        return measured / expected * found.correction.speed, self._flops(found, measured)

    def _flops(self, found: Forecast, tokens_per_second: float) -> float | None:
        job = job_of(found.model, found.config, found.resolved)
        ranks = found.resolved.split.world_size
        return None if job is None else job.flops_per_token() * tokens_per_second / ranks


def expect(
    config: RunConfig, resolved: Resolved, job: Job, data: DataBundle, module: nn.Module
) -> Expectation:
    """Of a run on this job's machine. What the formulas cannot do costs no run.

    Args:
        module: Of which a rank has all parameters or shards of all, where the recipe does not show them.
    """
    history = history_of(config)
    length = config.data.tokens_per_row
    is_cut = resolved.split.tensor_parallel * resolved.split.pipeline_stages > 1
    with _unless_unknown():
        model = model_of(_with_words(config, data.vocab_size)) or (None if is_cut else sizes.model_of(module))
        if model is not None:
            found = forecast_of(config, resolved, model, _place(job, history), history)
            before = process_peak() / GIB
            return Expectation(found, history, length, before)
    return Expectation(None, history, length)


def guessed(config: RunConfig, resolved: Resolved, job: Job, data: DataBundle) -> int | None:
    """The largest micro-batch that rank 0 expects to fit; None: nothing is known of the run. Collective."""
    found: int | None = None
    if job.ranks.is_main_process:  # whose history and machine may be others than a peer's
        history = history_of(config)
        with _unless_unknown():
            if (model := model_of(_with_words(config, data.vocab_size))) is not None:
                found = largest_that_fits(config, resolved, model, _place(job, history), history)
    found = job.broadcast_object(found)
    return found


def planned(settings: Settings, job: Job, data: DataBundle) -> Planned | None:
    """What to tell of the plan where memory is out; None: nothing is known of such a run."""
    history, world_size = history_of(settings.config), job.ranks.world_size
    device, place = describe_device(job.device), _place(job, history)

    def at(changed: Settings) -> Forecast:
        config = _with_words(changed.config, data.vocab_size)
        model = model_of(config)
        if model is None:
            raise ModelError("the model has to be built to be known")
        resolved = changed.resolve(world_size, device)
        if resolved.plan.is_open:
            resolved = resolved.divided(largest_that_fits(config, resolved, model, place, history))
        return forecast_of(config, resolved, model, place, history)

    with suppress(PipelineError):
        found = at(settings)
        return Planned(found.peak, place.memory, smaller(settings, found, at))
    return None


@contextmanager
def _unless_unknown() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of a formula: what is told beside a run must not cost the run
        is_mistake = not isinstance(error, PipelineError)
        log.log(logging.WARNING if is_mistake else logging.INFO, "no plan of this run: %s", one_line(error))
        if is_mistake:
            log.debug("its traceback", exc_info=True)


def _with_words(config: RunConfig, words: int | None) -> RunConfig:
    """A tokenizer that was trained may have fewer entries than it might have."""
    model = config.model.language_model
    if words is None or model is None:
        return config
    if model.architecture is None or model.vocab_size is not None:
        return config
    return config.model_copy(update={"model": model.model_copy(update={"vocab_size": words})})


def _place(job: Job, history: History) -> Place:
    ranks = job.ranks
    nodes = max(1, ranks.world_size // ranks.local_world_size)
    if job.device.type == "cuda":
        properties = torch.cuda.get_device_properties(job.device)
        device = describe_device(job.device)
        return on_gpus(properties.name, properties.total_memory, device, ranks.local_world_size, nodes)
    return here(ranks.local_world_size, nodes, history=history)
