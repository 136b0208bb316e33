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

MIN_ROWS = 3
"""Minimum number of rows for a comparison of the speed, besides the first, which includes compilation."""


class Expectation:
    """Compares the measured memory and speed of a run with its forecast.

    Args:
        forecast: Forecast of the run; `None` if the formulas do not cover it.
        length: Tokens in a row of data; `None` if rows have no fixed length.
        peak_before_gib: Peak resident memory of the process before its first step, in GiB.
    """

    def __init__(self, forecast: Forecast | None, length: int | None, peak_before_gib: float = 0.0):
        self._forecast = forecast
        self._length = length
        self._peak_before_gib = peak_before_gib

    @property
    def memory(self) -> str | None:
        """Text about the expected memory, for the banner; `None` without a forecast."""
        forecast = self._forecast
        if forecast is None:
            return None
        states = {
            "": forecast.memory.states.device,
            " in host memory": forecast.memory.states.host,
            " on disk": forecast.memory.states.disk,
        }
        sizes = ", ".join(f"{each.total / GIB:.2f}{where}" for where, each in states.items() if each.total)
        bound = "" if forecast.memory.is_complete else "at least "
        line = f"{bound}{forecast.peak / GIB:.2f} GiB expected"
        line += f" (weights, gradients and optimizer states {sizes})"
        return f"{line}, which does not fit" if forecast.fits is False else line

    @property
    def speed(self) -> str | None:
        """Text about the expected speed, a range of positions per second; `None` without a forecast."""
        if self._forecast is None or self._forecast.time is None:
            return None
        speed = self._forecast.time.tokens_per_second
        low = (1 - TIME_TOLERANCE) * speed
        high = (1 + TIME_TOLERANCE) * speed
        return f"{low:,.0f} to {high:,.0f} positions/s expected"

    def compare(self, peak_gib: float, speeds: Sequence[float]) -> Event | None:
        """Return an event that compares forecast and measurement.

        Args:
            peak_gib: Largest peak memory of any row; 0 without rows.
            speeds: Samples per second of each row.

        Returns:
            `None` if there is no forecast or too little was measured.
        """
        forecast = self._forecast
        if forecast is None:
            return None
        fields: dict[str, str | float] = {}
        comparisons: list[str] = []
        expected_gib = forecast.peak / GIB
        # The system reports only the peak of a process, and a notebook may have used more before the run.
        is_hidden = forecast.hardware.device.kind == "cpu" and self._peak_before_gib >= expected_gib
        if peak_gib and not is_hidden:
            fields |= {"memory_expected_gib": expected_gib, "memory_measured_gib": peak_gib}
            comparisons.append(f"memory {peak_gib:.2f} GiB, expected {expected_gib:.2f}")
        if forecast.time is not None and self._length and len(speeds) - 1 >= MIN_ROWS:
            measured = median(speeds[1:]) * self._length
            expected = forecast.time.tokens_per_second
            fields |= {"tokens_per_second_measured": measured, "tokens_per_second_expected": expected}
            comparisons.append(f"{measured:,.0f} positions/s, expected {expected:,.0f}")
        if not comparisons:
            return None
        return Event(PLAN, f"plan: {'; '.join(comparisons)}", level="info", fields=fields)


def build_expectation(
    config: RunConfig, resolved: ResolvedSettings, job: Job, data: DataBundle, module: nn.Module
) -> Expectation:
    """Forecast a run on this job's machine. A failure of the formulas does not end the run.

    Args:
        config: Recipe of the run.
        resolved: Resolved settings.
        job: Ranks of the job.
        data: Data of the run, for the size of the vocabulary.
        module: Model of the engine. If the recipe does not describe the model's shapes, they are measured on
            it. With tensor or pipeline parallelism they are not: a rank has only a part of the model.
    """
    length = config.data.tokens_per_row
    is_complete = resolved.split.tensor_parallel * resolved.split.pipeline_stages == 1
    with _log_failures():
        model = read_model_spec(_set_vocab_size(config, data.vocab_size))
        if model is None and is_complete:
            model = sizes.measure_module(module)
        if model is not None:
            forecast = forecast_resolved(config, resolved, model, _describe_hardware(job))
            return Expectation(forecast, length, read_process_peak_bytes() / GIB)
    return Expectation(None, length)


def guess_micro_batch(
    config: RunConfig, resolved: ResolvedSettings, job: Job, data: DataBundle
) -> int | None:
    """Return the largest micro-batch that rank 0 expects to fit; `None` if it is not known. Collective."""
    guess: int | None = None
    if job.ranks.is_main_process:  # ranks on different machines could compute different sizes
        with _log_failures():
            model = read_model_spec(_set_vocab_size(config, data.vocab_size))
            if model is not None:
                guess = choose_auto_micro_batch(config, resolved, model, _describe_hardware(job))
    guess = job.broadcast_object(guess)
    return guess


def forecast_on_this_machine(job: Job, data: DataBundle, settings: Settings) -> Forecast:
    """Forecast a run with these settings on this job's machine.

    Raises:
        PipelineError: The recipe does not describe the model's shapes, or the settings are refused.
    """
    config = _set_vocab_size(settings.config, data.vocab_size)
    hardware = _describe_hardware(job)
    model = read_model_spec(config)
    if model is None:
        raise ModelError("the shapes of the model are known only after it is built")
    resolved = settings.resolve(job.ranks.world_size, hardware.device)
    if resolved.batch_plan.is_provisional:
        resolved = resolved.with_micro_batch_size(choose_auto_micro_batch(config, resolved, model, hardware))
    return forecast_resolved(config, resolved, model, hardware)


@contextmanager
def _log_failures() -> Iterator[None]:
    """Log an exception in the `with` block and suppress it: a mistake in a formula must not end the run."""
    try:
        yield
    except PipelineError as error:
        log.info("no forecast for this run: %s", summarize_error(error))
    except Exception as error:
        log.warning("no forecast for this run: %s", summarize_error(error))
        log.debug("traceback of the failed forecast", exc_info=True)


def _set_vocab_size(config: RunConfig, vocab_size: int | None) -> RunConfig:
    """Return the recipe with the vocabulary size of the data, unless the recipe's model has one.

    A tokenizer that was trained on the data may have fewer entries than the recipe asks for.
    """
    model = config.model.language_model
    if vocab_size is None or model is None:
        return config
    if model.architecture is None or model.vocab_size is not None:
        return config
    return config.model_copy(update={"model": model.model_copy(update={"vocab_size": vocab_size})})


def _describe_hardware(job: Job) -> PlannedHardware:
    """Return the hardware that the job runs on, for the planner's formulas."""
    ranks = job.ranks
    nodes = max(1, ranks.world_size // ranks.local_world_size)
    if job.device.type != "cuda":
        return detect_hardware(ranks.local_world_size, nodes)
    card = torch.cuda.get_device_properties(job.device)
    device = describe_device(job.device)
    return build_gpu_hardware(
        card.name, card.total_memory, device, per_node=ranks.local_world_size, nodes=nodes
    )
