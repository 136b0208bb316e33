"""Losses that a user supplies: a function by its import path, or the loss that the model computes itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeline.config.import_paths import exit_as_error
from pipeline.data.batches import IGNORE_INDEX, count_samples
from pipeline.errors import ConfigError
from pipeline.objectives.interface import TARGET_KEYS, Batch, LossSum
from pipeline.objectives.model_call import (
    BaseObjective,
    FirstCallChecks,
    ModelCall,
    describe_output,
    get_loss,
    unwrap_model,
)

METRIC_NAME = re.compile(r"[A-Za-z][\w.@-]*")
"""Pattern of the names that a user's metrics may have."""
BUILT_IN_METRICS = {
    "bits_per_byte", "epoch", "grad_norm", "learning_rate", "loss", "loss_scale", "perplexity",
    "samples_seen", "skipped_in_a_row", "skipped_steps", "targets", "tokens_seen",
}  # fmt: skip
"""Names of built-in columns `train/...` and `eval/...`, which a user's metrics may not have."""


class CustomLoss(BaseObjective):
    """Minimises a user's function: `function(outputs, batch) -> loss`, a sum over the micro-batch's samples.

    The function may return `(loss, metrics)`. `metrics` maps the names in the function's attribute `metrics`
    to pairs (sum, count) over the micro-batch. The outputs of the model are passed in fp32, since not all of
    torch's losses exist in half precision. The logged loss is the mean over samples, or the sum divided by
    `function.count(batch)` if the function has that attribute.

    Args:
        function: The user's function.
        call: The call of the model.
        reduction: The reduction of the returned loss. A `mean` is multiplied by the number of targets, and
            the logged loss is the mean over the targets. `None`: the loss is a sum; the first call raises an
            error if it is a mean.

    Raises:
        ConfigError: The function cannot be called with (outputs, batch), its attribute `count` is no
            function, or its attribute `metrics` has a name that is not valid.
    """

    unit = "samples"

    def __init__(
        self,
        function: Callable[..., Tensor],
        call: ModelCall | None = None,
        reduction: Literal["sum", "mean"] | None = None,
    ):
        self.function = function
        self._reduction = reduction
        super().__init__(call)
        self._checks = FirstCallChecks()
        name = getattr(function, "__name__", type(function).__name__)
        self.means = _build_means(getattr(function, "metrics", ()), name)
        _refuse_torch_loss(function, name)
        count_targets = getattr(function, "count", None)
        if count_targets is not None and not callable(count_targets):
            raise ConfigError(
                f"objective.kind: {name}.count is not a function; make it a function of the batch"
            )
        if isinstance(function, type):
            raise ConfigError(
                f"objective.kind: {name} is a class; write a function that is called with (outputs, batch)"
            )
        try:
            signature = inspect.signature(function)
        except ValueError:  # written in C
            return
        try:
            signature.bind(None, None)
        except TypeError as misfit:
            raise ConfigError(
                f"objective.kind: {name}{signature} cannot be called with (outputs, batch): {misfit}; give "
                "the function these two arguments"
            ) from None

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count.

        Raises:
            ConfigError: The function's attribute `count` raises, or does not return one number.
        """
        count_by_user: Callable[[Batch], Any] | None = getattr(self.function, "count", None)
        if count_by_user is None:
            return torch.as_tensor(
                _count_targets(batch) if self._reduction == "mean" else count_samples(batch)
            )
        with exit_as_error("objective.kind: the function's count", ConfigError):
            count = count_by_user(batch)
        if not _is_number(count):
            raise ConfigError(
                f"objective.kind: the function's count returned {describe_output(count)}; expected one "
                "number, by which the loss is divided"
            )
        return torch.as_tensor(count)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective.

        Raises:
            ConfigError: The function raises, or returns something else than its loss and its metrics.
        """
        outputs = tree_map(_cast_to_fp32, self._call(model, batch))
        with (
            self._checks.check_inside(unwrap_model(model), batch) as checks,
            exit_as_error("objective.kind: the function", ConfigError),
        ):
            loss: Any = self.function(outputs, batch)
        metrics: Any = {}
        if isinstance(loss, tuple) and len(loss) == 2:
            loss, metrics = loss
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise ConfigError(
                f"objective.kind: the function returned {describe_output(loss)}; expected one 0-dim tensor: "
                "the sum of the loss over the samples"
            )
        count = self.count(batch).to(loss.device)
        num_elements = None if checks is None else checks.get_mean_divisor(loss)
        if num_elements is not None and not hasattr(self.function, "count"):
            self._check_mean(num_elements, count_samples(batch), float(count))
        extras = self._collect_sums(metrics, loss.device)
        if self._reduction == "mean":  # without targets, the mean is NaN and the sum is 0
            loss = torch.where(count > 0, loss * count, 0.0)
        return LossSum(loss, count, extras)

    def _collect_sums(self, metrics: Any, device: torch.device) -> dict[str, Tensor]:
        """Return the sums and counts of the metrics by their keys in `means`, fp64, without a host sync.

        Raises:
            ConfigError: The metrics are not those that the function's attribute names, or are no pairs of
                numbers.
        """
        if not isinstance(metrics, dict) or metrics.keys() != self.means.keys():
            returned = sorted(map(str, metrics)) if isinstance(metrics, dict) else describe_output(metrics)
            name = getattr(self.function, "__name__", "function")
            raise ConfigError(
                f"objective.kind: {name} returned the metrics {returned}, but {name}.metrics names "
                f"{sorted(self.means)}; write {name}.metrics = {returned} below the function, and return "
                "(loss, metrics) with the same names from every call"
            )
        extras: dict[str, Tensor] = {}
        for name, pair in metrics.items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(_is_number, pair)):
                raise ConfigError(
                    f"objective.kind: the function returned {describe_output(pair)} as metric {name!r}; "
                    "expected (sum, count), two numbers over the micro-batch: their quotient is the metric"
                )
            for key, value in zip(self.means[name], pair, strict=True):
                extras[key] = _move_to_device(value, device)
        return extras

    def _check_mean(self, num_elements: float, samples: int, targets: float) -> None:
        """Raise a ConfigError for a mean that the recipe does not state, or that is not over the targets.

        Args:
            num_elements: Number of elements that the function's loss is a mean over; NaN with class weights.
                A multiple of the number of targets is accepted: a mean over several outputs for each target.
            samples: Number of samples of the micro-batch.
            targets: Number of targets of the micro-batch.
        """
        if self._reduction is None and samples > 1:
            raise ConfigError(
                f"objective.kind: the function returned a mean; expected the sum over the micro-batch's "
                f'{samples} samples (reduction="sum"). Write objective.reduction: mean, which weights it by '
                "the number of targets, or objective.reduction: sum if the value is the sum"
            )
        if self._reduction == "mean" and targets and num_elements % targets:
            raise ConfigError(
                "objective.reduction: mean: the function's mean is not over the micro-batch's "
                f"{targets:g} targets (class weights, a mask, another ignore_index, or a mean by sample); "
                "give the function an attribute `count`, a function of the batch that returns the number of "
                "targets in its mean, or return the sum"
            )


def _build_means(names: Any, function: str) -> dict[str, tuple[str, str]]:
    """Return the keys of the sum and of the count of each metric; see Objective.means.

    Args:
        names: Value of the function's attribute `metrics`: a name, or names.
        function: Name of the function, for messages.

    Raises:
        ConfigError: A name does not match METRIC_NAME, or a built-in column has it.
    """
    names = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    for name in names:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise ConfigError(
                f"objective.kind: {function}.metrics has {name!r}; name a metric by letters, digits, _ - . @"
            )
        if name in BUILT_IN_METRICS:
            raise ConfigError(
                f"objective.kind: {function}.metrics has {name!r}, a built-in metric; choose another name"
            )
    return {name: (f"{name}: sum", f"{name}: count") for name in names}


def _is_number(value: Any) -> bool:
    is_numeric = isinstance(value, (int, float, np.number, np.ndarray, Tensor))
    return is_numeric and torch.as_tensor(value).numel() == 1


def _move_to_device(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device, torch.float64)
    # Filled on the device, since a copy from pageable host memory synchronizes with the device.
    return torch.full((), float(torch.as_tensor(value)), dtype=torch.float64, device=device)


def _count_targets(batch: Batch) -> int | Tensor:
    """Return the number of targets that torch's losses average over; without targets, the number of samples.

    All elements of floating-point targets count, and all class numbers that are not -100.
    """
    targets = next((batch[key] for key in TARGET_KEYS if isinstance(batch.get(key), Tensor)), None)
    if targets is None:
        return count_samples(batch)
    return targets.numel() if targets.is_floating_point() else (targets != IGNORE_INDEX).sum()


def _refuse_torch_loss(function: Any, name: str) -> None:
    """Raise a ConfigError for a plain loss of torch, which takes no batch and returns a mean."""
    inner = getattr(function, "func", function)  # the function inside of a functools.partial
    kind = inner if isinstance(inner, (type, FunctionType)) else type(inner)
    if kind.__module__ == "torch.nn.functional":
        name = kind.__name__
        call = f'F.{name}(outputs, batch["targets"], reduction="sum")'
    elif kind.__module__ == "torch.nn.modules.loss":
        name = kind.__name__
        call = f'nn.{name}(reduction="sum")(outputs, batch["targets"])'
    else:
        return
    raise ConfigError(
        f"objective.kind: {name} is torch's and takes no batch; write def loss(outputs, batch): return {call}"
    )


def _cast_to_fp32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


class ModelLoss(BaseObjective):
    """Minimises the loss that the model computes from inputs and targets: a mean over the batch's samples.

    Args:
        call: The call of the model, by default one with targets.
    """

    unit = "samples"

    def __init__(self, call: ModelCall | None = None):
        super().__init__(call or ModelCall(with_targets=True))

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        return torch.as_tensor(count_samples(batch))

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        loss = get_loss(self._call(model, batch)).float()
        samples = self.count(batch)
        if loss.dim() == 0:
            return LossSum(loss * samples, samples.to(loss.device))
        # nn.DataParallel divides the samples over the GPUs by torch.chunk, and returns one mean for each GPU.
        # If the model returns one loss for each sample, each part is one sample.
        parts = torch.empty(int(samples)).chunk(len(loss))
        sizes = torch.tensor([len(part) for part in parts], device=loss.device)
        return LossSum((loss * sizes).sum(), samples.to(loss.device))
