"""Alerts on learning, time and memory, and the table of all alerts.

Alerts report what lasts. Step times, ranks and memory are judged over several windows in a row, since other
processes on a machine take a part of it for a while. An alert that clean runs raise is soon ignored.
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

SPIKE_WINDOW = 128  # newest values that define the normal range
RECENT = 32  # newest values whose differences define the current scatter
LOCAL = 5  # newest values whose median is the local level
MIN_VALUES = 19  # values before the first check: step 20 is the first one that can be a spike
NEARLY = 0.05  # a value counts as high as the first one if its logarithm is at most this much lower
NEW_LEVEL_SPIKES = 16  # spikes in a row after which their level becomes the normal one
FLOOR = 0.25  # share of the median of the first MIN_VALUES values: lower values are never spikes
RISES = 0.98  # quantile of harmless rises above the local level: hard sources have few batches
CORE = 0.8  # share of the differences that is used; the rest may be outliers
# For a standard normal value: the mean of the CORE share of the absolute differences of neighbours, and the
# quantile RISES.
GAUSSIAN_CORE = 0.79
GAUSSIAN_RISE = 2.054
TINY = sys.float_info.min
LOG_TINY = math.log(TINY)


@dataclass(frozen=True)
class SpikeThreshold:
    """Distance above the local level that a spike must exceed, by ratio and by deviations."""

    ratio: float
    """Minimum factor above the level."""
    deviations: float
    """Minimum standard deviations of the logarithm above the level."""
    of_first: float
    """Minimum standard deviations for a value that is as high as the run's first one."""


# Measured on healthy runs on a CPU: shipped recipes, cyclic rates, tiny batches, noisy labels, preferences.
# tests/monitoring/alerts/test_spike_detector.py holds their curves.
LOSS_THRESHOLD = SpikeThreshold(1.5, 8.0, 5.5)
GRAD_NORM_THRESHOLD = SpikeThreshold(6.0, 12.0, 12.0)


class SpikeDetector:
    """Detects spikes of a noisy series, by its local level and the scatter of its logarithms.

    The level is the median of the last 5 values that were not spikes. The scatter is estimated from
    differences of neighbours, which a falling loss does not change.
    Losses and gradient norms are positive, scatter in proportion to their size, and have a long upper tail.
    A loss that fell to a hundredth of its beginning scatters harmlessly by factors of thousands, hence FLOOR.
    A series with a negative value has no ratios, so it has no spikes.
    """

    def __init__(self, threshold: SpikeThreshold) -> None:
        self._threshold = threshold
        self._values: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._logs: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._refused = 0
        self._floor = 0.0
        self._first = 0.0
        self.limit = math.inf
        """Value above which the next value is a spike; inf until MIN_VALUES values were added."""

    @property
    def normal_level(self) -> float:
        """Median of the newest normal values; NaN before the first value."""
        return _median(np.sort(list(self._values)[-LOCAL:])) if self._values else math.nan

    def add(self, value: float) -> bool:
        """Add the next value unless it is a spike or not finite.

        Returns:
            Whether it is a spike. After NEW_LEVEL_SPIKES in a row the detector restarts at their level.
        """
        if not math.isfinite(value):
            return False
        if value <= self.limit:
            self._refused = 0
            if not self._values and not self._floor:
                self._first = value
            self._accept(value)
            return False
        self._refused += 1
        if self._refused == NEW_LEVEL_SPIKES:
            self._values.clear()
            self._logs.clear()
            self._refused = 0
            self.limit = math.inf
        return True

    def _accept(self, *values: float) -> None:
        """Append normal values and compute the limit of the next value."""
        self._values += values
        self._logs += [math.log(value) if value > TINY else LOG_TINY for value in values]
        self.limit = math.inf
        if len(self._values) < MIN_VALUES or min(self._values) < 0:
            return
        if not self._floor:
            self._floor = FLOOR * _median(np.sort(self._values))
        if not self._floor:
            return
        logs = np.array(self._logs)
        level = _median(np.sort(logs[-LOCAL:]))
        deviation = estimate_scatter(logs)
        least = math.log(self._threshold.ratio)
        above = level + max(least, self._threshold.deviations * deviation)
        if self._first > 0:
            high = level + max(least, self._threshold.of_first * deviation)
            above = min(above, max(high, math.log(self._first) - NEARLY))
        self.limit = max(math.exp(min(above, 700.0)), self._floor)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state as plain numbers for a checkpoint."""
        return {
            "values": list(self._values),
            "refused": [float(self._refused)],
            "floor": [self._floor],
            "first": [self._first],
        }

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the state of a checkpoint."""
        self._values.clear()
        self._logs.clear()
        self._refused = int(state["refused"][0])
        self._floor = float(state["floor"][0])
        self._first = float(state["first"][0])
        self._accept(*state["values"])


def estimate_scatter(logs: NDArray[np.float64]) -> float:
    """Return the standard deviation of a series around its moving level.

    It is estimated twice, from the differences of neighbours and from the rises above the local level. The
    larger estimate is returned.

    Args:
        logs: Logarithms of the values in order, (values,), at least MIN_VALUES.
    """
    recent = logs[-RECENT:]
    steps = recent[1:] - recent[:-1]
    off = np.sort(np.abs(steps - _median(np.sort(steps))))
    core = off[: math.ceil(CORE * len(off))]
    levels = np.sort([logs[at : len(logs) - LOCAL + at] for at in range(LOCAL)], axis=0)[LOCAL // 2]
    rises = np.sort(logs[LOCAL:] - levels)
    rise = float(rises[min(int(RISES * len(rises)), len(rises) - 2)])  # a single outlier is ignored
    return max(float(core.sum()) / (len(core) * GAUSSIAN_CORE), rise / GAUSSIAN_RISE)


def _median(ordered: NDArray[np.float64]) -> float:
    """Return the median of sorted values; np.median takes several times as long, at every step."""
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


# Consecutive steps without a finite gradient that end a run. fp16 first searches its loss scale: from 2**32
# down this takes 32 steps.
MAX_CONSECUTIVE_SKIPS = {"fp32": 10, "bf16": 10, "fp16": 40}
LOSS_SPIKE = "loss_spike"
GRAD_NORM_SPIKE = "grad_norm_spike"
SPIKES = {
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
"""Name of an alert -> the series that it watches (norms before clipping), and its advice."""
CALM_STEPS = 32  # steps without a spike after which the next spike is reported again
NO_TARGETS_ADVICE = (
    "look at these samples: their labels are all -100 or have weight 0, which happens if a prompt fills the "
    "whole sequence; raise data.sequence_length, or remove the samples from the data"
)
WORSE_EVALUATIONS = 3  # consecutive evaluations, each worse than the previous and the best one
# Minimum rise as a share of the best and of the first evaluation; digits_cnn.yaml at 350 epochs reaches 0.03.
MIN_EVAL_RISE = 0.05
RISE_EVERY = 64  # steps between two checks of the loss
RISE_WINDOW = 32  # newest steps that define the level of the loss and its scatter
EARLY_STEPS = 40  # first steps, in which a jump is searched
# A jump is a mean over the lowest JUMP_COUNTS of JUMP_STEPS steps in a row: one bad batch is not a jump.
JUMP_STEPS = 8
JUMP_COUNTS = 6
RISE = 1.2  # factor above the beginning from which the loss counts as worse
# A jump by the factor JUMP counts if the loss at step 64 is still above the share SAME of its beginning.
JUMP = 1.05
SAME = 0.9
# Standard deviations of the logarithm above the beginning. An evaluation before the first step gives a good
# estimate of the beginning; the first batch alone may be 3 deviations too low. None of 3,000 synthetic noisy
# curves that do not fall raises the alert (tests/monitoring/alerts/test_alerts.py).
DEVIATIONS = 1.5
DEVIATIONS_OF_A_BATCH = 5.0
FROZEN_STEPS = 20  # steps with an update before parameters are checked
# Values of a shard that a checksum reads: a few of each row of an embedding, since few rows change.
FROZEN_SAMPLE = 2**18
Shards = Callable[[], Iterator[Shard]]
Gather = Callable[[Any], list[Any]]
"""Collective that returns every rank's value on every rank."""


class NonFiniteAlert:
    """Reports steps skipped since the previous row, and losses that are infinite or NaN.

    fp16 finds its loss scale by skipping steps. Skipped steps with a finite loss are information there, and
    an alert only if the scale cannot fall any further.
    """

    def __init__(self, lowest_scale: float | None) -> None:
        """Create the alert.

        Args:
            lowest_scale: Lowest fp16 loss scale of DeepSpeed, or the fixed one; `None` without fp16.
        """
        self._lowest_scale = lowest_scale

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        skipped = sum(details.skipped)
        scale = details.row.get("train/loss_scale")
        if skipped:
            bad = [bool(each) for each in details.skipped]
        else:
            bad = [not math.isfinite(loss) for loss in details.losses]
        if True not in bad:
            return None
        steps = list(range(step - len(bad) + 1, step + 1))
        named = f"step{'s' * (sum(bad) > 1)} {format_ranges(set(compress(steps, bad)), steps)}"
        first = float(steps[bad.index(True)])
        fields = {"at_step": first, "steps": float(details.steps), "skipped": float(skipped)}
        if not skipped:
            line = f"the loss of {named} is infinite or NaN, the gradient is not"
            advice = "check what the objective returns for these batches, and their loss mask"
            return Event("non_finite", line, advice, fields=fields)
        line = f"{named} skipped: the gradient was infinite or NaN"
        advice = "look at the data, lower optimizer.learning_rate, or raise schedule.warmup"
        if scale is None:
            return Event("non_finite", line, advice, fields=fields)
        fields["scale"] = scale
        if self._lowest_scale is not None and scale <= self._lowest_scale:
            line = f"{line}, and the fp16 loss scale cannot fall below {scale:g}"
            return Event("loss_scale_floor", line, f"use bf16; or {advice}", fields=fields)
        line = f"{line}; the fp16 loss scale is now {scale:g}"
        if not all(
            map(math.isfinite, compress(details.losses, bad))
        ):  # the loss is not multiplied by the scale
            line = f"{line}, and the loss itself is infinite or NaN"
            return Event("non_finite", line, advice, fields=fields)
        return Event("non_finite", line, level="info", fields=fields)


class NonFiniteStepLimit:
    """Ends a run after too many consecutive steps without a finite gradient."""

    def __init__(self, precision: str, first_step: int, max_steps: int) -> None:
        """Create the limit.

        Args:
            precision: Precision of the run.
            first_step: Steps done before this process.
            max_steps: Last step of the run.
        """
        self._precision = precision
        self._first_step = first_step
        self._max_steps = max_steps

    def __call__(self, step: int, details: RowDetails) -> StopRequested | None:
        """See Alert."""
        skips = int(details.row.get("train/skipped_in_a_row", 0))
        too_many = MAX_CONSECUTIVE_SKIPS[self._precision]
        # The last step lowers the limit, except in fp16, which searches its loss scale first.
        if step == self._max_steps and self._precision != "fp16":
            too_many = min(too_many, step - self._first_step)
        if not skips or skips < too_many:
            return None
        return StopRequested(
            NonFiniteLossError(
                f"the last {skips} steps had an infinite or NaN gradient (loss {details.row['train/loss']}) "
                "and were skipped; the parameters are those of the last good step. Look at the data, lower "
                "optimizer.learning_rate, or raise schedule.warmup"
            )
        )


class SpikeAlert:
    """Reports the first spike of an episode, which ends after CALM_STEPS steps without a spike.

    An episode continues over a resume. A spike between two rows is reported with the next row.
    """

    def __init__(self, name: str, detector: SpikeDetector) -> None:
        """Create the alert.

        Args:
            name: Key of SPIKES.
            detector: Detector of its series. The safeguard owns it and saves its state.
        """
        self.name = name
        self._detector = detector
        self._calm = CALM_STEPS

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        found = None
        values = details.losses if self.name == LOSS_SPIKE else details.grad_norms
        for at, value in enumerate(values, step - len(values) + 1):
            limit = self._detector.limit
            if math.isfinite(value) and value > limit and self._calm >= CALM_STEPS and found is None:
                found = self._event(at, value, self._detector.normal_level, limit)
            is_spike = self._detector.add(value)
            self._calm = 0 if is_spike else self._calm + 1
        return found

    def _event(self, at: int, value: float, middle: float, limit: float) -> Event:
        series, advice = SPIKES[self.name]
        return Event(
            self.name,
            f"the {series} of step {at} is {value:.4g}, {value / middle:.1f} times what was normal before "
            f"({middle:.4g}, up to {limit:.4g})",
            advice,
            fields={"at_step": at, "value": value, "normal": middle, "limit": limit},
        )

    def state_dict(self) -> dict[str, Any]:
        """See StatefulAlert. The safeguard saves the state of the detector."""
        return {"calm": self._calm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See StatefulAlert."""
        self._calm = int(state["calm"])


def report_no_targets(step: int, details: RowDetails) -> Event | None:
    """Report global batches and evaluation sets without a target that counts in the loss. An Alert."""
    empty = [name for name, value in details.row.items() if name.endswith("/targets") and not value]
    if empty:
        sets = ", ".join(name.removesuffix("/targets") for name in empty)
        return Event(NO_TARGETS, f"no target counts in any held-out sample of {sets}", NO_TARGETS_ADVICE)
    if all(details.target_counts):
        return None
    number = sum(not count for count in details.target_counts)
    steps = len(details.target_counts)
    first = step - steps + 1 + list(map(bool, details.target_counts)).index(False)
    message = f"no target counts in the global batch of {number} of {steps} steps, first of step {first}"
    return Event(
        NO_TARGETS, message, NO_TARGETS_ADVICE, fields={"at_step": float(first), "steps": float(steps)}
    )


@dataclass
class _EvalHistory:
    """Summary of the evaluations so far, and the training losses since the last one."""

    loss_sum: float = 0.0
    steps: int = 0
    first: float = 0.0
    before: float = 0.0
    best: float | None = None
    best_step: int = 0
    train_at_best: float | None = None
    rises: int = 0
    is_told: bool = False


class NonFiniteEval:
    """Reports evaluation metrics that are infinite or NaN, once until they are finite again.

    `report_no_targets` reports sets without a target.
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
        if not self._reported - before:
            return None
        return Event(
            "non_finite_eval",
            f"the evaluation after step {step} gave {', '.join(sorted(self._reported))}: infinite or NaN",
            "look at the held-out data; in a model with batch normalisation one NaN batch spoils the running "
            "statistics permanently, which watch.on_nonfinite: skip prevents",
        )


class EvalDivergence:
    """Reports that eval/loss rises while train/loss falls, and again after a new best.

    Checkpoints save the evaluations, since they may be hours apart.
    """

    name = "eval_divergence"

    def __init__(self) -> None:
        self._history = _EvalHistory()

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        so_far = self._history
        losses = list(filter(math.isfinite, details.losses))
        so_far.loss_sum += sum(losses)
        so_far.steps += len(losses)
        loss = details.row.get("eval/loss")
        if loss is None or not math.isfinite(loss):
            return None
        train = so_far.loss_sum / so_far.steps if so_far.steps else None
        so_far.loss_sum = 0.0
        so_far.steps = 0
        if so_far.best is None or loss < so_far.best:
            first = so_far.first if so_far.best is not None else loss
            self._history = _EvalHistory(
                first=first, before=loss, best=loss, best_step=step, train_at_best=train
            )
            return None
        so_far.rises = so_far.rises + 1 if loss > so_far.before else 0
        so_far.before = loss
        is_apart = loss - so_far.best > MIN_EVAL_RISE * max(so_far.best, so_far.first)
        if so_far.is_told or so_far.rises < WORSE_EVALUATIONS or not is_apart or train is None:
            return None
        if so_far.train_at_best is not None and train >= so_far.train_at_best:
            return None
        so_far.is_told = True
        return self._event(loss, train, so_far.best)

    def _event(self, loss: float, train: float, best: float) -> Event:
        at = self._history.best_step
        return Event(
            self.name,
            f"eval/loss rose in {self._history.rises} evaluations in a row, to {loss:.4g} from {best:.4g} at "
            f"step {at}, while train/loss fell to {train:.4g}",
            "the model overfits its training data: end the run and keep the best checkpoint "
            "(checkpoint.keep_best), train on more data or for fewer epochs, or raise optimizer.weight_decay "
            "or dropout",
            fields={"eval_loss": loss, "best_eval_loss": best, "best_step": at, "train_loss": train},
        )

    def state_dict(self) -> dict[str, Any]:
        """See StatefulAlert."""
        return asdict(self._history)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See StatefulAlert."""
        self._history = _EvalHistory(**state)


class LossRise:
    """Reports once that the loss is well above its beginning, or jumped early and has hardly fallen since.

    SpikeDetector cannot see this: it detects nothing before step 20, and later the risen loss is the normal
    level. The evaluation before the first step gives the beginning, and the scatter of the loss excludes
    chance. Checks depend on step numbers, not on rows. Checkpoints save the beginning; without it nothing is
    reported.
    """

    name = "loss_rise"

    def __init__(self) -> None:
        # 0: unknown.
        self._first = 0.0
        self._evaluated = 0.0
        self._early: list[float] = []
        self._recent: deque[float] = deque(maxlen=RISE_WINDOW)
        self._is_reported = False

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        if step == 0:
            self._evaluated = details.row.get("eval/loss", 0.0)
        found = None
        for at, loss in enumerate(details.losses, step - details.steps + 1):
            if at == 1:
                self._first = loss
            if self._is_reported or not self._first > 0 or not loss > 0 or math.isinf(loss):
                continue  # ratios need positive values
            self._recent.append(loss)
            if 1 < at <= EARLY_STEPS:
                self._early.append(loss)
            if at % RISE_EVERY == 0 and len(self._recent) == RISE_WINDOW:
                found = self._check(at) or found
        return found

    def _check(self, step: int) -> Event | None:
        level = median(self._recent)
        deviation = estimate_scatter(np.log(self._recent))
        is_known = self._evaluated * math.exp(deviation) >= self._first
        began = max(self._first, self._evaluated)
        beyond = math.exp(deviation * (DEVIATIONS if is_known else DEVIATIONS_OF_A_BATCH))
        jump = _find_jump(self._early) if step == RISE_EVERY else 0.0
        least = JUMP if level > SAME * began else RISE
        has_jumped = jump > max(least, beyond) * began
        if not has_jumped and level <= max(RISE, beyond) * began:
            return None
        self._is_reported = True
        jumped = f", after {jump:.4g} for {JUMP_STEPS} steps" if has_jumped else ""
        return Event(
            self.name,
            f"the loss rose: it began with {began:.4g} and is {level:.4g} at step {step}{jumped}",
            "lower optimizer.learning_rate, raise schedule.warmup, or lower optimizer.max_grad_norm",
            fields={"at_step": step, "value": level, "began": began},
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
    """Return the highest level over JUMP_STEPS steps in a row; 0 with fewer steps."""
    logs = [math.log(each) for each in losses]
    stretches = (sorted(logs[at : at + JUMP_STEPS]) for at in range(len(logs) - JUMP_STEPS + 1))
    return max((math.exp(fmean(each[:JUMP_COUNTS])) for each in stretches), default=0.0)


class FrozenParameters:
    """Reports trained parameters that did not change in FROZEN_STEPS steps, or changed by weight decay alone.

    The latter have an optimizer state that is still 0. Every process checks once: another split, optimizer or
    code may freeze other parameters. Each rank compares checksums of some bits of its own shards. One
    collective, at one row, combines the results of all ranks.
    """

    def __init__(self, shards: Shards, gather: Gather) -> None:
        """Compute the initial checksums. Collective.

        Args:
            shards: Function that yields the shards of the engine. Collective.
            gather: Function that gathers an object from all ranks. Collective.
        """
        self._shards = shards
        self._gather = gather
        weights = (each for each in _trained(shards()) if each.kind == WEIGHT)
        self._before: dict[tuple[str, int, int], Tensor] | None = {
            _shard_key(each): _checksum(each) for each in weights
        }
        self._steps = 0

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert. Collective at one of the rows."""
        if self._before is None:
            return None
        self._steps += details.steps - sum(details.skipped)
        if self._steps < FROZEN_STEPS:
            return None
        moved, had_gradient = self._compare(self._before)
        self._before = None
        everyones = self._gather((moved, had_gradient))
        unmoved, without_gradient = (_false_on_all([each[part] for each in everyones]) for part in (0, 1))
        return self._event(unmoved, without_gradient)

    def _compare(self, before: dict[tuple[str, int, int], Tensor]) -> tuple[dict[str, bool], dict[str, bool]]:
        """Compare this rank's shards with the initial checksums.

        Returns:
            Name -> whether the parameter changed, and name -> whether it had a gradient other than 0.
        """
        moved: dict[str, list[Tensor]] = {}
        had_gradient: dict[str, list[Tensor]] = {}
        for shard in _trained(self._shards()):
            if shard.kind == WEIGHT:
                then = before.get(_shard_key(shard))
                if then is not None:
                    moved.setdefault(shard.name, []).append(_checksum(shard) != then)
            elif shard.values is not None:
                had_gradient.setdefault(shard.name, []).append(shard.values.any())
        return _read_flags(moved), _read_flags(had_gradient)

    def _event(self, unmoved: list[str], without_gradient: list[str]) -> Event | None:
        only_decayed = [name for name in without_gradient if name not in unmoved]
        if not unmoved and not only_decayed:
            return None
        parts = []
        if unmoved:
            parts.append(f"{format_names(unmoved)} did not change in {self._steps} steps")
        if only_decayed:
            parts.append(f"{format_names(only_decayed)} had only zero gradients in {self._steps} steps")
        return Event(
            "frozen_parameter",
            f"trained parameters are not learning: {'; '.join(parts)}",
            "look for what cuts them off (.detach(), a mask, an activation that is always 0, a branch that "
            "is never taken) and for a learning rate too small for the precision of the weights; to freeze "
            "them on purpose, list them in model.freeze",
            fields={"parameters": len(unmoved) + len(only_decayed), "first": (unmoved + only_decayed)[0]},
        )


def _trained(shards: Iterator[Shard]) -> Iterator[Shard]:
    return (each for each in shards if each.kind != BUFFER and not each.is_frozen and each.region.length)


def _shard_key(shard: Shard) -> tuple[str, int, int]:
    first = 0 if shard.region.box is None else hash(shard.region.box)
    return shard.name, first, shard.region.start


def _checksum(shard: Shard) -> Tensor:
    """Return a 0-dim checksum of the bits of some values, on their device, without waiting for it."""
    assert shard.values is not None
    # Odd, since the width of most rows is a multiple of a power of 2.
    stride = -(-shard.region.length // FROZEN_SAMPLE) | 1
    bits = shard.values[::stride].contiguous().view(torch.uint8).to(torch.int64)
    return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()


def _read_flags(found: dict[str, list[Tensor]]) -> dict[str, bool]:
    """Return for each name whether any of its flags is set."""
    if not found:
        return {}
    flags = torch.stack([torch.stack(each).any().cpu() for each in found.values()])
    return dict(zip(found, flags.tolist(), strict=True))


def _false_on_all(everyones: list[dict[str, bool]]) -> list[str]:
    """Return the names whose flag is set on no rank."""
    names = dict.fromkeys(name for each in everyones for name in each)
    return [name for name in names if not any(each.get(name, False) for each in everyones)]


# A wait for data is reported if it exceeds this share of the step and these seconds per step, in
# STARVED_WINDOWS windows in a row. A worker process takes about 1 ms itself to hand over a batch. Shipped
# recipes on two busy cores had single windows of 0.16; the lowest of three in a row never exceeded 0.05.
STARVATION_SHARE = 0.1
STARVATION_SECONDS = 1e-3
STARVATION_STEPS = 10
STARVED_WINDOWS = 3
# Minimum steps and seconds of a window, and the number of windows in a row that must be slower than the
# fastest one by the factor DROP. Other processes on a machine may disturb it for a minute.
WINDOW_STEPS = 20
WINDOW_SECONDS = 30.0
SLOW_WINDOWS = 4
DROP = 1.5
COMPARED_STEPS = 8  # minimum steps over which ranks are compared
SUSPECTED_STEPS = (
    16  # consecutive steps in which the same rank must be slow, so that a disturbance does not count
)
# Minimum seconds of those steps. Steps of a small model take milliseconds, and another process that occupies
# a core for a moment slows dozens of them. In 10,000 steps of digits_cnn.yaml with 2.5 processes per core a
# rank was slow for up to 0.8 s; at ZeRO 3 with 5 or more per core for up to 6 s. So it grows with the square.
SUSPECTED_SECONDS = 0.3
MIN_LOST_SHARE = 0.05  # minimum share of the step for which the other ranks wait
CONTENDED_SHARE = 0.25  # minimum share by which a rank is slower if ranks share cores with other processes
PHASES = {
    "data": "reading data",
    "forward": "its forward",
    "backward": "its backward",
}
"""Phase of PhaseSeconds -> its words in the alert."""
_COMPUTING = (
    "look for other processes on its device and cores, for its clocks and temperature (nvidia-smi), and at "
    "the lengths of its samples"
)
PHASE_ADVICE = {
    "data": "look at the disk and the processes of this machine, or raise loader.num_workers",
    "forward": _COMPUTING,
    "backward": _COMPUTING,
}
PhaseSeconds = Mapping[str, Sequence[float]]
"""Phase -> seconds per step of every rank."""
# Rows of a window at first. Windows double in length as the run continues, so that slow leaks are found too.
MEMORY_ROWS = 16
MEMORY_WINDOWS = 8  # windows in a row, each above the previous one
MAX_MEMORY_WINDOWS = 20
MIN_GROWTH = 0.1  # share of the earlier memory
MIN_GROWTH_GIB = 0.25
STEADY_GROWTH = 0.75  # minimum growth of a window relative to the average: memory that levels off grows less
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


class _Window:
    """Collects rows to windows.

    The first row of a process is left out, since it includes compilation and the start of workers.
    """

    def __init__(self, steps: int, seconds: float = 0.0):
        """Start a window with a minimum number of steps and seconds."""
        self._min_steps = steps
        self._min_seconds = seconds
        self._is_started = False
        self._rows: list[RowDetails] = []

    def add(self, row: RowDetails) -> list[RowDetails]:
        """Add a row that has the seconds of a step.

        Returns:
            The rows of the window if it is full now, else an empty list.
        """
        if not self._is_started:
            self._is_started = True
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
    """Return the seconds of all steps, on the slowest rank of each row."""
    return sum(row.steps * max(row.per_rank["step"]) for row in rows)


class DataStarvation:
    """Reports once per process that steps wait for data.

    A resumed run starts afresh: its disks, caches and workers may differ.
    """

    def __init__(self, num_workers: int):
        """Create the alert, given the number of processes that read data for one rank."""
        self._num_workers = num_workers
        self._window = _Window(STARVATION_STEPS)
        self._is_reported = False
        self._starved = 0

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert. The median rank is checked."""
        if self._is_reported or "data" not in details.per_rank or not (rows := self._window.add(details)):
            return None
        wait = sum(row.steps * median_low(row.per_rank["data"]) for row in rows) / _sum_steps(rows)
        whole = _sum_seconds(rows) / _sum_steps(rows)
        share = wait / whole
        is_starved = share > STARVATION_SHARE and wait >= STARVATION_SECONDS and not details.is_cpu_contended
        self._starved = self._starved + 1 if is_starved else 0
        if self._starved < STARVED_WINDOWS:
            return None
        self._is_reported = True
        return Event(
            "data_starvation",
            f"waiting for data is {share:.0%} of the step ({1000 * wait:.0f} of {1000 * whole:.0f} ms)",
            f"read it with more processes: loader.num_workers={max(2, 2 * self._num_workers)}",
            fields={"share": share, "seconds": wait},
        )


class ThroughputDrop:
    """Reports steps that take much longer than before for minutes, and again after they recovered.

    A resumed run starts afresh: its machines, disks and ranks may differ.
    """

    def __init__(self) -> None:
        self._window = _Window(WINDOW_STEPS, WINDOW_SECONDS)
        self._fast: tuple[float, float] | None = None
        self._slow = 0
        self._is_reported = False

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert. The median row of a window is checked."""
        if "step" not in details.per_rank or not (rows := self._window.add(details)):
            return None
        now = median(max(row.per_rank["step"]) for row in rows)
        waits = median(max(row.per_rank["data"]) for row in rows)
        if self._fast is None or now < self._fast[0]:
            self._fast = (now, waits)
        is_slow = now > DROP * self._fast[0] and not details.is_cpu_contended
        self._slow = self._slow + 1 if is_slow else 0
        self._is_reported &= is_slow
        if self._is_reported or self._slow < SLOW_WINDOWS:
            return None
        self._is_reported = True
        return self._event(now, waits, *self._fast)

    def _event(self, now: float, waits: float, fast: float, waited: float) -> Event:
        message = f"steps take {now / fast:.1f} times as long as they did ({1000 * now:.0f} ms, before "
        message += f"{1000 * fast:.0f} ms)"
        if waits - waited > (now - fast) / 2:
            message += ", most of it waiting for data"
            advice = "check the disk that data is read from, and raise loader.num_workers"
        else:
            advice = (
                "check for other processes on these machines, for clocks and temperature (nvidia-smi), for a "
                "slow rank (perf/slowest_rank) and for a shortage of memory (memory/alloc_retries)"
            )
        return Event("throughput_drop", message, advice, fields={"seconds": now, "seconds_before": fast})


@dataclass(frozen=True)
class _SlowestRank:
    """The slowest rank of a group, and the phase in which it loses most. All times are seconds per step."""

    rank: int
    phase: str
    seconds: float
    """Seconds of the phase on this rank."""
    normal: float
    """Seconds of the phase on the median rank."""
    lost: float
    """Seconds of all phases above the median rank's."""
    whole: float
    """Seconds of all phases on the median rank."""
    peers: str
    """Words for the ranks that it is compared with."""


class SlowRank:
    """Names a rank that takes longer in a phase than others with the same work, once for each phase.

    Steps take equally long on all ranks, so ranks are compared by the time in which they wait for no other
    rank: the phases of `RowDetails.per_rank`. Tensor or sequence parallelism and synchronised batch
    normalisation wait in each layer, so only reading data is compared there. A resumed run starts afresh: its
    ranks may be on other machines.
    """

    def __init__(self, everyone: Sequence[RankProcess], share: float, stages: int = 1):
        """Create the alert.

        Args:
            everyone: All ranks, in order.
            share: Minimum share by which a slow rank's phases are longer: 0.15 is 15 %.
            stages: Number of pipeline stages. Ranks of one stage are consecutive and have the same work.
        """
        self._everyone = everyone
        self._share = share
        self._stages = stages
        self._window = _Window(COMPARED_STEPS)
        self._reported: set[tuple[int, str]] = set()
        self._suspect: tuple[int, str] | None = None
        self._suspected_steps = 0
        self._suspected_seconds = 0.0

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        if "data" not in details.per_rank or not (rows := self._window.add(details)):
            return None
        steps = _sum_steps(rows)
        step_seconds = _sum_seconds(rows) / steps
        own = {
            phase: [
                sum(row.steps * row.per_rank[phase][rank] for row in rows) / steps
                for rank in range(len(rows[0].per_rank[phase]))
            ]
            for phase in PHASES
            if phase in details.per_rank
        }
        load = max(row.load for row in rows)
        lasting = SUSPECTED_SECONDS * max(1.0, load) ** 2
        share = max(self._share, CONTENDED_SHARE) if load > CONTENDED_LOAD else self._share
        slowest = [_find_slowest(*compared) for compared in self._comparisons(own)]
        found = [
            each for each in slowest if each.lost > max(share * each.whole, MIN_LOST_SHARE * step_seconds)
        ]
        slow = max(found, key=lambda each: each.lost, default=None)
        suspect = (slow.rank, slow.phase) if slow is not None else None
        if suspect != self._suspect:
            self._suspected_steps = 0
            self._suspected_seconds = 0.0
        self._suspect = suspect
        self._suspected_steps += steps
        self._suspected_seconds += steps * step_seconds
        lasts = self._suspected_steps >= SUSPECTED_STEPS and self._suspected_seconds >= lasting
        if slow is None or suspect is None or suspect in self._reported or not lasts:
            return None
        self._reported.add(suspect)
        return Event(
            "slow_rank",
            f"{self._everyone[slow.rank]} is slow: {PHASES[slow.phase]} takes {1000 * slow.seconds:.0f} ms a "
            f"step ({slow.peers}: {1000 * slow.normal:.0f} ms); the others wait for it "
            f"{1000 * (slow.seconds - slow.normal):.0f} of every {1000 * step_seconds:.0f} ms",
            PHASE_ADVICE[slow.phase],
            fields={
                "rank": slow.rank,
                "phase": slow.phase,
                "seconds": slow.seconds,
                "median_seconds": slow.normal,
            },
        )

    def _comparisons(self, own: PhaseSeconds) -> Iterator[tuple[PhaseSeconds, Sequence[int], str]]:
        """Yield the phases to compare, the ranks that have the same work in them, and words for the ranks."""
        everyone = range(len(own["data"]))
        if self._stages == 1:
            yield own, everyone, "the median rank"
            return
        yield {"data": own["data"]}, everyone, "the median rank"
        computed = {phase: each for phase, each in own.items() if phase != "data"}
        of_a_stage = len(everyone) // self._stages
        if computed and of_a_stage > 1:
            for first in everyone[::of_a_stage]:
                yield computed, everyone[first : first + of_a_stage], "the median rank of its stage"


def _find_slowest(own: PhaseSeconds, ranks: Sequence[int], peers: str) -> _SlowestRank:
    together = {rank: sum(each[rank] for each in own.values()) for rank in ranks}
    middle = median_low(together.values())
    rank = max(ranks, key=lambda rank: together[rank])
    normal = {phase: median_low(each[rank] for rank in ranks) for phase, each in own.items()}
    phase = max(own, key=lambda phase: own[phase][rank] - normal[phase])
    return _SlowestRank(
        rank=rank,
        phase=phase,
        seconds=own[phase][rank],
        normal=normal[phase],
        lost=together[rank] - middle,
        whole=middle,
        peers=peers,
    )


class MemoryGrowth:
    """Reports steady growth of the memory of a rank, once for each kind of memory.

    A resumed run starts afresh, as its processes do.
    """

    def __init__(self, min_gib: float = MIN_GROWTH_GIB) -> None:
        """Create the alert, given the minimum growth to report in GiB."""
        self._min_gib = min_gib
        self._series: dict[tuple[str, int], _MemoryWindows] = {}
        self._reported: set[str] = set()

    def __call__(self, step: int, details: RowDetails) -> Event | None:
        """See Alert."""
        found: Event | None = None
        for kind in MEMORY_KINDS.keys() & details.per_rank.keys() - self._reported:
            for rank, gib in enumerate(details.per_rank[kind]):
                windows = self._series.setdefault((kind, rank), _MemoryWindows())
                if windows.add(gib, step) and found is None and (grown := windows.growth(self._min_gib)):
                    self._reported.add(kind)
                    found = self._event(kind, rank, *grown)
        return found

    def _event(self, kind: str, rank: int, before: float, now: float, since: int) -> Event:
        what, advice = MEMORY_KINDS[kind]
        return Event(
            "memory_growth",
            f"{what} of rank {rank} grows: {before:.2f} GiB at step {since}, {now:.2f} GiB now",
            advice,
            fields={"rank": rank, "kind": kind, "gib_before": before, "gib": now},
        )


class _MemoryWindows:
    """Medians of windows of equal length, for one kind of memory of one rank."""

    def __init__(self) -> None:
        self._rows = MEMORY_ROWS
        self._open: list[float] = []
        self._medians: list[float] = []
        self._ends: list[int] = []

    def add(self, value: float, step: int) -> bool:
        """Add a value, and return whether a window is full now."""
        self._open.append(value)
        if len(self._open) < self._rows:
            return False
        if len(self._medians) == MAX_MEMORY_WINDOWS:
            self._medians = [
                (a + b) / 2 for a, b in zip(self._medians[::2], self._medians[1::2], strict=True)
            ]
            self._ends = self._ends[1::2]
            self._rows *= 2
            return False
        self._medians.append(median(self._open))
        self._ends.append(step)
        self._open = []
        return True

    def growth(self, min_gib: float) -> tuple[float, float, int] | None:
        """Return (GiB before, GiB now, step of before) if the windows grew steadily; the first is ignored."""
        last = self._medians[1:][-MEMORY_WINDOWS:]
        ends = self._ends[1:][-MEMORY_WINDOWS:]
        if len(last) < MEMORY_WINDOWS:
            return None
        rises = [b - a for a, b in pairwise(last)]
        grown = last[-1] - last[0]
        is_much = grown > max(min_gib, MIN_GROWTH * last[0])
        is_steady = min(rises) > STEADY_GROWTH * grown / len(rises)
        return (last[0], last[-1], ends[0]) if is_much and is_steady else None


@dataclass(frozen=True)
class WatchedRun:
    """Components of a run from which alerts are built."""

    config: RunConfig
    resolved: ResolvedSettings
    engine: Engine
    job: Job
    detectors: tuple[SpikeDetector, SpikeDetector]
    """Detectors of the losses and of the gradient norms."""

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
        """Return whether spikes are reported. Skipped spikes are not: they never become steps."""
        on_spike = self.config.watch.on_spike
        return on_spike != "skip" and (self.wants_alerts or on_spike != "log")

    @property
    def reports_frozen(self) -> bool:
        """Return whether frozen parameters are reported: not with NVMe offload, whose shards read slowly."""
        keys = (f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param"))
        devices = [get_dotted(self.resolved.deepspeed or {}, key) for key in keys]
        return self.wants_alerts and "nvme" not in devices


@dataclass(frozen=True)
class AlertKind:
    """Entry of ALERTS: the factory of an alert, and the condition under which a run has it."""

    build: Callable[[WatchedRun], Alert]
    """Function that creates the alert."""
    is_enabled: Callable[[WatchedRun], bool] = attrgetter("wants_alerts")
    """Function that returns whether the run has the alert."""


ALERTS = {
    "non_finite": AlertKind(
        lambda run: NonFiniteAlert(get_min_loss_scale(run.resolved.deepspeed)),
        attrgetter("reports_nonfinite"),
    ),
    LOSS_SPIKE: AlertKind(lambda run: SpikeAlert(LOSS_SPIKE, run.detectors[0]), attrgetter("reports_spikes")),
    GRAD_NORM_SPIKE: AlertKind(
        lambda run: SpikeAlert(GRAD_NORM_SPIKE, run.detectors[1]), attrgetter("reports_spikes")
    ),
    NO_TARGETS: AlertKind(lambda run: report_no_targets),
    "non_finite_eval": AlertKind(lambda run: NonFiniteEval()),
    "loss_rise": AlertKind(lambda run: LossRise()),
    "eval_divergence": AlertKind(lambda run: EvalDivergence()),
    "data_starvation": AlertKind(lambda run: DataStarvation(run.config.loader.num_workers)),
    "throughput_drop": AlertKind(lambda run: ThroughputDrop()),
    "slow_rank": AlertKind(
        lambda run: SlowRank(
            run.job.rank_processes, run.config.distributed.straggler_share, run.resolved.split.pipeline_stages
        )
    ),
    "memory_growth": AlertKind(lambda run: MemoryGrowth()),
    "frozen_parameter": AlertKind(
        lambda run: FrozenParameters(run.engine.shards, run.job.gather_object), attrgetter("reports_frozen")
    ),
}
"""Name of the event -> its alert, in the order in which alerts are applied. A custom alert is a callback
(`callbacks` of the recipe), which can return one."""


@unmap_freed_tensors()  # checksums of all weights
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
    """Build the alerts of a run, and the NonFiniteStepLimit that ends it.

    Collective: reads the engine's parameters.

    Args:
        config: The recipe.
        resolved: Recipe and DeepSpeed JSON, resolved.
        job: Process group of the run.
        engine: Engine of the run.
        start_step: Steps done before this process.
        max_steps: Last step of the run.
        detectors: Spike detectors of the losses and of the gradient norms.
        checkpoint_state: State of the checkpoint that the run resumes from; empty for a new run.
    """
    run = WatchedRun(config=config, resolved=resolved, engine=engine, job=job, detectors=detectors)
    alerts = [alert.build(run) for alert in ALERTS.values() if alert.is_enabled(run)]
    restore_alerts(alerts, checkpoint_state.get("watchers", {}))
    return (*alerts, NonFiniteStepLimit(engine.precision, start_step, max_steps))
