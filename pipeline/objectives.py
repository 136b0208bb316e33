"""(model, batch) -> LossSum: a sum and a count, never a mean. engine/normalize.py alone divides.

Shapes: B batch, T sequence, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.model_schema import CausalLMConfig, CNNConfig
from pipeline.config.schema import RunConfig
from pipeline.cross_entropy import IGNORED, cross_entropy_sum
from pipeline.errors import ConfigError, ModelError
from pipeline.importing import import_object

Batch = Mapping[str, Tensor]

# What a batch holds for the objective; everything else goes to the model.
TARGET_KEYS = ("labels", "shift_labels", "targets")


@dataclass(frozen=True)
class LossSum:
    """What one micro-batch adds to the loss. All 0-dim tensors on the device."""

    loss_sum: Tensor
    count: Tensor
    """Tokens or samples (or their weights) the loss is the sum over."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Further sums over the same count, such as `correct`."""


class Objective(Protocol):
    """What is minimised: the sum of `loss_sum` over the sum of `count`, both over the global batch."""

    unit: str
    """What is counted: `tokens` or `samples`."""
    extra_keys: tuple[str, ...]
    """Names of the further sums in LossSum.extras."""

    def count(self, batch: Batch) -> Tensor:
        """The micro-batch's count (0-dim), from the batch alone: it is needed before the first backward."""
        ...

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """Runs the model on a batch that is on its device."""
        ...


def call_model(model: Callable[..., Any], batch: Batch) -> Any:
    """The model's output for the batch without its targets; a lone `inputs` goes in by position.

    Raises:
        ModelError: the model wants the targets too.
    """
    inputs = {key: value for key, value in batch.items() if key not in TARGET_KEYS}
    try:
        return model(inputs["inputs"]) if list(inputs) == ["inputs"] else model(**inputs)
    except TypeError as error:
        wanted = [key for key in TARGET_KEYS if f"'{key}'" in str(error)]
        if "missing" not in str(error) or not wanted:
            raise
        raise ModelError(
            f"the model's forward wants {wanted[0]}; targets go to the objective, unless the model computes "
            "its own loss: objective.kind: model_loss"
        ) from None


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: a tensor, `.logits`, `["logits"]`, or the first of a tuple.

    Raises:
        ModelError: there are none.
    """
    logits = _found(output, "logits")
    if logits is not None and logits.dim() > 0:
        return logits
    if logits is not None or _found(output, "loss") is not None:
        raise ModelError(
            "the model returned its own loss, and the objective wants logits; to train on that loss write "
            "objective.kind: model_loss"
        )
    raise ModelError(
        f"the model returned {_shape_of(output)}; expected logits: a tensor, .logits, ['logits'], or the "
        "first of a tuple"
    )


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returned: a tensor, `.loss`, `["loss"]`, or the first of a tuple.

    Raises:
        ModelError: there is none, or it is no mean (it has more than one dimension).
    """
    loss = _found(output, "loss")
    if loss is None or loss.dim() > 1:
        raise ModelError(
            f"objective.kind is model_loss, and the model returned {_shape_of(output)}; expected the mean "
            "loss of its samples: a 0-dim tensor, .loss, ['loss'], or the first of a tuple"
        )
    return loss


def _found(output: Any, name: str) -> Tensor | None:
    if isinstance(output, Mapping):
        found = output.get(name)
    elif hasattr(output, name):
        found = getattr(output, name)
    else:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
    return found if isinstance(found, Tensor) else None


def _shape_of(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


class CausalLM:
    """Next-token cross entropy over the labels that are not -100.

    A batch holds `input_ids` (B, T) and either `shift_labels` (B, T), where position t holds the token after
    t, or `labels` (B, T) aligned with the inputs, as transformers has them.
    """

    unit = "tokens"
    extra_keys: tuple[str, ...] = ()

    def count(self, batch: Batch) -> Tensor:
        return (self._labels(batch) != IGNORED).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        labels_BT = self._labels(batch)
        logits_BTV = logits_of(call_model(model, batch))
        loss_sum = cross_entropy_sum(logits_BTV.flatten(0, 1), labels_BT.flatten())
        return LossSum(loss_sum, (labels_BT != IGNORED).sum())

    @staticmethod
    def _labels(batch: Batch) -> Tensor:
        if "shift_labels" in batch:
            return batch["shift_labels"]
        return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


class Classification:
    """Cross entropy over classes, with optional class weights, over the labels that are not -100.

    With weights the mean is over the weights of the labels, as in torch.nn.CrossEntropyLoss. The weights are
    fp32 whatever the precision, and follow the batch to its device.
    """

    unit = "samples"
    extra_keys: tuple[str, ...] = ("correct", "samples")

    def __init__(self, class_weights: list[float] | None = None, label_smoothing: float = 0.0):
        self.weights_C = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self.label_smoothing = label_smoothing

    def _weights(self, device: torch.device) -> Tensor | None:
        if self.weights_C is not None and self.weights_C.device != device:
            self.weights_C = self.weights_C.to(device)  # once: the run has one device
        return self.weights_C

    def count(self, batch: Batch) -> Tensor:
        labels_B = batch["labels"]
        weights_C = self._weights(labels_B.device)
        valid_B = labels_B != IGNORED
        if weights_C is None:
            return valid_B.sum()
        try:
            return (weights_C[labels_B.clamp(min=0)] * valid_B).sum()
        except IndexError:
            raise ConfigError(
                f"objective.class_weights: {weights_C.numel()} weights, and a label is {labels_B.max()}"
            ) from None

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        labels_B = batch["labels"]
        logits_BC = logits_of(call_model(model, batch)).float()
        weights_C = self._weights(logits_BC.device)
        if weights_C is not None and weights_C.numel() != logits_BC.shape[-1]:
            raise ConfigError(
                f"objective.class_weights: {weights_C.numel()} weights for {logits_BC.shape[-1]} classes"
            )
        loss_sum = F.cross_entropy(
            logits_BC,
            labels_B,
            weights_C,
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        extras = {
            "correct": (logits_BC.argmax(-1) == labels_B).sum(),
            "samples": (labels_B != IGNORED).sum(),
        }
        return LossSum(loss_sum, self.count(batch), extras)


class Custom:
    """A user's function: `function(outputs, batch) -> loss_sum`, a sum over the micro-batch's samples.

    The mean is over samples, or over `function.count(batch)` where the function has such an attribute.
    """

    unit = "samples"
    extra_keys: tuple[str, ...] = ()

    def __init__(self, function: Callable[..., Tensor]):
        self.function = function

    def count(self, batch: Batch) -> Tensor:
        own: Callable[[Batch], Any] | None = getattr(self.function, "count", None)
        return torch.as_tensor(own(batch) if own else len(next(iter(batch.values()))))

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        loss_sum = self.function(call_model(model, batch), batch)
        if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0:
            raise ConfigError(
                f"objective.kind: the function returned {_shape_of(loss_sum)}; expected one 0-dim tensor: "
                "the sum of the loss over the samples"
            )
        return LossSum(loss_sum, self.count(batch).to(loss_sum.device))


class ModelLoss:
    """The loss the model computes itself, from the whole batch: its mean over the batch's samples.

    A batch's own `inputs` goes in by position where only targets stand beside it, everything else by name.
    """

    unit = "samples"
    extra_keys: tuple[str, ...] = ()

    def count(self, batch: Batch) -> Tensor:
        return torch.as_tensor(len(next(iter(batch.values()))))

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        targets = {key: value for key, value in batch.items() if key in TARGET_KEYS}
        if set(batch) - set(targets) == {"inputs"}:
            output = model(batch["inputs"], **targets)
        else:
            output = model(**batch)
        loss, num_samples = loss_of(output).float(), self.count(batch)
        if loss.dim() == 0:
            return LossSum(loss * num_samples, num_samples.to(loss.device))
        # nn.DataParallel gathers one mean a GPU, of the parts that torch.chunk makes. A loss for each sample
        # is the same with parts of one.
        parts = torch.empty(int(num_samples)).chunk(len(loss))
        sizes = torch.tensor([len(part) for part in parts], device=loss.device)
        return LossSum((loss * sizes).sum(), num_samples.to(loss.device))


def build_objective(config: RunConfig) -> Objective:
    """The objective the recipe names; `auto` follows the model's kind.

    Raises:
        ConfigError: `auto` with a model of one's own, an import path that leads nowhere, or settings of
            classification for another objective.
    """
    objective = config.objective
    kind = objective.kind
    if kind == "auto":
        kinds = {CausalLMConfig: "causal_lm", CNNConfig: "classification"}
        kind = kinds.get(type(config.model), "")
        if not kind:
            raise ConfigError(
                "objective.kind: with a model of your own say what is minimised: causal_lm, classification, "
                "model_loss (the model returns its loss), or package.module:function"
            )
    if kind == "classification":
        return Classification(objective.class_weights, objective.label_smoothing)
    for name in ("class_weights", "label_smoothing"):
        if getattr(objective, name):
            raise ConfigError(f"objective.{name}: only classification reads it, and this is {kind}")
    if kind == "causal_lm":
        return CausalLM()
    if kind == "model_loss":
        return ModelLoss()
    return Custom(import_object(kind, ConfigError))
