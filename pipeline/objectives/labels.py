"""Labels of a batch: found, and looked at on the host: on a GPU a wrong one ends the process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from pipeline.data.batches import IGNORE_INDEX, shown
from pipeline.data.extents import first_wrong
from pipeline.errors import DataError, ModelError
from pipeline.objectives.interface import Batch

log = logging.getLogger(__name__)

MIN_ROWS = 2
"""One row of two logits looks like probabilities once in 400 times."""


def find_labels(batch: Batch, names: Sequence[str], objective: str) -> str:
    """The first of these entries that the batch has.

    Raises:
        DataError: it has none of them, or they are no class numbers; says what the batch has.
    """
    name = next((name for name in names if name in batch), None)
    if name is None:
        raise DataError(f"objective {objective} reads {names[0]!r}, and the batch has {shown(batch)}")
    labels = batch[name]
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"objective {objective} reads class numbers (integers from 0) from {name!r}, and the batch has "
            f"{shown({name: labels})}; make them such in the data set, or use an objective of your own"
        )
    return name


class FirstCount:
    """Warns where the first count is 0: labels that are all left out train nothing."""

    def __init__(self) -> None:
        self._is_first = True

    def __call__(self, count: Tensor, name: str) -> Tensor:
        if self._is_first:
            self._is_first = False
            if not count:
                log.warning(
                    "no label of the first micro-batch counts: all of %r are %d or have weight 0; where "
                    "that holds for all of the data, nothing is learned",
                    name,
                    IGNORE_INDEX,
                )
        return count


class FirstScores:
    """Holds the first scores to what a cross entropy takes: logits, or declared probabilities.

    Args:
        are_probabilities: The scores are declared as such.
        cure: What to write where logits are expected and probabilities come.
    """

    def __init__(self, cure: str, are_probabilities: bool = False) -> None:
        self._cure = cure
        self._are_probabilities = are_probabilities
        self._rows_left = MIN_ROWS

    def __call__(self, scores: Tensor) -> None:
        """Check scores (..., C). Waits for the device, in the first calls alone.

        Raises:
            ModelError: they are of the other kind.
        """
        if self._rows_left <= 0 or not scores.numel():
            return
        scores = scores.detach()  # nothing of this is to be recomputed
        is_sum_one = bool(((scores.sum(-1) - 1).abs() < 0.01).all())
        if not (scores.shape[-1] > 1 and is_sum_one and scores.min() >= 0):
            if self._are_probabilities:
                raise ModelError(
                    "objective.outputs: probabilities, and the model's outputs are none (0 or more, of sum "
                    "1); if they are logits, drop the key"
                )
            self._rows_left = 0
            return
        self._rows_left -= scores[..., 0].numel()
        if self._rows_left <= 0 and not self._are_probabilities:
            raise ModelError(
                "the model's outputs are probabilities (0 or more, of sum 1), and a cross entropy takes "
                "logits, of which it computes the softmax itself: leave the model's softmax out, or "
                + self._cure
            )


def check_labels(batch: Batch, name: str, classes: int) -> None:
    """Raises DataError where there is a label that is neither -100 nor in [0, classes)."""
    if (wrong := first_wrong(batch, name, classes)) is not None:
        raise DataError(
            f"{name!r} has {wrong.value}, and the model has {classes} outputs: expected 0 to {classes - 1} "
            f"({IGNORE_INDEX}: not counted){wrong.sample}"
        )
