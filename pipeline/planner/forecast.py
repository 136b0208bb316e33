"""Forecasts a run: memory of a rank by part, time of a step, host memory and disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipeline.config.optional_packages import MissingPackageError
from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings, Settings, check_packages
from pipeline.config.split_conflicts import Combination
from pipeline.files import GIB, format_bytes
from pipeline.planner.hardware import PlannedHardware
from pipeline.planner.memory import RankMemory, estimate_memory
from pipeline.planner.model import ModelSpec
from pipeline.planner.shapes import find_unread_tokenizer
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
    """Whole model, before any split."""
    config: RunConfig
    """Recipe of the run."""
    resolved: ResolvedSettings
    """Settings resolved for the ranks and the device of the hardware."""
    hardware: PlannedHardware
    """Hardware that the run is planned for."""
    memory: RankMemory
    """Memory of the rank that needs most."""
    time: StepTime | None
    """Time of a step; `None` if it is not known for this model or this device."""

    @property
    def peak(self) -> int:
        """Peak bytes on the device of the rank that needs most."""
        return int(self.memory.peak)

    @property
    def fits(self) -> bool | None:
        """Return whether the run fits; `None` if activations are not known and all else fits."""
        if self.lacking:
            return False
        return True if self.memory.is_complete else None

    @property
    def lacking(self) -> str:
        """Reason why the run does not fit; empty if its known parts fit.

        It is `memory`, a text that begins with `host memory`, or a sentence about memory that must stay free.
        """
        available = self.hardware.memory
        usable_share = self.memory.usable_share
        spare_bytes = self.memory.spare_bytes
        if self.peak > available:
            return "memory"
        if self.peak + spare_bytes > usable_share * available:
            reason = f"{format_bytes(spare_bytes)} more should be free, as freed memory is fragmented"
            if usable_share < 1:
                reason += f", and only {usable_share:.0%} of the memory is sure to be usable"
            return reason
        host_limit = self.hardware.host_memory
        if host_limit is not None and not self.fits_host:
            return f"host memory, {self.host_bytes / GIB:,.0f} of {host_limit / GIB:,.0f} GiB per machine"
        return ""

    @property
    def fits_host(self) -> bool:
        """Return whether the run fits into host memory, as far as its size is known."""
        host_limit = self.hardware.host_memory
        return host_limit is None or self.host_bytes <= host_limit

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
        """Peak bytes of the run's checkpoints: all that are kept, and the next one while it is written.

        Does not count the checkpoints of `checkpoint.keep_every`.
        """
        section = self.config.checkpoint
        return self.checkpoint_bytes * (section.keep_last + section.keep_best + 1)

    @property
    def hours(self) -> float | None:
        """Hours of all steps, without evaluation and checkpoints; `None` if not known."""
        steps = self.config.max_steps
        return None if self.time is None or steps is None else self.time.seconds * steps / 3600

    @property
    def cost(self) -> float | None:
        """Cost of all steps on all ranks, by `log.price_per_device_hour`; `None` if not known."""
        price = self.config.log.price_per_device_hour
        if self.hours is None or price is None:
            return None
        return self.hours * price * self.resolved.split.world_size

    def remarks(self) -> Iterator[str]:
        """Yield remarks on where the numbers are not exact."""
        if ":" in self.config.optimizer.kind:
            yield (
                f"{self.config.optimizer.kind} is assumed to keep as much as AdamW: two numbers per parameter"
            )
        try:
            check_packages(self._combination)
        except MissingPackageError as error:
            yield f"to train on this machine: {error}"
        tokenizer = find_unread_tokenizer(self.config)
        if tokenizer is not None:
            yield f"{tokenizer} cannot be read: the model's default vocabulary is assumed"
        if not self.memory.is_complete:
            yield "the memory of activations is not known for this model: the peak does not include it"
        elif self.memory.overestimate:
            yield self.memory.overestimate
        host_memory = self.hardware.host_memory
        if self.hardware.assumes_host and host_memory is not None and self.host_bytes > host_memory / 2:
            yield (
                f"{host_memory / GIB:,.0f} GiB of host memory per machine are assumed; give --host-memory GIB"
            )
        if self.time is None:
            feature = find_untimed_feature(self.config, self.resolved)
            if feature:
                yield f"the time of {feature} is not known: no published run was compared"
            return
        if self.model.dimensions is not None and self.model.dimensions.experts:
            yield "times of mixtures of experts are not verified: no published run was compared"
        if self._assumes_document_length():
            yield (
                f"attention is timed for documents of {DEFAULT_DOCUMENT_TOKENS:,} tokens; give the average "
                "length of yours with --document-tokens N"
            )

    @property
    def _combination(self) -> Combination:
        """Settings of the run, as the checks of combinations take them."""
        resolved = self.resolved
        deepspeed = resolved.deepspeed or {}
        return Combination(self.config, deepspeed, resolved.split, self.hardware.device, resolved.compile)

    def _assumes_document_length(self) -> bool:
        """Return whether the time depends on a length of documents that is not stated."""
        if self.hardware.document_tokens is not None or not packs_documents(self.config):
            return False
        return (self.config.data.tokens_per_row or 0) > DEFAULT_DOCUMENT_TOKENS


def forecast(settings: Settings, model: ModelSpec, hardware: PlannedHardware) -> Forecast:
    """Forecast a run with these settings.

    Args:
        settings: Settings of the run.
        model: Whole model, before any split.
        hardware: Hardware that the run is planned for.

    Raises:
        ConfigError, ModelError: The settings are refused, or the model cannot be split as they say.
    """
    resolved = settings.resolve(hardware.ranks, hardware.device, needs_packages=False)
    return forecast_resolved(settings.config, resolved, model, hardware)


def forecast_resolved(
    config: RunConfig, resolved: ResolvedSettings, model: ModelSpec, hardware: PlannedHardware
) -> Forecast:
    """Forecast a run whose settings are resolved for this hardware.

    Raises:
        ConfigError, ModelError: The model cannot be split as the settings say, or nothing of it is trained.
    """
    rates = estimate_rates(
        hardware.gpu,
        hardware.network,
        per_node=hardware.per_node,
        compiled=resolved.compile,
        precision=resolved.split.precision,
        tf32=resolved.tf32,
    )
    step = StepSpec.from_run(model, config, resolved, hardware.document_tokens)
    return Forecast(
        model=model,
        config=config,
        resolved=resolved,
        hardware=hardware,
        memory=estimate_memory(model, config, resolved, hardware.device.kind),
        time=None if rates is None or step is None else estimate_step_time(step, rates),
    )


def choose_auto_micro_batch(
    config: RunConfig, resolved: ResolvedSettings, model: ModelSpec, hardware: PlannedHardware
) -> int:
    """Return the largest micro-batch size for `auto` that fits, or the smallest if none is known to fit."""

    def fits(size: int) -> bool:
        changed = resolved.with_micro_batch_size(size)
        return bool(forecast_resolved(config, changed, model, hardware).fits)

    sizes = resolved.batch_plan.candidates
    return max(filter(fits, sizes), default=sizes[0])


def resolve_auto_micro_batch(settings: Settings, model: ModelSpec, hardware: PlannedHardware) -> Settings:
    """Return the settings with the largest micro-batch that is expected to fit in place of `auto`."""
    resolved = settings.resolve(hardware.ranks, hardware.device, needs_packages=False)
    if not resolved.batch_plan.is_provisional:
        return settings
    return settings.with_micro_batch_size(choose_auto_micro_batch(settings.config, resolved, model, hardware))
