"""Cross entropy over a vocabulary or over classes. Shapes: B batch, T sequence, V vocabulary, C classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.cross_entropy import cross_entropy_sum
from pipeline.data.batches import IGNORE_INDEX, shown
from pipeline.errors import ConfigError, DataError, ModelError
from pipeline.objectives.interface import Batch, LossSum
from pipeline.objectives.labels import FirstCount, FirstScores, check_labels, find_labels, wrong_label
from pipeline.objectives.model_call import Caller, ModelCall
from pipeline.objectives.outputs import logits_of

LABELS = ("labels", "label", "targets", "target")


class CausalLM(Caller):
    """Next-token cross entropy over the labels that are not -100.

    A batch holds `input_ids` (B, T) and either `shift_labels` (B, T), where position t holds the token after
    t, or `labels` (B, T) aligned with the inputs, as transformers has them.
    """

    unit = "tokens"
    extra_keys: tuple[str, ...] = ()

    def __init__(self, call: ModelCall | None = None):
        super().__init__(call)
        self._told = FirstCount()

    def count(self, batch: Batch) -> Tensor:
        return self._told((self._labels(batch) != IGNORE_INDEX).sum(), "labels")

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        labels_BT = self._labels(batch)
        logits_BTV = logits_of(self._call(model, batch))
        if logits_BTV.shape[:-1] != labels_BT.shape:
            raise ModelError(
                f"objective causal_lm wants logits (samples, tokens, vocabulary): the model returned "
                f"{tuple(logits_BTV.shape)} for labels {tuple(labels_BT.shape)}"
            )
        check_labels(batch, "shift_labels" if "shift_labels" in batch else "labels", logits_BTV.shape[-1])
        loss_sum = cross_entropy_sum(logits_BTV.flatten(0, 1), labels_BT.flatten())
        return LossSum(loss_sum, (labels_BT != IGNORE_INDEX).sum())

    @staticmethod
    def _labels(batch: Batch) -> Tensor:
        name = find_labels(batch, ("labels", "shift_labels"), "causal_lm")
        labels_BT: Tensor = batch.get("shift_labels", batch[name])
        if labels_BT.dim() != 2:
            raise DataError(
                f"objective causal_lm wants a label for each token, (samples, tokens), and the batch has "
                f"{shown(batch)}"
            )
        labels_BT = labels_BT.long()
        return labels_BT if "shift_labels" in batch else F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE_INDEX)


class Classification(Caller):
    """Cross entropy over classes, with optional class weights, over the labels that are not -100.

    Logits (..., C), labels (...), which stand under one of LABELS. With weights the mean is over the weights
    of the labels, as in torch.nn.CrossEntropyLoss. The weights are fp32 whatever the precision, and follow
    the batch to its device.
    """

    unit = "samples"
    extra_keys: tuple[str, ...] = ("correct", "samples")

    def __init__(
        self,
        class_weights: list[float] | None = None,
        label_smoothing: float = 0.0,
        call: ModelCall | None = None,
    ):
        self.weights_C = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self.label_smoothing = label_smoothing
        self._told = FirstCount()
        self._told_scores = FirstScores()
        super().__init__(call)

    def _weights(self, device: torch.device) -> Tensor | None:
        if self.weights_C is not None and self.weights_C.device != device:
            self.weights_C = self.weights_C.to(device)  # once: the run has one device
        return self.weights_C

    def count(self, batch: Batch) -> Tensor:
        name = find_labels(batch, LABELS, "classification")
        labels = batch[name].long()
        weights_C = self._weights(labels.device)
        valid = labels != IGNORE_INDEX
        if weights_C is None:
            return self._told(valid.sum(), name)
        if (wrong := wrong_label(batch, name, weights_C.numel())) is not None:
            raise ConfigError(f"objective.class_weights: {weights_C.numel()} weights, and a label is {wrong}")
        return self._told((weights_C[labels.clamp(min=0)] * valid).sum(), name)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        name = find_labels(batch, LABELS, "classification")
        labels = batch[name].long()
        logits = logits_of(self._call(model, batch)).float()
        weights_C = self._weights(logits.device)
        if weights_C is not None and weights_C.numel() != logits.shape[-1]:
            raise ConfigError(
                f"objective.class_weights: {weights_C.numel()} weights for {logits.shape[-1]} classes"
            )
        if logits.shape[:-1] != labels.shape:
            raise ModelError(
                f"objective classification wants logits (samples, classes) for labels (samples): the model "
                f"returned {tuple(logits.shape)}, and {name!r} has {tuple(labels.shape)}"
            )
        check_labels(batch, name, logits.shape[-1])
        self._told_scores(logits)
        loss_sum = F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            weights_C,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        extras = {"correct": (logits.argmax(-1) == labels).sum(), "samples": (labels != IGNORE_INDEX).sum()}
        return LossSum(loss_sum, self.count(batch), extras)
