"""Forecast of a run: memory of a rank by what holds it, time of a step, host memory, disk. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeline.config.loading import get_dotted, parse_override
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved, Settings
from pipeline.errors import ConfigError
from pipeline.files import format_bytes
from pipeline.planner.memory import Holding, Memory, memory_of
from pipeline.planner.model import Model
from pipeline.planner.place import Correction, History, Kind, Place
from pipeline.planner.rank import Rank
from pipeline.planner.states import States, buffers, checkpoint_bytes, states_of
from pipeline.planner.timing import Job, StepTime, step_time

HOUR = 3600.0
UNCORRECTED = Correction()


@dataclass(frozen=True)
class Forecast:
    """Of one run at one place."""

    model: Model
    config: RunConfig
    resolved: Resolved
    place: Place
    states: States
    memory: Memory
    time: StepTime | None
    """None: not known of this model or this device."""
    correction: Correction = UNCORRECTED
    """By what was measured here; the time has it already."""

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank's device holds at the most."""
        return int(self.memory.peak * self.correction.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank's device and its machine hold it, without the copy of a checkpoint; None:
        what activations take is not known, and all else fits.
        """
        if self.lacking:
            return False
        return True if self.memory.is_complete else None

    @property
    def lacking(self) -> str:
        """Of what there is too little; empty: it fits."""
        there, share = self.place.memory, self.memory.share
        copy = self.memory.copy if self.place.device.kind == "cpu" else 0.0
        needed = int((self.memory.peak - copy) * self.correction.memory)
        if needed > there:
            return "memory"
        if needed + self.memory.spare > share * there:
            reason = f"{format_bytes(self.memory.spare)} should be free besides, for what is freed in pieces"
            return reason + (f", and a rank can be sure of {share:.0%} alone" if share < 1 else "")
        if self.place.host_memory is not None and self.host_bytes > self.place.host_memory:
            return "host memory"
        return ""

    @property
    def host_bytes(self) -> int:
        """Of one machine, all its ranks together."""
        return int(self.memory.host) * min(self.place.per_node, self.resolved.split.world_size)

    @property
    def copy_bytes(self) -> int:
        """Of a checkpoint's copy on one machine, which is made where there is room for it."""
        return int(self.memory.copy) * min(self.place.per_node, self.resolved.split.world_size)

    @property
    def nvme_bytes(self) -> int:
        """Of one machine's disk, where states are swapped to it."""
        return self.states.disk.total * min(self.place.per_node, self.resolved.split.world_size)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs as perf/mfu counts them, over the peak of the data sheet."""
        peak = self.place.gpu.peak(self.resolved.split.precision, self.resolved.tf32)
        if self.time is None or peak is None or self.place.device.kind == "cpu":  # which has no data sheet
            return None
        return self.time.mfu(peak)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint."""
        return checkpoint_bytes(self.model, self.config, self.resolved)

    @property
    def disk_bytes(self) -> int:
        """What the run's checkpoints take at the most: those that stay, and one that is being written."""
        config = self.config.checkpoint
        return self.checkpoint_bytes * (config.keep_last + config.keep_best + 1)

    @property
    def hours(self) -> float | None:
        """Of all steps, without evaluation and checkpoints; None: their number or speed is not known."""
        steps = self.config.max_steps
        return None if self.time is None or steps is None else self.time.seconds * steps / HOUR

    @property
    def kilowatt_hours(self) -> float | None:
        """All GPUs at the power that the maker states."""
        if self.hours is None or self.place.watts is None:
            return None
        return self.hours * self.place.watts * self.resolved.split.world_size / 1000

    @property
    def cost(self) -> float | None:
        """By `log.price_per_device_hour`."""
        price = self.config.log.price_per_device_hour
        return (
            None
            if self.hours is None or price is None
            else self.hours * price * self.resolved.split.world_size
        )


def forecast(settings: Settings, model: Model, place: Place, history: History | None = None) -> Forecast:
    """Of a run with these settings.

    Args:
        history: None: nothing is corrected.

    Raises:
        ConfigError: it cannot be split so over the ranks of the place.
    """
    resolved = settings.resolve(place.ranks, place.device)
    return forecast_of(settings.config, resolved, model, place, history)


def forecast_of(
    config: RunConfig,
    resolved: Resolved,
    model: Model,
    place: Place,
    history: History | None = None,
    holdings: Sequence[Holding] | None = None,
) -> Forecast:
    """As `forecast`, of settings that are resolved for the place.

    Args:
        holdings: As `holdings_of` has them; None: they are worked out.
    """
    kind = place.device.kind
    holdings = holdings or holdings_of(model, config, resolved, kind == "cpu")
    memory = memory_of(model, config, resolved, kind, holdings)
    correction, time = UNCORRECTED, None
    if history is not None:
        correction = history.correction(Kind.of(place.gpu.name, model, config, resolved))
    rates = place.rates(resolved)
    if rates is not None and (job := job_of(model, config, resolved)) is not None:
        if job.recompute == 1.0 and memory.recomputed is not None:  # a budget lets some blocks keep theirs
            job = replace(job, recompute=memory.recomputed)
        if (resolved.deepspeed or {}).get("pipeline", {}).get("partition") != "time":
            job = replace(job, dealt=_dealt(holdings))
        time = step_time(job, replace(rates, speed=rates.speed * correction.speed))
    states = holdings[memory.stage].states
    return Forecast(
        model=model,
        config=config,
        resolved=resolved,
        place=place,
        states=states,
        memory=memory,
        time=time,
        correction=correction,
    )


def holdings_of(model: Model, config: RunConfig, resolved: Resolved, on_cpu: bool) -> list[Holding]:
    """Of each pipeline stage the first rank, which no other of it has more than."""
    split = resolved.split
    apart = split.world_size // split.pipeline_stages
    ranks = (
        Rank.of(model, config, resolved, stage * apart, on_cpu) for stage in range(split.pipeline_stages)
    )
    return [Holding(rank.own, states_of(rank), buffers(rank)) for rank in ranks]


def _dealt(holdings: Sequence[Holding]) -> tuple[int, ...]:
    """Blocks of each stage; empty: they are not known."""
    known = [each.own.dimensions for each in holdings]
    return tuple(each.layers for each in known if each is not None)


def largest_that_fits(
    config: RunConfig, resolved: Resolved, model: Model, place: Place, history: History | None = None
) -> int:
    """Of the micro-batches that `batch.micro_batch_size: auto` may become; the smallest, where none fits."""
    sizes = resolved.plan.candidates
    fits = [n for n in sizes if forecast_of(config, resolved.divided(n), model, place, history).fits]
    return max(fits, default=sizes[0])


def job_of(model: Model, config: RunConfig, resolved: Resolved) -> Job | None:
    """What the formulas of time see of a run; None: of a model without known blocks."""
    length = config.data.tokens_per_row
    language = config.model.language_model
    if length is None:
        return None
    split, json = resolved.split, resolved.deepspeed or {}
    zero = json.get("zero_optimization", {})
    width = 2 if split.precision != "fp32" and resolved.deepspeed is not None else 4
    fp8 = language.fp8 if language is not None else "none"
    return Job.of(
        model,
        length,
        rows=resolved.plan.micro_batch_size,
        micro_batches=resolved.plan.gradient_accumulation_steps,
        data=split.dp_world_size,
        tensor=split.tensor_parallel,
        pipeline=split.pipeline_stages,
        sequence=split.sequence_parallel,
        stage=split.zero_stage,
        hpz=(zero.get("zero_hpz_partition_size") or 1) > 1,
        overlap=zero.get("overlap_comm") is not False,
        recompute=_recomputed(config),
        quantised=config.adapter is not None and config.adapter.quantize is not None,
        fp8=0.0 if fp8 == "none" else 2 / 3 if fp8 == "rowwise_with_gw_hp" else 1.0,
        weight_bytes=width,
        reduce_bytes=width,
        optimizer_on=_where(json, "optimizer"),
        weights_on=_where(json, "param"),
        activations_on="cpu" if language is not None and language.activation_offload else "",
    )


def _recomputed(config: RunConfig) -> float:
    model = config.model.language_model
    if model is None or model.activation_checkpointing == "none":
        return 0.0
    if model.activation_checkpointing == "selective":
        return 0.5
    every = model.activation_checkpointing
    return 1.0 if every == "full" else 1.0 / every


def _where(json: dict[str, Any], what: str) -> str:
    device = get_dotted(json, f"zero_optimization.offload_{what}.device")
    return "" if device in (None, "none") else str(device)


@dataclass(frozen=True)
class Change:
    """One thing that takes less memory, everything else staying as it is."""

    name: str
    """In a few words: `smaller micro-batch`."""
    overrides: tuple[str, ...]
    """Put behind the command that was typed: `model.activation_checkpointing=full`, `--deepspeed`, `FILE`."""
    gain: int | None
    """Bytes a rank; None: not known."""
    slower: float | None
    """A step takes so many times as long; None: not known."""
    why: str
    """What else it changes, such as the curve; empty: nothing."""
    other_curve: bool = False
    """Whether the loss follows another one then."""

    def __str__(self) -> str:
        gain = [] if self.gain is None else [f"-{format_bytes(self.gain)}"]
        price = [] if self.slower in (None, 1.0) else [f"{self.slower:.3g} times as long"]
        return (
            f"{' '.join(self.overrides) or self.name} ({', '.join([*gain, *price, self.why or self.name])})"
        )


def ranked(changes: Iterable[Change], enough: Callable[[Change], bool]) -> list[Change]:
    """Those that are enough by themselves first, the cheapest of them at the front; then by what they gain;
    of both those behind the others that give another curve. Last what is not known, as it comes.

    Args:
        enough: Of a change whose gain is known.
    """

    def key(change: Change) -> tuple[int, bool, float]:
        if change.gain is None:
            return 2, False, 0.0
        if enough(change):
            return 0, change.other_curve, change.slower or 1.0
        return 1, change.other_curve, -float(change.gain)

    return sorted(changes, key=key)


def word(key: str, value: Any) -> str:
    """`key=value`, as the command line reads it."""
    if isinstance(value, str):
        try:
            is_plain = parse_override(f"{key}={value}")[1] == value
        except ConfigError:
            is_plain = False
        return f"{key}={value if is_plain else json.dumps(value, ensure_ascii=False)}"
    return f"{key}={json.dumps(value)}"


@dataclass(frozen=True)
class EngineStates:
    """Bytes of a kind of device by what holds them: of an engine, each storage counted once, and besides."""

    parameters: int
    gradients: int
    optimizer: int
    """What it keeps of what it steps, and the fp32 masters."""
    buffers: int
    """The engine's own: buckets, flat copies."""
    activations: int = 0
    """What none of the others is, where memory was out: activations, logits and temporaries."""
    before: int = 0
    """What there was before the model: libraries and data on a CPU."""

    @property
    def total(self) -> int:
        """All of it."""
        engines = self.parameters + self.gradients + self.optimizer + self.buffers
        return engines + self.activations + self.before

    def __str__(self) -> str:
        named = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "engine's buffers": self.buffers,
            "activations and temporaries": self.activations,
            "libraries and data": self.before,
        }
        return ", ".join(f"{format_bytes(each)} {name}" for name, each in named.items() if each)


@dataclass(frozen=True)
class Planned:
    """What the plan says of a run."""

    peak: int
    """Bytes of the fullest rank."""
    there: int
    """That it has for them."""
    changes: Sequence[Change] = ()
    """What would take less."""

    def __str__(self) -> str:
        return f"the plan had said {format_bytes(self.peak)} of {format_bytes(self.there)}"
