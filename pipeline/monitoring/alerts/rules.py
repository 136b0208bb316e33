"""Alerts on learning, time and memory, and the table of all alerts.

A healthy run must not raise an alert, since users soon ignore alerts without a cause. Other processes on the
machine may slow a run for a while, so an alert on step times or slow ranks needs several slow windows of rows
in succession. An alert on memory needs several windows of growth.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress, pairwise
from operator import attrgetter
from statistics import fmean, median, median_low
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.shards import BUFFER, WEIGHT, Shard
from pipeline.config.deepspeed_json import get_min_loss_scale
from pipeline.config.loading import get_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.distributed.diagnosis import RankProcess
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.engine.memory import unmap_freed_tensors
from pipeline.errors import NonFiniteLossError, format_names, format_ranges
from pipeline.monitoring.alerts import CONTENDED_LOAD, Alert, RowDetails, StopRequested, restore_alerts
from pipeline.monitoring.events import NO_TARGETS, Event

SPIKE_WINDOW = 128  # number of newest values that define the normal range
SCATTER_WINDOW = 32  # number of newest values whose differences define the current scatter
LEVEL_WINDOW = 5  # number of newest values whose median is the local level
MIN_VALUES = 19  # values before the first check: step 20 is the first one that can be a spike
# A value counts as high as the first one if its logarithm is at most this much lower.
FIRST_VALUE_MARGIN = 0.05
NEW_LEVEL_SPIKES = 16  # consecutive spikes after which their level becomes the normal one
FLOOR_SHARE = 0.25  # share of the median of the first MIN_VALUES values: lower values are never spikes
# Quantile of the rises above the local level that are harmless: a hard data source has few batches.
RISE_QUANTILE = 0.98
CORE_SHARE = 0.8  # share of the differences, from the smallest on, that is used; the rest may be outliers
# For independent standard normal values: the mean of the CORE_SHARE smallest absolute differences of
# neighbours, and the quantile RISE_QUANTILE of the values.
GAUSSIAN_CORE_MEAN = 0.79
GAUSSIAN_RISE = 2.054
MIN_POSITIVE = sys.float_info.min
LOG_MIN_POSITIVE = math.log(MIN_POSITIVE)


@dataclass(frozen=True)
class SpikeThreshold:
    """Minimum distance of a spike from the local level. A spike exceeds both `ratio` and `deviations`."""

    ratio: float
    """Spike value divided by the level."""
    deviations: float
    """Standard deviations of the logarithm between the level and the spike."""
    deviations_at_first: float
    """Replaces `deviations` for values that are as high as the first one of the run."""


# Chosen so that healthy runs on a CPU have no spikes: shipped recipes, cyclic learning rates, tiny batches,
# noisy labels, preferences. tests/monitoring/alerts/test_spike_detector.py has their curves.
LOSS_THRESHOLD = SpikeThreshold(1.5, 8.0, 5.5)
GRAD_NORM_THRESHOLD = SpikeThreshold(6.0, 12.0, 12.0)


class SpikeDetector:
    """Detects spikes of a noisy series, by its local level and the scatter of its logarithms.

    The level is the median of the last LEVEL_WINDOW values that were not spikes. The scatter is estimated
    from differences of neighbours, which a falling loss does not increase. Logarithms suit losses and
    gradient norms: these are positive, scatter in proportion to their size, and have a long upper tail.

    Once a loss has fallen to a hundredth of its first values, a jump by a factor of 1,000 may be harmless. So
    values below FLOOR_SHARE of the first values' median are never spikes. A series with a negative value in
    its window has no ratios, so it has no spikes.
    """

    def __init__(self, threshold: SpikeThreshold) -> None:
        self._threshold = threshold
        self._values: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._logs: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._consecutive_spikes = 0
        self._floor = 0.0  # 0 until MIN_VALUES values were added
        self._first = 0.0  # first value of the run; 0 before it
        self.limit = math.inf
        """Value above which the next value is a spike; inf until MIN_VALUES values were added."""

    @property
    def normal_level(self) -> float:
        """Median of the newest normal values; NaN before the first value."""
        return _compute_median(np.sort(list(self._values)[-LEVEL_WINDOW:])) if self._values else math.nan

    def add(self, value: float) -> bool:
        """Add the next value unless it is a spike or not finite.

        Returns:
            Whether it is a spike. After NEW_LEVEL_SPIKES consecutive spikes the detector forgets the normal
            values, and learns the new level from the next ones.
        """
        if not math.isfinite(value):
            return False
        if value <= self.limit:
            self._consecutive_spikes = 0
            is_first_of_run = not self._values and not self._floor
            if is_first_of_run:
                self._first = value
            self._accept(value)
            return False
        self._consecutive_spikes += 1
        if self._consecutive_spikes == NEW_LEVEL_SPIKES:
            self._values.clear()
            self._logs.clear()
            self._consecutive_spikes = 0
            self.limit = math.inf
        return True

    def _accept(self, *values: float) -> None:
        """Append normal values and compute the limit of the next value."""
        self._values += values
        self._logs += [math.log(value) if value > MIN_POSITIVE else LOG_MIN_POSITIVE for value in values]
        self.limit = math.inf
        if len(self._values) < MIN_VALUES or min(self._values) < 0:
            return
        if not self._floor:
            self._floor = FLOOR_SHARE * _compute_median(np.sort(self._values))
        if not self._floor:  # the first values are 0
            return
        logs = np.array(self._logs)
        level = _compute_median(np.sort(logs[-LEVEL_WINDOW:]))
        deviation = estimate_scatter(logs)
        min_rise = math.log(self._threshold.ratio)
        log_limit = level + max(min_rise, self._threshold.deviations * deviation)
        if self._first > 0:
            log_limit_at_first = level + max(min_rise, self._threshold.deviations_at_first * deviation)
            log_limit = min(log_limit, max(log_limit_at_first, math.log(self._first) - FIRST_VALUE_MARGIN))
        self.limit = max(math.exp(min(log_limit, 700.0)), self._floor)  # exp overflows at 710

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state as lists of numbers, for a checkpoint."""
        return {
            "values": list(self._values),
            "refused": [float(self._consecutive_spikes)],
            "floor": [self._floor],
            "first": [self._first],
        }

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the state of a checkpoint."""
        self._values.clear()
        self._logs.clear()
        self._consecutive_spikes = int(state["refused"][0])
        self._floor = float(state["floor"][0])
        self._first = float(state["first"][0])
        self._accept(*state["values"])


def estimate_scatter(logs: NDArray[np.float64]) -> float:
    """Return the standard deviation of a series around its moving level.

    It is the larger of two estimates: one from the differences of neighbours, and one from the rises above
    the local level.

    Args:
        logs: Logarithms of the values in order, (values,), at least MIN_VALUES.
    """
    recent = logs[-SCATTER_WINDOW:]
    differences = recent[1:] - recent[:-1]
    distances = np.sort(np.abs(differences - _compute_median(np.sort(differences))))
    core = distances[: math.ceil(CORE_SHARE * len(distances))]
    # Each value's local level: the median of the LEVEL_WINDOW values before it.
    shifted = [logs[start : len(logs) - LEVEL_WINDOW + start] for start in range(LEVEL_WINDOW)]
    levels = np.sort(shifted, axis=0)[LEVEL_WINDOW // 2]
    rises = np.sort(logs[LEVEL_WINDOW:] - levels)
    rise = float(rises[min(int(RISE_QUANTILE * len(rises)), len(rises) - 2)])  # ignores a single outlier
    return max(float(core.sum()) / (len(core) * GAUSSIAN_CORE_MEAN), rise / GAUSSIAN_RISE)


def _compute_median(ordered: NDArray[np.float64]) -> float:
    """Return the median of sorted values. Every step calls it, and np.median takes several times as long."""
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


LOSS_SPIKE = "loss_spike"
GRAD_NORM_SPIKE = "grad_norm_spike"
SPIKE_TEXTS = {
    LOSS_SPIKE: (
        "loss",
        "look at the samples of that step; if the loss does not come down by itself, resume from the last "
        "checkpoint with a lower optimizer.learning_rate, a longer schedule.warmup or a lower "
        "optimizer.max_grad_norm",
    ),
    GRAD_NORM_SPIKE: (
        "gradient norm",
        "if the loss rises too, lower optimizer.learning_rate or optimizer.max_grad_norm, or raise "
        "schedule.warmup; look at the samples of that step",
    ),
}
"""Name of a SpikeAlert -> words for its series in the message, and advice."""
CALM_STEPS = 32  # steps without a spike after which the next spike is reported again
NO_TARGETS_ADVICE = (
    "look at these samples: their labels are all -100 or have weight 0, which happens if a prompt fills the "
    "whole sequence; raise data.sequence_length, or remove the samples from the data"
)


class NonFiniteAlert:
    """Reports steps that were skipped since the previous row, and losses that are infinite or NaN.

    fp16 finds its loss scale by skipping steps. So in fp16, skipped steps with a finite loss are an event of
    level `info`, and an alert only if the scale cannot fall any further.
    """

    def __init__(self, lowest_scale: float | None) -> None:
        """Create the alert.

        Args:
            lowest_scale: Lowest fp16 loss scale of DeepSpeed, or the fixed one; `None` without fp16.
        """
        self._lowest_scale = lowest_scale

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        num_skipped = sum(details.skipped)
        scale = details.row.get("train/loss_scale")
        if num_skipped:
            is_bad = [bool(skipped) for skipped in details.skipped]
        else:
            is_bad = [not math.isfinite(loss) for loss in details.losses]
        if True not in is_bad:
            return None
        steps = list(range(step - len(is_bad) + 1, step + 1))
        bad_steps = list(compress(steps, is_bad))
        plural = "s" if len(bad_steps) > 1 else ""
        which = f"step{plural} {format_ranges(set(bad_steps), steps)}"
        fields = {
            "at_step": float(bad_steps[0]),
            "steps": float(details.steps),
            "skipped": float(num_skipped),
        }
        if not num_skipped:
            message = f"the loss of {which} is infinite or NaN, but the gradient is not"
            advice = "check what the objective returns for these batches, and their loss mask"
            return Event("non_finite", message, advice, fields=fields)
        message = f"{which} skipped: the gradient was infinite or NaN"
        advice = "look at the data, lower optimizer.learning_rate, or raise schedule.warmup"
        if scale is None:
            return Event("non_finite", message, advice, fields=fields)
        fields["scale"] = scale
        if self._lowest_scale is not None and scale <= self._lowest_scale:
            message += f", and the fp16 loss scale cannot fall below {scale:g}"
            return Event("loss_scale_floor", message, f"use bf16; or {advice}", fields=fields)
        message += f"; the fp16 loss scale is now {scale:g}"
        # `losses` are not multiplied by the loss scale, so a lower scale does not help.
        if not all(map(math.isfinite, compress(details.losses, is_bad))):
            message += ", and the loss itself is infinite or NaN"
            return Event("non_finite", message, advice, fields=fields)
        return Event("non_finite", message, level="info", fields=fields)


# Consecutive steps without a finite gradient that end a run. fp16 first searches its loss scale: from 2**32
# down this takes 32 steps.
MAX_CONSECUTIVE_SKIPS = {"fp32": 10, "bf16": 10, "fp16": 40}


class NonFiniteStepLimit:
    """Ends a run after too many consecutive steps without a finite gradient."""

    def __init__(self, precision: str, first_step: int, max_steps: int) -> None:
        """Create the limit.

        Args:
            precision: Precision of the run: a key of MAX_CONSECUTIVE_SKIPS.
            first_step: Steps done before this process.
            max_steps: Last step of the run.
        """
        self._precision = precision
        self._first_step = first_step
        self._max_steps = max_steps

    def __call__(self, step: int, details: RowDetails) -> StopRequested | None:
        """See Alert."""
        skips = int(details.row.get("train/skipped_in_a_row", 0))
        limit = MAX_CONSECUTIVE_SKIPS[self._precision]
        # A short process that skipped all of its steps must not end as a success. In fp16 it may still search
        # its loss scale.
        if step == self._max_steps and self._precision != "fp16":
            limit = min(limit, step - self._first_step)
        if skips == 0 or skips < limit:
            return None
        return StopRequested(
            NonFiniteLossError(
                f"the last {skips} steps had an infinite or NaN gradient (loss {details.row['train/loss']}) "
                "and were skipped; the parameters are those of the last good step. Look at the data, lower "
                "optimizer.learning_rate, or raise schedule.warmup"
            )
        )


class SpikeAlert:
    """Reports the first of several spikes, and the next one after CALM_STEPS steps without a spike.

    Checkpoints include the count of these steps. A spike between two rows is reported with the next row.
    """

    def __init__(self, name: str, detector: SpikeDetector) -> None:
        """Create the alert.

        Args:
            name: Key of SPIKE_TEXTS.
            detector: Detector of the losses or of the gradient norms. The safeguard saves its state.
        """
        self.name = name
        self._detector = detector
        self._calm_steps = CALM_STEPS
        """Number of steps since the last spike."""

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        event = None
        values = details.losses if self.name == LOSS_SPIKE else details.grad_norms
        for value_step, value in enumerate(values, step - len(values) + 1):
            limit = self._detector.limit
            is_after_calm = self._calm_steps >= CALM_STEPS and event is None
            if is_after_calm and math.isfinite(value) and value > limit:
                event = self._build_event(value_step, value, self._detector.normal_level, limit)
            is_spike = self._detector.add(value)
            self._calm_steps = 0 if is_spike else self._calm_steps + 1
        return event

    def _build_event(self, step: int, value: float, normal: float, limit: float) -> Event:
        series, advice = SPIKE_TEXTS[self.name]
        return Event(
            self.name,
            f"the {series} of step {step} is {value:.4g}, {value / normal:.1f} times its normal level of "
            f"{normal:.4g} (values above {limit:.4g} count as spikes)",
            advice,
            fields={"at_step": step, "value": value, "normal": normal, "limit": limit},
        )

    def state_dict(self) -> dict[str, Any]:
        """See StatefulAlert. The safeguard saves the state of the detector."""
        return {"calm": self._calm_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See StatefulAlert."""
        self._calm_steps = int(state["calm"])


def report_no_targets(step: int, details: RowDetails) -> Event | None:
    """Report evaluation sets and global batches without a target that counts in the loss. See Alert."""
    empty_sets = [
        name.removesuffix("/targets")
        for name, value in details.row.items()
        if name.endswith("/targets") and not value
    ]
    if empty_sets:
        message = f"no target counts in any held-out sample of {', '.join(empty_sets)}"
        return Event(NO_TARGETS, message, NO_TARGETS_ADVICE)
    steps = len(details.target_counts)
    empty_steps = [at for at, count in enumerate(details.target_counts, step - steps + 1) if not count]
    if not empty_steps:
        return None
    first = empty_steps[0]
    message = (
        f"no target counts in the global batch of {len(empty_steps)} of {steps} steps, the first at step "
        f"{first}"
    )
    return Event(
        NO_TARGETS, message, NO_TARGETS_ADVICE, fields={"at_step": float(first), "steps": float(steps)}
    )


class NonFiniteEval:
    """Reports evaluation metrics that become infinite or NaN; again only after they were finite.

    Ignores metrics of a set without a target, which `report_no_targets` reports.
    """

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        if "eval/loss" not in details.row:
            return None
        before = self._reported
        self._reported = {
            name
            for name, value in details.row.items()
            if not math.isfinite(value) and details.row.get(f"{name.rpartition('/')[0]}/targets") != 0
        }
        has_new = bool(self._reported - before)
        if not has_new:
            return None
        return Event(
            "non_finite_eval",
            f"the evaluation after step {step} gave {', '.join(sorted(self._reported))}: infinite or NaN",
            "look at the held-out data; in a model with batch normalisation one NaN batch spoils the running "
            "statistics permanently, which watch.on_nonfinite: skip prevents",
        )


WORSE_EVALUATIONS = 3  # consecutive evaluations, each worse than the previous and the best one
# Minimum rise above the best evaluation, as a share of the best or the first one, whichever is larger. The
# recipe digits_cnn.yaml at 350 epochs reaches 0.03.
MIN_EVAL_RISE = 0.05


@dataclass
class _EvalHistory:
    """Summary of the evaluations so far, and the training losses since the last one.

    The names of the fields are keys of the checkpoint.
    """

    loss_sum: float = 0.0
    """Sum of the finite training losses since the last evaluation."""
    steps: int = 0
    """Number of steps in `loss_sum`."""
    first: float = 0.0
    """First `eval/loss` of the run."""
    before: float = 0.0
    """Previous `eval/loss`."""
    best: float | None = None
    """Lowest `eval/loss`; `None` before the first evaluation."""
    best_step: int = 0
    """Step of the evaluation with the lowest `eval/loss`."""
    train_at_best: float | None = None
    """Mean training loss before the best evaluation; `None` if no step preceded it."""
    rises: int = 0
    """Number of consecutive evaluations that are worse than the one before."""
    is_told: bool = False
    """Whether the alert was raised since the best evaluation."""


class EvalDivergence:
    """Reports that eval/loss rises while train/loss falls, once until the next best evaluation.

    Checkpoints include the history, since evaluations may be hours apart.
    """

    name = "eval_divergence"

    def __init__(self) -> None:
        self._history = _EvalHistory()

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        history = self._history
        losses = list(filter(math.isfinite, details.losses))
        history.loss_sum += sum(losses)
        history.steps += len(losses)
        loss = details.row.get("eval/loss")
        if loss is None or not math.isfinite(loss):
            return None
        train_loss = history.loss_sum / history.steps if history.steps else None
        history.loss_sum = 0.0
        history.steps = 0
        if history.best is None or loss < history.best:
            first = history.first if history.best is not None else loss
            self._history = _EvalHistory(
                first=first, before=loss, best=loss, best_step=step, train_at_best=train_loss
            )
            return None
        history.rises = history.rises + 1 if loss > history.before else 0
        history.before = loss
        is_much_worse = loss - history.best > MIN_EVAL_RISE * max(history.best, history.first)
        has_risen = history.rises >= WORSE_EVALUATIONS and is_much_worse
        if history.is_told or not has_risen or train_loss is None:
            return None
        if history.train_at_best is not None and train_loss >= history.train_at_best:
            return None
        history.is_told = True
        return self._build_event(loss, train_loss, history.best)

    def _build_event(self, loss: float, train_loss: float, best: float) -> Event:
        best_step = self._history.best_step
        return Event(
            self.name,
            f"eval/loss rose in {self._history.rises} evaluations in a row, to {loss:.4g} from {best:.4g} at "
            f"step {best_step}, while train/loss fell to {train_loss:.4g}",
            "the model overfits its training data: end the run and keep the best checkpoint "
            "(checkpoint.keep_best), train on more data or for fewer epochs, or raise optimizer.weight_decay "
            "or dropout",
            fields={
                "eval_loss": loss,
                "best_eval_loss": best,
                "best_step": best_step,
                "train_loss": train_loss,
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """See StatefulAlert."""
        return asdict(self._history)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See StatefulAlert."""
        self._history = _EvalHistory(**state)


RISE_EVERY = 64  # number of steps between two checks of the loss
RISE_WINDOW = 32  # number of newest steps that define the level of the loss and its scatter
EARLY_STEPS = 40  # the alert looks for a jump in the steps from 2 to this one
# The height of a jump is the geometric mean of the JUMP_LOWEST lowest of JUMP_STEPS consecutive losses: one
# bad batch is not a jump.
JUMP_STEPS = 8
JUMP_LOWEST = 6
RISE_FACTOR = 1.2  # factor above the beginning from which the loss counts as worse
# A jump by SMALL_JUMP_FACTOR is enough if the loss at step RISE_EVERY is still above UNCHANGED_SHARE of its
# beginning.
SMALL_JUMP_FACTOR = 1.05
UNCHANGED_SHARE = 0.9
# Standard deviations of the logarithm above the beginning that chance does not explain. They are fewer if an
# evaluation before the first step confirms the beginning: the first batch alone may be 3 deviations too low.
# None of 3,000 synthetic noisy curves that do not fall raises the alert
# (tests/monitoring/alerts/test_alerts.py).
CONFIRMED_DEVIATIONS = 1.5
UNCONFIRMED_DEVIATIONS = 5.0


class LossRise:
    """Reports once that the loss is well above its beginning, or jumped early and has hardly fallen since.

    SpikeDetector cannot see this: it detects nothing before step 20, and later the risen loss is the normal
    level. The beginning is the first loss or the evaluation before the first step, whichever is higher. The
    alert ignores a rise that the scatter of the loss explains. Checks depend on step numbers, not on rows.
    Checkpoints include the beginning; a run that resumes without it reports nothing.
    """

    name = "loss_rise"

    def __init__(self) -> None:
        self._first = 0.0  # loss of step 1; 0 if unknown
        self._evaluated = 0.0  # `eval/loss` before the first step; 0 if there was no evaluation
        self._early: list[float] = []  # losses of the steps from 2 to EARLY_STEPS
        self._recent: deque[float] = deque(maxlen=RISE_WINDOW)  # newest losses
        self._is_reported = False

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        if step == 0:
            self._evaluated = details.row.get("eval/loss", 0.0)
        event = None
        for loss_step, loss in enumerate(details.losses, step - details.steps + 1):
            if loss_step == 1:
                self._first = loss
            has_ratio = self._first > 0 and loss > 0 and not math.isinf(loss)
            if self._is_reported or not has_ratio:
                continue
            self._recent.append(loss)
            if 1 < loss_step <= EARLY_STEPS:
                self._early.append(loss)
            if loss_step % RISE_EVERY == 0 and len(self._recent) == RISE_WINDOW:
                event = self._check(loss_step) or event
        return event

    def _check(self, step: int) -> Event | None:
        """Compare the recent losses, and at step RISE_EVERY the early ones, with the beginning."""
        level = median(self._recent)
        deviation = estimate_scatter(np.log(self._recent))
        is_confirmed = self._evaluated * math.exp(deviation) >= self._first
        deviations = CONFIRMED_DEVIATIONS if is_confirmed else UNCONFIRMED_DEVIATIONS
        initial_loss = max(self._first, self._evaluated)
        chance_factor = math.exp(deviation * deviations)
        highest_jump = _find_jump(self._early) if step == RISE_EVERY else 0.0
        jump_factor = SMALL_JUMP_FACTOR if level > UNCHANGED_SHARE * initial_loss else RISE_FACTOR
        has_jumped = highest_jump > max(jump_factor, chance_factor) * initial_loss
        has_risen = level > max(RISE_FACTOR, chance_factor) * initial_loss
        if not has_jumped and not has_risen:
            return None
        self._is_reported = True
        jump = f", after {highest_jump:.4g} for {JUMP_STEPS} steps" if has_jumped else ""
        return Event(
            self.name,
            f"the loss rose: it began with {initial_loss:.4g}, and the median of the last {RISE_WINDOW} "
            f"losses is {level:.4g} at step {step}{jump}",
            "lower optimizer.learning_rate, raise schedule.warmup, or lower optimizer.max_grad_norm",
            fields={"at_step": step, "value": level, "began": initial_loss},
        )

    def state_dict(self) -> dict[str, Any]:
        """See StatefulAlert."""
        return {
            "first": self._first,
            "evaluated": self._evaluated,
            "early": self._early,
            "recent": list(self._recent),
            "is_told": self._is_reported,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See StatefulAlert."""
        self._first = float(state["first"])
        self._evaluated = float(state["evaluated"])
        self._early = list(state["early"])
        self._is_reported = bool(state["is_told"])
        self._recent = deque(state["recent"], maxlen=RISE_WINDOW)


def _find_jump(losses: Sequence[float]) -> float:
    """Return the height of the highest jump (see JUMP_STEPS); 0 for fewer than JUMP_STEPS losses."""
    logs = [math.log(loss) for loss in losses]
    windows = (sorted(logs[start : start + JUMP_STEPS]) for start in range(len(logs) - JUMP_STEPS + 1))
    return max((math.exp(fmean(window[:JUMP_LOWEST])) for window in windows), default=0.0)


FROZEN_STEPS = 20  # steps with an update before parameters are checked
# Maximum number of values of a shard that a checksum reads. They are spread over the tensor, since only a few
# rows of an embedding change.
FROZEN_SAMPLE = 2**18
Shards = Callable[[], Iterator[Shard]]
"""Function that yields the engine's shards of this rank. Collective."""
Gather = Callable[[Any], list[Any]]
"""Collective that returns every rank's value on every rank."""


class FrozenParameters:
    """Reports trained parameters that did not change in FROZEN_STEPS steps, or changed by weight decay alone.

    A parameter that only decays had no gradient, so its optimizer state is still 0. Every process checks
    once: after a resume another split, optimizer or code may freeze other parameters. Each rank compares
    checksums of its own shards. One collective, at one row, combines the results of all ranks.
    """

    def __init__(self, shards: Shards, gather: Gather) -> None:
        """Compute the initial checksums. Collective.

        Args:
            shards: Function that yields the shards of the engine. Collective.
            gather: Function that gathers an object from all ranks. Collective.
        """
        self._shards = shards
        self._gather = gather
        weights = (shard for shard in _select_trained(shards()) if shard.kind == WEIGHT)
        self._checksums: dict[_ShardKey, Tensor] | None = {
            _build_shard_key(shard): _compute_checksum(shard) for shard in weights
        }
        """Initial checksums of this rank's shards; `None` after the check."""
        self._steps = 0
        """Number of steps with an update so far."""

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert. Collective at one of the rows."""
        if self._checksums is None:
            return None
        self._steps += details.steps - sum(details.skipped)
        if self._steps < FROZEN_STEPS:
            return None
        flags = self._compare(self._checksums)
        self._checksums = None
        changed_by_rank, had_gradient_by_rank = zip(*self._gather(flags), strict=True)
        return self._build_event(_find_unset_names(changed_by_rank), _find_unset_names(had_gradient_by_rank))

    def _compare(self, checksums: dict[_ShardKey, Tensor]) -> tuple[dict[str, bool], dict[str, bool]]:
        """Compare this rank's shards with the initial checksums. Waits for the device.

        Returns:
            Name -> whether the parameter changed, and name -> whether it had a gradient other than 0.
        """
        changed: dict[str, list[Tensor]] = {}
        had_gradient: dict[str, list[Tensor]] = {}
        for shard in _select_trained(self._shards()):
            if shard.kind == WEIGHT:
                initial = checksums.get(_build_shard_key(shard))
                if initial is not None:
                    changed.setdefault(shard.name, []).append(_compute_checksum(shard) != initial)
            elif shard.values is not None:
                had_gradient.setdefault(shard.name, []).append(shard.values.any())
        return _read_flags(changed), _read_flags(had_gradient)

    def _build_event(self, unchanged: list[str], without_gradient: list[str]) -> Event | None:
        only_decayed = [name for name in without_gradient if name not in unchanged]
        if not unchanged and not only_decayed:
            return None
        reasons = []
        if unchanged:
            reasons.append(f"{format_names(unchanged)} did not change in {self._steps} steps")
        if only_decayed:
            reasons.append(f"{format_names(only_decayed)} had only zero gradients in {self._steps} steps")
        return Event(
            "frozen_parameter",
            f"trained parameters are not learning: {'; '.join(reasons)}",
            "look for what cuts them off (.detach(), a mask, an activation that is always 0, a branch that "
            "is never taken) and for a learning rate too small for the precision of the weights; to freeze "
            "them on purpose, list them in model.freeze",
            fields={
                "parameters": len(unchanged) + len(only_decayed),
                "first": (unchanged + only_decayed)[0],
            },
        )


def _select_trained(shards: Iterator[Shard]) -> Iterator[Shard]:
    return (
        shard for shard in shards if shard.kind != BUFFER and not shard.is_frozen and shard.region.length > 0
    )


_ShardKey = tuple[str, int, int]


def _build_shard_key(shard: Shard) -> _ShardKey:
    """Return the parameter's name, a hash of the shard's box, and the start of its region."""
    box_hash = 0 if shard.region.box is None else hash(shard.region.box)
    return shard.name, box_hash, shard.region.start


def _compute_checksum(shard: Shard) -> Tensor:
    """Return a 0-dim checksum of the bits of some values, on their device, without waiting for it."""
    assert shard.values is not None
    # Odd, because the width of most rows has a factor of 2: an even stride would read the same columns only.
    stride = -(-shard.region.length // FROZEN_SAMPLE) | 1
    bits = shard.values[::stride].contiguous().view(torch.uint8).to(torch.int64)
    return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()


def _read_flags(flags_by_name: dict[str, list[Tensor]]) -> dict[str, bool]:
    """Return for each name whether any of its flags is set. Waits for the device."""
    if not flags_by_name:
        return {}
    is_set = torch.stack([torch.stack(flags).any().cpu() for flags in flags_by_name.values()])
    return dict(zip(flags_by_name, is_set.tolist(), strict=True))


def _find_unset_names(flags_by_rank: Sequence[dict[str, bool]]) -> list[str]:
    """Return the names whose flag is set on no rank."""
    names = dict.fromkeys(name for flags in flags_by_rank for name in flags)
    return [name for name in names if not any(flags.get(name, False) for flags in flags_by_rank)]


class _RowWindow:
    """Collects consecutive rows until they cover a minimum number of steps and seconds.

    The first row of a process is left out, since it includes compilation and the start of workers.
    """

    def __init__(self, min_steps: int, min_seconds: float = 0.0):
        self._min_steps = min_steps
        self._min_seconds = min_seconds
        self._has_first_row = False
        self._rows: list[RowDetails] = []

    def add(self, row: RowDetails) -> list[RowDetails]:
        """Add a row, whose `per_rank` must have `step`.

        Returns:
            The rows of the window if it is full now, else an empty list. The next row starts a new window.
        """
        if not self._has_first_row:
            self._has_first_row = True
            return []
        self._rows.append(row)
        if _sum_steps(self._rows) < self._min_steps or _sum_seconds(self._rows) < self._min_seconds:
            return []
        rows = self._rows
        self._rows = []
        return rows


def _sum_steps(rows: Sequence[RowDetails]) -> int:
    return sum(row.steps for row in rows)


def _sum_seconds(rows: Sequence[RowDetails]) -> float:
    """Return the total seconds of all steps, each row timed by its slowest rank."""
    return sum(row.steps * max(row.per_rank["step"]) for row in rows)


# A wait for data is reported if it exceeds this share of the step and these seconds per step in
# STARVED_WINDOWS consecutive windows. A worker process takes about 1 ms itself to hand over a batch. Shipped
# recipes on two busy cores had single windows with a share of 0.16; the lowest of three consecutive ones was
# at most 0.05.
STARVATION_SHARE = 0.1
STARVATION_SECONDS = 1e-3
STARVATION_STEPS = 10  # minimum steps of a window
STARVED_WINDOWS = 3


class DataStarvation:
    """Reports once per process that steps wait for data.

    A resumed run starts afresh: its disks, caches and workers may differ.
    """

    def __init__(self, num_workers: int):
        """Create the alert, given the number of processes that read data for one rank."""
        self._num_workers = num_workers
        self._window = _RowWindow(STARVATION_STEPS)
        self._is_reported = False
        self._starved_windows = 0

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert. Checks the wait of the median rank."""
        if self._is_reported or "data" not in details.per_rank:
            return None
        rows = self._window.add(details)
        if not rows:
            return None
        steps = _sum_steps(rows)
        wait = sum(row.steps * median_low(row.per_rank["data"]) for row in rows) / steps
        step_seconds = _sum_seconds(rows) / steps
        share = wait / step_seconds
        is_long = share > STARVATION_SHARE and wait >= STARVATION_SECONDS
        is_starved = is_long and not details.is_cpu_contended
        self._starved_windows = self._starved_windows + 1 if is_starved else 0
        if self._starved_windows < STARVED_WINDOWS:
            return None
        self._is_reported = True
        return Event(
            "data_starvation",
            f"waiting for data is {share:.0%} of the step "
            f"({1000 * wait:.0f} of {1000 * step_seconds:.0f} ms)",
            f"read it with more processes: loader.num_workers={max(2, 2 * self._num_workers)}",
            fields={"share": share, "seconds": wait},
        )


# Minimum steps and seconds of a window, and the number of consecutive windows that must be slower than the
# fastest one by SLOWDOWN_FACTOR. Other processes on a machine may disturb it for a minute.
WINDOW_STEPS = 20
WINDOW_SECONDS = 30.0
SLOW_WINDOWS = 4
SLOWDOWN_FACTOR = 1.5


@dataclass(frozen=True)
class _StepTimes:
    """Medians over the rows of a window, in seconds per step. Each row counts with its slowest rank."""

    step: float
    data: float
    """Seconds in which a step waits for data."""


class ThroughputDrop:
    """Reports that steps take much longer than before, for minutes. Reports again only after a recovery.

    A resumed run starts afresh: its machines, disks and ranks may differ.
    """

    def __init__(self) -> None:
        self._window = _RowWindow(WINDOW_STEPS, WINDOW_SECONDS)
        self._fastest: _StepTimes | None = None  # `None` before the first window
        self._slow_windows = 0
        self._is_reported = False

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert. Checks the median over the rows of a window."""
        if "step" not in details.per_rank:
            return None
        rows = self._window.add(details)
        if not rows:
            return None
        now = _StepTimes(
            step=median(max(row.per_rank["step"]) for row in rows),
            data=median(max(row.per_rank["data"]) for row in rows),
        )
        if self._fastest is None or now.step < self._fastest.step:
            self._fastest = now
        is_slow = now.step > SLOWDOWN_FACTOR * self._fastest.step and not details.is_cpu_contended
        self._slow_windows = self._slow_windows + 1 if is_slow else 0
        self._is_reported &= is_slow
        if self._is_reported or self._slow_windows < SLOW_WINDOWS:
            return None
        self._is_reported = True
        return self._build_event(now, self._fastest)

    def _build_event(self, now: _StepTimes, before: _StepTimes) -> Event:
        message = (
            f"steps take {now.step / before.step:.1f} times as long as they did ({1000 * now.step:.0f} ms, "
            f"before {1000 * before.step:.0f} ms)"
        )
        if now.data - before.data > (now.step - before.step) / 2:
            message += ", and most of the increase is waiting for data"
            advice = "check the disk that data is read from, and raise loader.num_workers"
        else:
            advice = (
                "check for other processes on these machines, for clocks and temperature (nvidia-smi), for a "
                "slow rank (perf/slowest_rank) and for a shortage of memory (memory/alloc_retries)"
            )
        fields = {"seconds": now.step, "seconds_before": before.step}
        return Event("throughput_drop", message, advice, fields=fields)


MIN_COMPARED_STEPS = 8  # minimum steps over which ranks are compared
# Consecutive steps in which the same rank must be slow, so that a short disturbance does not count.
SUSPECTED_STEPS = 16
# Minimum seconds of these steps, times the square of the load if it is above 1. Steps of a small model take
# milliseconds, and another process that occupies a core for a moment slows dozens of them. In 10,000 steps of
# digits_cnn.yaml with 2.5 processes per core a rank was slow for up to 0.8 s; at ZeRO 3 with 5 or more
# processes per core for up to 6 s.
SUSPECTED_SECONDS = 0.3
MIN_LOST_SHARE = 0.05  # minimum share of the step for which the other ranks wait
CONTENDED_SHARE = 0.25  # lower limit of SlowRank's `share` while the load exceeds CONTENDED_LOAD
COMPARED_PHASES = {
    "data": "reading data",
    "forward": "its forward",
    "backward": "its backward",
}
"""Phase in which ranks are compared -> its words in the alert."""
_COMPUTING_ADVICE = (
    "look for other processes on its device and cores, for its clocks and temperature (nvidia-smi), and at "
    "the lengths of its samples"
)
PHASE_ADVICE = {
    "data": "look at the disk and the processes of this machine, or raise loader.num_workers",
    "forward": _COMPUTING_ADVICE,
    "backward": _COMPUTING_ADVICE,
}
PhaseSeconds = Mapping[str, Sequence[float]]
"""Phase -> seconds per step of every rank."""


@dataclass(frozen=True)
class _SlowestRank:
    """The slowest rank of a group, and the phase in which it loses most. All times are seconds per step."""

    rank: int
    phase: str
    seconds: float
    """Seconds of the phase on this rank."""
    median_seconds: float
    """Median of the seconds of the phase over the group."""
    lost: float
    """Seconds by which all phases of this rank exceed `median_total`."""
    median_total: float
    """Seconds of all phases on the median rank of the group."""
    median_rank: str
    """Words for the median rank in the message."""


@dataclass(frozen=True)
class _Comparison:
    """Phases in which ranks with equal work are compared."""

    seconds: PhaseSeconds
    """The phases, with the seconds of all ranks."""
    ranks: Sequence[int]
    """Ranks that have the same work in these phases."""
    median_rank: str
    """Words for the median rank in the message."""


class SlowRank:
    """Reports a rank that is slower than others with the same work, once for each rank and phase.

    Steps take equally long on all ranks. So the alert compares only phases in which a rank waits for no other
    rank: those of `RowDetails.per_rank`. With tensor or sequence parallelism, or with synchronised batch
    normalisation, ranks wait for each other in each layer. There only the time for data is compared. A
    resumed run starts afresh: its ranks may be on other machines.
    """

    def __init__(self, everyone: Sequence[RankProcess], share: float, stages: int = 1):
        """Create the alert.

        Args:
            everyone: Processes of all ranks, in order of rank, to name them in messages; empty without a
                process group.
            share: Minimum share by which the compared phases of a slow rank take longer than those of the
                median rank: 0.15 is 15 %.
            stages: Number of pipeline stages. Ranks of one stage are consecutive and have the same work.
        """
        self._everyone = everyone
        self._share = share
        self._stages = stages
        self._window = _RowWindow(MIN_COMPARED_STEPS)
        self._reported: set[tuple[int, str]] = set()
        """Rank and phase of each earlier event."""
        self._suspect: tuple[int, str] | None = None
        """Rank and phase that were slow in the newest window; `None` if no rank was."""
        self._suspected_steps = 0
        self._suspected_seconds = 0.0

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        if "data" not in details.per_rank:
            return None
        rows = self._window.add(details)
        if not rows:
            return None
        steps = _sum_steps(rows)
        step_seconds = _sum_seconds(rows) / steps
        load = max(row.load for row in rows)
        slow = self._find_slow_rank(_average_phases(rows), step_seconds, load)
        suspect = (slow.rank, slow.phase) if slow is not None else None
        if suspect != self._suspect:
            self._suspected_steps = 0
            self._suspected_seconds = 0.0
        self._suspect = suspect
        self._suspected_steps += steps
        self._suspected_seconds += steps * step_seconds
        min_seconds = SUSPECTED_SECONDS * max(1.0, load) ** 2
        has_lasted = self._suspected_steps >= SUSPECTED_STEPS and self._suspected_seconds >= min_seconds
        if slow is None or suspect is None:
            return None
        if suspect in self._reported or not has_lasted:
            return None
        self._reported.add(suspect)
        return self._build_event(slow, step_seconds)

    def _find_slow_rank(
        self, phase_seconds: PhaseSeconds, step_seconds: float, load: float
    ) -> _SlowestRank | None:
        """Return the rank for which the others wait longest; `None` if no wait is long enough.

        Args:
            phase_seconds: Seconds per step of a window.
            step_seconds: Seconds of a whole step.
            load: Highest load of all ranks; see RowDetails.
        """
        min_share = max(self._share, CONTENDED_SHARE) if load > CONTENDED_LOAD else self._share
        slowest = [_find_slowest(comparison) for comparison in self._list_comparisons(phase_seconds)]
        slow = [
            rank
            for rank in slowest
            if rank.lost > max(min_share * rank.median_total, MIN_LOST_SHARE * step_seconds)
        ]
        return max(slow, key=lambda rank: rank.lost, default=None)

    def _build_event(self, slow: _SlowestRank, step_seconds: float) -> Event:
        return Event(
            "slow_rank",
            f"{self._everyone[slow.rank]} is slow: {COMPARED_PHASES[slow.phase]} takes "
            f"{1000 * slow.seconds:.0f} ms a step ({slow.median_rank}: {1000 * slow.median_seconds:.0f} ms); "
            f"the others wait for it {1000 * slow.lost:.0f} of every "
            f"{1000 * step_seconds:.0f} ms",
            PHASE_ADVICE[slow.phase],
            fields={
                "rank": slow.rank,
                "phase": slow.phase,
                "seconds": slow.seconds,
                "median_seconds": slow.median_seconds,
            },
        )

    def _list_comparisons(self, phase_seconds: PhaseSeconds) -> Iterator[_Comparison]:
        """Yield the comparisons.

        With one stage: all phases over all ranks. With several: data over all ranks, and the other phases
        within each stage.
        """
        all_ranks = range(len(phase_seconds["data"]))
        if self._stages == 1:
            yield _Comparison(phase_seconds, all_ranks, "the median rank")
            return
        yield _Comparison({"data": phase_seconds["data"]}, all_ranks, "the median rank")
        computing = {phase: seconds for phase, seconds in phase_seconds.items() if phase != "data"}
        ranks_per_stage = len(all_ranks) // self._stages
        if computing and ranks_per_stage > 1:
            for first in all_ranks[::ranks_per_stage]:
                stage = all_ranks[first : first + ranks_per_stage]
                yield _Comparison(computing, stage, "the median rank of its stage")


def _average_phases(rows: Sequence[RowDetails]) -> dict[str, list[float]]:
    """Return the mean seconds per step of each of COMPARED_PHASES that the rows have, for every rank."""
    steps = _sum_steps(rows)
    return {
        phase: [
            sum(row.steps * row.per_rank[phase][rank] for row in rows) / steps
            for rank in range(len(rows[0].per_rank[phase]))
        ]
        for phase in COMPARED_PHASES
        if phase in rows[-1].per_rank
    }


def _find_slowest(comparison: _Comparison) -> _SlowestRank:
    """Return the rank with the most seconds in all phases, and its phase that exceeds the median most."""
    seconds = comparison.seconds
    ranks = comparison.ranks
    totals = {rank: sum(by_rank[rank] for by_rank in seconds.values()) for rank in ranks}
    median_total = median_low(totals.values())
    slowest = max(ranks, key=lambda rank: totals[rank])
    medians = {phase: median_low(by_rank[rank] for rank in ranks) for phase, by_rank in seconds.items()}
    phase = max(seconds, key=lambda phase: seconds[phase][slowest] - medians[phase])
    return _SlowestRank(
        rank=slowest,
        phase=phase,
        seconds=seconds[phase][slowest],
        median_seconds=medians[phase],
        lost=totals[slowest] - median_total,
        median_total=median_total,
        median_rank=comparison.median_rank,
    )


# Initial number of rows of a window. Windows double in length as the run continues, to find slow leaks, too.
MEMORY_ROWS = 16
MEMORY_WINDOWS = 8  # consecutive windows, each with more memory than the previous one
MAX_MEMORY_WINDOWS = 20  # when this number of windows is reached, pairs of windows are merged
MIN_GROWTH_SHARE = 0.1  # minimum growth as a share of the memory in the first of the windows
MIN_GROWTH_GIB = 0.25
# Minimum growth of each window as a share of the mean growth: memory that levels off grows less at the end.
STEADY_GROWTH = 0.75
MEMORY_KINDS = {
    "device": (
        "the device's memory",
        "look for tensors that keep their graph alive (a loss summed up without .detach() or .item(), hooks, "
        "lists), and for samples that grow longer",
    ),
    "host": (
        "the process's memory",
        "look for lists and caches that grow in the data set, in hooks and in a custom objective; move "
        "what must stay to files or arrays",
    ),
}
"""Key of RowDetails.per_rank -> its words in the alert, and advice."""


class MemoryGrowth:
    """Reports steady growth of the memory of a rank, once for each kind of memory.

    A resumed run starts afresh, as its processes do.
    """

    def __init__(self, min_gib: float = MIN_GROWTH_GIB) -> None:
        """Create the alert, given the minimum growth to report in GiB."""
        self._min_gib = min_gib
        self._windows: dict[tuple[str, int], _MemoryWindows] = {}
        """Kind of memory and rank -> its windows."""
        self._reported: set[str] = set()
        """Kinds of memory of the earlier events."""

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert. Reports at most one rank at each row."""
        event: Event | None = None
        kinds = [kind for kind in MEMORY_KINDS if kind in details.per_rank and kind not in self._reported]
        for kind in kinds:
            for rank, gib in enumerate(details.per_rank[kind]):
                windows = self._windows.setdefault((kind, rank), _MemoryWindows())
                is_full = windows.add(gib, step)
                if not is_full or event is not None:
                    continue
                growth = windows.find_growth(self._min_gib)
                if growth is not None:
                    self._reported.add(kind)
                    event = self._build_event(kind, rank, growth)
        return event

    def _build_event(self, kind: str, rank: int, growth: _Growth) -> Event:
        memory, advice = MEMORY_KINDS[kind]
        return Event(
            "memory_growth",
            f"{memory} of rank {rank} grows: {growth.gib_before:.2f} GiB at step {growth.since_step}, "
            f"{growth.gib_now:.2f} GiB now",
            advice,
            fields={"rank": rank, "kind": kind, "gib_before": growth.gib_before, "gib": growth.gib_now},
        )


@dataclass(frozen=True)
class _Growth:
    """Steady growth of memory over MEMORY_WINDOWS windows."""

    gib_before: float
    """Median GiB of the first of the windows."""
    gib_now: float
    """Median GiB of the last window."""
    since_step: int
    """Last step of the first of the windows."""


class _MemoryWindows:
    """Medians of windows of equal length, for one kind of memory of one rank."""

    def __init__(self) -> None:
        self._rows_per_window = MEMORY_ROWS
        self._current: list[float] = []
        """GiB of each row of the window that is not full."""
        self._medians: list[float] = []
        """Median GiB of each full window."""
        self._ends: list[int] = []
        """Last step of each full window."""

    def add(self, gib: float, step: int) -> bool:
        """Add a row's memory, and return whether a window is full now."""
        self._current.append(gib)
        if len(self._current) < self._rows_per_window:
            return False
        if len(self._medians) == MAX_MEMORY_WINDOWS:
            pairs = zip(self._medians[::2], self._medians[1::2], strict=True)
            self._medians = [(first + second) / 2 for first, second in pairs]
            self._ends = self._ends[1::2]
            self._rows_per_window *= 2
            return False  # the current window is half full now
        self._medians.append(median(self._current))
        self._ends.append(step)
        self._current = []
        return True

    def find_growth(self, min_gib: float) -> _Growth | None:
        """Return the growth over the last MEMORY_WINDOWS windows; `None` if it is not large and steady.

        The first window of the process is ignored, since memory grows while the run starts.
        """
        medians = self._medians[1:][-MEMORY_WINDOWS:]
        ends = self._ends[1:][-MEMORY_WINDOWS:]
        if len(medians) < MEMORY_WINDOWS:
            return None
        rises = [later - earlier for earlier, later in pairwise(medians)]
        growth = medians[-1] - medians[0]
        is_large = growth > max(min_gib, MIN_GROWTH_SHARE * medians[0])
        is_steady = min(rises) > STEADY_GROWTH * growth / len(rises)
        if not is_large or not is_steady:
            return None
        return _Growth(medians[0], medians[-1], ends[0])


@dataclass(frozen=True)
class WatchedRun:
    """Components of a run from which alerts are built."""

    config: RunConfig
    resolved: ResolvedSettings
    engine: Engine
    job: Job
    detectors: tuple[SpikeDetector, SpikeDetector]
    """Detectors of the losses and of the gradient norms, in this order."""

    @property
    def wants_alerts(self) -> bool:
        """Return whether the recipe asks for alerts."""
        return self.config.watch.alerts

    @property
    def reports_nonfinite(self) -> bool:
        """Return whether steps that are not finite are reported."""
        return self.wants_alerts or self.config.watch.on_nonfinite != "log"

    @property
    def reports_spikes(self) -> bool:
        """Return whether spikes are reported.

        If `watch.on_spike` is `skip`, the safeguard skips such steps, so rows contain no spikes.
        """
        on_spike = self.config.watch.on_spike
        return on_spike != "skip" and (self.wants_alerts or on_spike != "log")

    @property
    def reports_frozen(self) -> bool:
        """Return whether frozen parameters are reported.

        False with offload to NVMe, since reading all parameters from there takes minutes.
        """
        keys = (f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param"))
        devices = [get_dotted(self.resolved.deepspeed or {}, key) for key in keys]
        return self.wants_alerts and "nvme" not in devices


@dataclass(frozen=True)
class AlertKind:
    """Entry of ALERTS: the factory of an alert, and the texts about it in the documentation."""

    build: Callable[[WatchedRun], Alert]
    """Function that creates the alert."""
    condition: str
    """Condition under which the alert reports an event."""
    first: str
    """First step, row or evaluation whose check can report an event."""
    is_enabled: Callable[[WatchedRun], bool] = attrgetter("wants_alerts")
    """Function that returns whether the run has the alert."""


def _describe_spike(series: str, threshold: SpikeThreshold) -> str:
    """Return the condition of a SpikeAlert.

    Args:
        series: Words for its series.
        threshold: Threshold of its detector.
    """
    at_first = ""
    if threshold.deviations_at_first != threshold.deviations:
        at_first = f"; {threshold.deviations_at_first:g} if it is as high as the run's first value"
    return (
        f"The {series} is more than {threshold.ratio:g} times the local level (the median of the last "
        f"{LEVEL_WINDOW} steps), and its logarithm more than {threshold.deviations:g} standard deviations "
        f"above it{at_first}. Again after {CALM_STEPS} steps without a spike."
    )


FIRST_SPIKE = f"{MIN_VALUES + 1}; after {NEW_LEVEL_SPIKES} spikes in a row, {MIN_VALUES + 1} steps later"
ALERTS = {
    "non_finite": AlertKind(
        lambda run: NonFiniteAlert(get_min_loss_scale(run.resolved.deepspeed)),
        "A step was skipped because its gradient was infinite or NaN; or its loss is, but not its gradient. "
        "In fp16 a skipped step with a finite loss is `info`, because it lowers the loss scale; at the "
        "lowest loss scale the event is `loss_scale_floor`.",
        "1",
        attrgetter("reports_nonfinite"),
    ),
    LOSS_SPIKE: AlertKind(
        lambda run: SpikeAlert(LOSS_SPIKE, run.detectors[0]),
        _describe_spike("loss", LOSS_THRESHOLD),
        FIRST_SPIKE,
        attrgetter("reports_spikes"),
    ),
    GRAD_NORM_SPIKE: AlertKind(
        lambda run: SpikeAlert(GRAD_NORM_SPIKE, run.detectors[1]),
        _describe_spike("gradient norm before clipping", GRAD_NORM_THRESHOLD),
        FIRST_SPIKE,
        attrgetter("reports_spikes"),
    ),
    NO_TARGETS: AlertKind(
        lambda run: report_no_targets,
        "No target counts in the loss of a step's global batch (its `train/loss` is 0) or of an evaluation "
        "set (its loss is NaN): all labels are -100 or have weight 0.",
        "1",
    ),
    "non_finite_eval": AlertKind(
        lambda run: NonFiniteEval(),
        "A metric of an evaluation is infinite or NaN. Again only after it was finite.",
        "the first evaluation",
    ),
    "loss_rise": AlertKind(
        lambda run: LossRise(),
        f"The median of the last {RISE_WINDOW} losses is more than {RISE_FACTOR:g} times the initial loss. "
        f"Or {JUMP_STEPS} consecutive losses within the first {EARLY_STEPS} steps were; then "
        f"{SMALL_JUMP_FACTOR:g} times is enough if the median at step {RISE_EVERY} is still above "
        f"{UNCHANGED_SHARE:.0%} of the initial loss. The rise must exceed the scatter of the loss. Once in a "
        "run.",
        f"{RISE_EVERY}, then every {RISE_EVERY}th",
    ),
    "eval_divergence": AlertKind(
        lambda run: EvalDivergence(),
        f"`eval/loss` rose in {WORSE_EVALUATIONS} consecutive evaluations and is {MIN_EVAL_RISE:.0%} above "
        "its best, while `train/loss` fell. Again only after a new best.",
        f"evaluation {WORSE_EVALUATIONS + 1}",
    ),
    "data_starvation": AlertKind(
        lambda run: DataStarvation(run.config.loader.num_workers),
        f"Steps wait for data for more than {STARVATION_SHARE:.0%} of their time, in {STARVED_WINDOWS} "
        f"consecutive windows of at least {STARVATION_STEPS} steps. Once in a process.",
        f"{STARVED_WINDOWS * STARVATION_STEPS} after the first row",
    ),
    "throughput_drop": AlertKind(
        lambda run: ThroughputDrop(),
        f"Steps take {SLOWDOWN_FACTOR:g} times as long as in the fastest window, in {SLOW_WINDOWS} "
        f"consecutive windows of at least {WINDOW_STEPS} steps and {WINDOW_SECONDS:g} s. Again after a "
        "recovery.",
        f"window {SLOW_WINDOWS + 1}",
    ),
    "slow_rank": AlertKind(
        lambda run: SlowRank(
            run.job.rank_processes, run.config.distributed.straggler_share, run.resolved.split.pipeline_stages
        ),
        "A rank takes longer than the median rank for data, forward and backward: by "
        f"`distributed.straggler_share`, and by {MIN_LOST_SHARE:.0%} of the step, for {SUSPECTED_STEPS} "
        f"steps and {SUSPECTED_SECONDS:g} s. Once for each rank and phase.",
        f"{SUSPECTED_STEPS} after the first row",
    ),
    "memory_growth": AlertKind(
        lambda run: MemoryGrowth(),
        f"The memory of a device or a process grows steadily in {MEMORY_WINDOWS} consecutive windows of at "
        f"least {MEMORY_ROWS} rows, by {MIN_GROWTH_SHARE:.0%} and {MIN_GROWTH_GIB * 1024:g} MiB in total. "
        "Once in a process for each kind of memory.",
        f"row {(MEMORY_WINDOWS + 1) * MEMORY_ROWS}",
    ),
    "frozen_parameter": AlertKind(
        lambda run: FrozenParameters(run.engine.shards, run.job.gather_object),
        f"After {FROZEN_STEPS} steps a trained parameter has its initial value, or had only zero gradients. "
        "Once in a process.",
        str(FROZEN_STEPS),
        attrgetter("reports_frozen"),
    ),
}
"""Name of the alert's event -> the alert, in the order in which alerts are applied. These are the built-in
alerts; a custom alert is a callback (`callbacks` of the recipe), which can return an event.

`docs/write_reference.py` writes a table of docs/reference/metrics-and-alerts.md from their texts."""


@unmap_freed_tensors()  # returns the memory of the temporary tensors of the checksums to the system
def build_alerts(
    config: RunConfig,
    resolved: ResolvedSettings,
    *,
    job: Job,
    engine: Engine,
    start_step: int,
    max_steps: int,
    detectors: tuple[SpikeDetector, SpikeDetector],
    checkpoint_state: Mapping[str, Any],
) -> tuple[Alert, ...]:
    """Build the alerts that the recipe enables, and a NonFiniteStepLimit, which every run has.

    Collective: FrozenParameters reads the engine's parameters.

    Args:
        config: The recipe.
        resolved: Recipe and DeepSpeed JSON, resolved.
        job: Process group of the run.
        engine: Engine of the run.
        start_step: Steps done before this process.
        max_steps: Last step of the run.
        detectors: Spike detectors of the losses and of the gradient norms, in this order.
        checkpoint_state: State of the checkpoint that the run resumes from; empty for a new run. Its entry
            `watchers` has the state of the alerts.
    """
    run = WatchedRun(config=config, resolved=resolved, engine=engine, job=job, detectors=detectors)
    alerts = [alert.build(run) for alert in ALERTS.values() if alert.is_enabled(run)]
    restore_alerts(alerts, checkpoint_state.get("watchers", {}))
    return (*alerts, NonFiniteStepLimit(engine.precision, start_step, max_steps))
