"""Forecasts a run: memory of a rank by part, time of a step, host memory, disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings, Settings
from pipeline.files import GIB, format_bytes
from pipeline.planner.hardware import PlannedHardware
from pipeline.planner.memory import RankMemory, estimate_memory
from pipeline.planner.model import ModelSpec
from pipeline.planner.states import count_checkpoint_bytes
from pipeline.planner.timing import (
    DEFAULT_DOCUMENT_TOKENS,
    StepSpec,
    StepTime,
    estimate_rates,
    estimate_step_time,
    find_untimed_feature,
    packs_documents,
)


@dataclass(frozen=True)
class Forecast:
    """Estimated memory, time and disk space of a run on given hardware."""

    model: ModelSpec
    config: RunConfig
    resolved: ResolvedSettings
    hardware: PlannedHardware
    memory: RankMemory
    time: StepTime | None
    """Time of a step; `None` if it is not known for this model or this device."""

    @property
    def peak(self) -> int:
        """Peak bytes on the device of the rank that needs most."""
        return int(self.memory.peak)

    @property
    def fits(self) -> bool | None:
        """Return whether device and machine have enough memory; `None` if only activations are unknown."""
        if self.lacking:
            return False
        return True if self.memory.is_complete else None

    @property
    def lacking(self) -> str:
        """Kind of memory that is too small, with its reason; empty if the run fits."""
        there = self.hardware.memory
        share = self.memory.usable_share
        needed = self.peak
        if needed > there:
            return "memory"
        if needed + self.memory.spare_bytes > share * there:
            reason = (
                f"{format_bytes(self.memory.spare_bytes)} more should be free, as freed memory is fragmented"
            )
            return reason + (
                f", and only {share:.0%} of the memory is sure to be usable" if share < 1 else ""
            )
        limit = self.hardware.host_memory
        if limit is not None and self.host_bytes > limit:
            return f"host memory, {self.host_bytes / GIB:,.0f} of {limit / GIB:,.0f} GiB a machine"
        return ""

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on one machine."""
        return min(self.hardware.per_node, self.resolved.split.world_size)

    @property
    def host_bytes(self) -> int:
        """Bytes of main memory in one machine, for all its ranks together."""
        return int(self.memory.host) * self.ranks_per_node

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, relative to the peak of the data sheet; `None` if not known."""
        peak = self.hardware.gpu.peak(self.resolved.split.precision, self.resolved.tf32)
        return None if self.time is None or peak is None else self.time.mfu(peak)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return count_checkpoint_bytes(self.model, self.config, self.resolved)

    @property
    def disk_bytes(self) -> int:
        """Largest number of bytes of the run's checkpoints: those kept, and one that is being written."""
        kept = self.config.checkpoint
        return self.checkpoint_bytes * (kept.keep_last + kept.keep_best + 1)

    @property
    def hours(self) -> float | None:
        """Hours of all steps, without evaluation and checkpoints; `None` if not known."""
        steps = self.config.max_steps
        return None if self.time is None or steps is None else self.time.seconds * steps / 3600

    @property
    def cost(self) -> float | None:
        """Cost of the run by `log.price_per_device_hour`; `None` if not known."""
        price = self.config.log.price_per_device_hour
        if self.hours is None or price is None:
            return None
        return self.hours * price * self.resolved.split.world_size

    def remarks(self) -> Iterator[str]:
        """Yield remarks on where the numbers are not exact."""
        if ":" in self.config.optimizer.kind:
            yield f"{self.config.optimizer.kind} is taken to keep as much as AdamW: two numbers a parameter"
        if not self.memory.is_complete:
            yield "the memory of activations is not known for this model: the peak is without it"
        elif self.memory.overestimate:
            yield self.memory.overestimate
        there = self.hardware.host_memory
        if self.hardware.assumes_host and there is not None and self.host_bytes > there / 2:
            yield f"{there / GIB:,.0f} GiB of host memory a machine are assumed; give --host-memory GIB"
        if self.time is None:
            if what := find_untimed_feature(self.config, self.resolved):
                yield f"the time of {what} is not known: no published run was compared"
            return
        if self.model.dimensions is not None and self.model.dimensions.experts:
            yield "times of mixtures of experts are not verified: no published run was compared"
        row = self.config.data.tokens_per_row or 0
        if (
            self.hardware.document_tokens is None
            and packs_documents(self.config)
            and row > DEFAULT_DOCUMENT_TOKENS
        ):
            yield (
                f"attention is timed for documents of {DEFAULT_DOCUMENT_TOKENS:,} tokens; give the average "
                "length of yours with --document-tokens N"
            )


def forecast(settings: Settings, model: ModelSpec, place: PlannedHardware) -> Forecast:
    """Forecast a run with these settings.

    Raises:
        ConfigError: The run cannot be split so over the ranks of this hardware.
    """
    return forecast_resolved(settings.config, settings.resolve(place.ranks, place.device), model, place)


def forecast_resolved(
    config: RunConfig, resolved: ResolvedSettings, model: ModelSpec, place: PlannedHardware
) -> Forecast:
    """Forecast a run whose settings are resolved for this hardware."""
    rates = estimate_rates(
        place.gpu,
        place.network,
        per_node=place.per_node,
        compiled=resolved.compile,
        precision=resolved.split.precision,
        tf32=resolved.tf32,
    )
    job = StepSpec.from_run(model, config, resolved, place.document_tokens)
    return Forecast(
        model=model,
        config=config,
        resolved=resolved,
        hardware=place,
        memory=estimate_memory(model, config, resolved, place.device.kind),
        time=None if rates is None or job is None else estimate_step_time(job, rates),
    )


def choose_auto_micro_batch(
    config: RunConfig, resolved: ResolvedSettings, model: ModelSpec, place: PlannedHardware
) -> int:
    """Return the largest micro-batch that `auto` may become and that fits, or the smallest if none fits."""
    sizes = resolved.batch_plan.candidates
    fits = [
        n for n in sizes if forecast_resolved(config, resolved.with_micro_batch_size(n), model, place).fits
    ]
    return max(fits, default=sizes[0])
