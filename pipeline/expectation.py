"""What a run is expected to take, told before its first step; at its end what it took, told and kept.

Rank 0's own memory stands for all: it is what metrics.jsonl has.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median

import torch

from pipeline.config.model_schema import CausalLMConfig
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved, Settings
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job, describe_device
from pipeline.errors import ModelError, PipelineError, one_line
from pipeline.events import PLAN, Event
from pipeline.planning.account import Planned
from pipeline.planning.forecast import Forecast, forecast_of, job_of
from pipeline.planning.history import History, Kind, Measured, history_of
from pipeline.planning.place import Place, here, on_gpus
from pipeline.planning.proposals import smaller
from pipeline.planning.shapes import model_of
from pipeline.watchers import Seen

log = logging.getLogger(__name__)

GIB = 2**30
FAR = 0.20
"""Of what was expected, by which what was measured may differ without a warning."""
FAR_GIB = 0.5
"""What a process has besides, libraries and data, differs by as much from run to run."""
LEAST_ROWS = 3
"""With a speed, behind the first one, which has the compiler's time: fewer say little."""


class Expectation:
    """Looks at each row, as watchers do, and has nothing to say of one."""

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
        self._peak = 0.0
        self._speeds: list[float] = []

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
        memory = f"{found.peak / GIB:.2f} GiB of {found.place.memory / GIB:.2f} expected"
        if not found.fits:
            memory += ", which does not fit"
        speed = "" if self.tokens_per_second is None else f"; {self.tokens_per_second:,.0f} tokens/s expected"
        runs = found.correction.runs
        learnt = f" (corrected by {runs} run{'s' * (runs > 1)} here)" if runs else ""
        return f"{memory}{speed}{learnt}"

    def __call__(self, step: int, seen: Seen) -> None:
        row = seen.row
        resident = row.get("memory/peak_resident_gib", 0.0)
        self._peak = max(self._peak, row.get("memory/peak_reserved_gib", resident))
        if (speed := row.get("perf/samples_per_second")) is not None:
            self._speeds.append(speed)

    def conclusion(self) -> Event | None:
        """Expected and measured; None: nothing was expected, or too little measured. It is kept."""
        if self.found is None or not self._peak or self._held_more_before:
            return None
        found, expected = self.found, self.found.peak / GIB
        fields: dict[str, str | float] = {"memory_expected_gib": expected, "memory_measured_gib": self._peak}
        told = [f"memory {self._peak:.2f} GiB of {expected:.2f} expected"]
        beside = abs(self._peak - expected)
        far = [beside / expected if beside > FAR_GIB else 0.0]
        speed, flops = None, None
        if len(self._speeds) > LEAST_ROWS and self._length:
            measured = median(self._speeds[1:]) * self._length
            flops = self._flops(found, measured)
            fields["tokens_per_second_measured"] = measured
            if self.tokens_per_second is not None:
                speed = measured / self.tokens_per_second
                fields["tokens_per_second_expected"] = self.tokens_per_second
                told.append(f"{measured:,.0f} tokens/s of {self.tokens_per_second:,.0f} expected")
                if found.place.device.kind == "cuda":  # a CPU has other work, too
                    far.append(abs(speed - 1))
        if self._history is not None:
            kind = Kind.of(found.place.gpu.name, found.model, found.resolved)
            corrected = found.correction
            memory = self._peak / expected * corrected.memory
            self._history.add(Measured(kind, memory, speed and speed * corrected.speed, flops))
        is_far = max(far) > FAR
        advice = (
            f"more than {FAR:.0%} beside the plan; the next one here is corrected by it" if is_far else ""
        )
        return Event(PLAN, f"plan: {'; '.join(told)}", advice, "warning" if is_far else "info", fields)

    @property
    def _held_more_before(self) -> bool:
        """Whether a process on a CPU, such as a notebook's, held more already than is expected: the
        system knows its peak alone.
        """
        assert self.found is not None
        return self.found.place.device.kind == "cpu" and self._before >= self.found.peak / GIB

    def _flops(self, found: Forecast, tokens_per_second: float) -> float | None:
        job = job_of(found.model, found.config, found.resolved)
        ranks = found.resolved.split.world_size
        return None if job is None else job.flops_per_token() * tokens_per_second / ranks


def expect(config: RunConfig, resolved: Resolved, job: Job, data: DataBundle) -> Expectation:
    """Of a run on this job's machine. What the formulas cannot do costs no run."""
    history = history_of(config)
    length = getattr(config.data, "sequence_length", None)
    with _unless_unknown():
        if (model := model_of(_with_words(config, data.vocab_size))) is not None:
            found = forecast_of(config, resolved, model, _place(job, history), history)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            return Expectation(found, history, length, before)
    return Expectation(None, history, length)


def guessed(config: RunConfig, resolved: Resolved, job: Job, data: DataBundle) -> int | None:
    """The largest micro-batch that is expected to fit; None: nothing is known of such a run."""
    history = history_of(config)
    with _unless_unknown():
        if (model := model_of(_with_words(config, data.vocab_size))) is not None:
            place = _place(job, history)
            sizes = resolved.plan.candidates
            fits = [n for n in sizes if forecast_of(config, resolved.divided(n), model, place, history).fits]
            return max(fits, default=sizes[0])
    return None


def planned(settings: Settings, job: Job, data: DataBundle) -> Planned | None:
    """What to tell of the plan where memory is out; None: nothing is known of such a run."""
    history, world_size = history_of(settings.config), job.ranks.world_size
    device, place = describe_device(job.device), _place(job, history)

    def at(changed: Settings) -> Forecast:
        config = _with_words(changed.config, data.vocab_size)
        model = model_of(config)
        if model is None:
            raise ModelError("the model has to be built to be known")
        return forecast_of(config, changed.resolve(world_size, device), model, place, history)

    with suppress(PipelineError):
        found = at(settings)
        return Planned(found.peak, place.memory, smaller(settings, found, at))
    return None


@contextmanager
def _unless_unknown() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not isinstance(error, PipelineError):
            log.debug("no plan of this run", exc_info=True)
        log.info("no plan of this run: %s", one_line(error))


def _with_words(config: RunConfig, words: int | None) -> RunConfig:
    """A tokenizer that was trained may have fewer entries than it might have."""
    model = config.model
    if words is None or not isinstance(model, CausalLMConfig):
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
