"""Forecasts a run's memory and speed before its first step, and compares them with the measured values.

Measured memory is that of rank 0, as in metrics.jsonl.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import nn

from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings, Settings
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job, describe_device
from pipeline.errors import ModelError, PipelineError, summarize_error
from pipeline.files import GIB
from pipeline.models import sizes
from pipeline.monitoring.events import PLAN, Event
from pipeline.monitoring.metrics import read_process_peak_bytes
from pipeline.planner.forecast import Forecast, choose_auto_micro_batch, forecast_resolved
from pipeline.planner.hardware import PlannedHardware, build_gpu_hardware, detect_hardware
from pipeline.planner.shapes import read_model_spec
from pipeline.planner.timing import TIME_TOLERANCE

log = logging.getLogger(__name__)

LEAST_ROWS = 3
"""Number of rows with a speed that a comparison needs; the first row includes compilation."""


class Expectation:
    """Compares the measured memory and speed of a run with its forecast.

    Args:
        found: Forecast of the run; `None` if the formulas do not cover it.
        length: Tokens in a row of data; `None` if rows have no fixed length.
        before: Peak resident memory of the process before its first step, in GiB.
    """

    def __init__(self, found: Forecast | None, length: int | None, before: float = 0.0):
        self.found = found
        self._length = length
        self._before = before

    @property
    def memory(self) -> str | None:
        """Expected memory in words, for the banner; `None` without a forecast."""
        found = self.found
        if found is None:
            return None
        least = "" if found.memory.is_complete else "at least "
        states = {
            "": found.memory.states.device,
            " in host memory": found.memory.states.host,
            " on disk": found.memory.states.disk,
        }
        held = ", ".join(f"{each.total / GIB:.2f}{where}" for where, each in states.items() if each.total)
        line = f"{least}{found.peak / GIB:.2f} GiB expected"
        line += f" (weights, gradients and optimizer states {held})"
        return f"{line}, which does not fit" if found.fits is False else line

    @property
    def speed(self) -> str | None:
        """Expected speed in words, as a range; `None` without a forecast."""
        if self.found is None or self.found.time is None:
            return None
        low, high = ((1 + sign * TIME_TOLERANCE) * self.found.time.tokens_per_second for sign in (-1, 1))
        return f"{low:,.0f} to {high:,.0f} tokens/s expected"

    def conclusion(self, peak_gib: float, speeds: Sequence[float]) -> Event | None:
        """Return an event that compares forecast and measurement.

        Args:
            peak_gib: Largest peak memory of any row; 0 without rows.
            speeds: Samples per second of each row.

        Returns:
            `None` if there is no forecast or too little was measured.
        """
        found = self.found
        if found is None:
            return None
        fields: dict[str, str | float] = {}
        comparisons: list[str] = []
        expected = found.peak / GIB
        # The system reports only the peak of a process, and a notebook may have held more before the run.
        is_hidden = found.hardware.device.kind == "cpu" and self._before >= expected
        if peak_gib and not is_hidden:
            fields |= {"memory_expected_gib": expected, "memory_measured_gib": peak_gib}
            comparisons.append(f"memory {peak_gib:.2f} GiB, expected {expected:.2f}")
        if found.time is not None and len(speeds) > LEAST_ROWS and self._length:
            measured = median(speeds[1:]) * self._length
            speed = found.time.tokens_per_second
            fields |= {"tokens_per_second_measured": measured, "tokens_per_second_expected": speed}
            comparisons.append(f"{measured:,.0f} tokens/s, expected {speed:,.0f}")
        return (
            Event(PLAN, f"plan: {'; '.join(comparisons)}", level="info", fields=fields)
            if comparisons
            else None
        )


def build_expectation(
    config: RunConfig, resolved: ResolvedSettings, job: Job, data: DataBundle, module: nn.Module
) -> Expectation:
    """Forecast a run on this job's machine. A failure of the formulas does not end the run.

    Args:
        config: Recipe of the run.
        resolved: Resolved settings.
        job: Ranks of the job.
        data: Data of the run, for the size of the vocabulary.
        module: Model of the engine, measured if the recipe does not describe its shapes. Each rank must have
            all parameters or shards of all.
    """
    length = config.data.tokens_per_row
    is_cut = resolved.split.tensor_parallel * resolved.split.pipeline_stages > 1
    with _log_failures():
        model = read_model_spec(_set_vocab_size(config, data.vocab_size)) or (
            None if is_cut else sizes.measure_module(module)
        )
        if model is not None:
            found = forecast_resolved(config, resolved, model, _describe_hardware(job))
            return Expectation(found, length, read_process_peak_bytes() / GIB)
    return Expectation(None, length)


def guess_micro_batch(
    config: RunConfig, resolved: ResolvedSettings, job: Job, data: DataBundle
) -> int | None:
    """Return the largest micro-batch that rank 0 expects to fit; `None` if it is not known. Collective."""
    found: int | None = None
    if job.ranks.is_main_process:  # ranks on different machines could compute different answers
        with _log_failures():
            if (model := read_model_spec(_set_vocab_size(config, data.vocab_size))) is not None:
                found = choose_auto_micro_batch(config, resolved, model, _describe_hardware(job))
    found = job.broadcast_object(found)
    return found


def forecast_on_this_machine(job: Job, data: DataBundle, settings: Settings) -> Forecast:
    """Forecast a run with these settings on this job's machine.

    Raises:
        PipelineError: Its model is not known, or it cannot be split so.
    """
    config = _set_vocab_size(settings.config, data.vocab_size)
    place = _describe_hardware(job)
    model = read_model_spec(config)
    if model is None:
        raise ModelError("the model has to be built to be known")
    resolved = settings.resolve(job.ranks.world_size, place.device)
    if resolved.batch_plan.is_provisional:
        resolved = resolved.with_micro_batch_size(choose_auto_micro_batch(config, resolved, model, place))
    return forecast_resolved(config, resolved, model, place)


@contextmanager
def _log_failures() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a mistake in a formula must not end the run
        is_mistake = not isinstance(error, PipelineError)
        log.log(
            logging.WARNING if is_mistake else logging.INFO, "no plan of this run: %s", summarize_error(error)
        )
        if is_mistake:
            log.debug("its traceback", exc_info=True)


def _set_vocab_size(config: RunConfig, words: int | None) -> RunConfig:
    """Set the vocabulary size from the data: a trained tokenizer may have fewer entries than asked."""
    model = config.model.language_model
    if words is None or model is None or model.architecture is None or model.vocab_size is not None:
        return config
    return config.model_copy(update={"model": model.model_copy(update={"vocab_size": words})})


def _describe_hardware(job: Job) -> PlannedHardware:
    ranks = job.ranks
    nodes = max(1, ranks.world_size // ranks.local_world_size)
    if job.device.type != "cuda":
        return detect_hardware(ranks.local_world_size, nodes)
    card = torch.cuda.get_device_properties(job.device)
    device = describe_device(job.device)
    return build_gpu_hardware(
        card.name, card.total_memory, device, per_node=ranks.local_world_size, nodes=nodes
    )
