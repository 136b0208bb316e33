"""Objective that records the log-probabilities of given tokens, and its batches.

Shapes: B rows, T tokens, N = B * T tokens, V vocabulary, C tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.data.batches import IGNORE_INDEX
from pipeline.errors import ModelError
from pipeline.objectives.interface import Batch, LossSum
from pipeline.objectives.model_call import BaseObjective, ModelCall, get_logits
from pipeline.planner.model import choose_block_rows


class ContinuationScorer(BaseObjective):
    """Records the scores of labelled tokens. The loss that it returns is 0.

    Args:
        call: The call of the model.
        num_tokens: Number of all labels.
        device: Device of the scores.
    """

    unit = "tokens"

    def __init__(self, call: ModelCall, num_tokens: int, device: torch.device):
        super().__init__(call)
        self.scores = torch.zeros(4, num_tokens, dtype=torch.float64, device=device)
        """Scores (4, num_tokens): for each label its log-probability, that of the likeliest token, the
        likeliest token's id, and 1. A column is 0 if another rank scores its label."""

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        return (batch["shift_labels"] != IGNORE_INDEX).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """Record the scores of the labels of a batch that build_scoring_batch returned.

        The batch's `targets` are the labels' columns in `scores`.

        Raises:
            ModelError: The model returned other logits than (B, T, V).
        """
        labels_BT = batch["shift_labels"]
        logits_BTV = get_logits(self._call(model, batch))
        if logits_BTV.shape[:-1] != labels_BT.shape:
            raise ModelError(
                f"the model returned logits {tuple(logits_BTV.shape)} for tokens {tuple(labels_BT.shape)}; "
                "log-probabilities need a language model, with logits (samples, tokens, vocabulary)"
            )
        logits_NV = logits_BTV.flatten(0, 1)
        labels_N = labels_BT.flatten()
        numbers_N = batch["targets"].flatten()
        labelled = (labels_N != IGNORE_INDEX).nonzero()[:, 0]
        for block in labelled.split(choose_block_rows(logits_NV.shape[1], logits_NV.is_cpu)):
            logps_CV = logits_NV[block].float().log_softmax(-1)
            label_logps_C = logps_CV.gather(1, labels_N[block, None])[:, 0]
            top_logps_C, top_ids_C = logps_CV.max(1)
            values = [label_logps_C, top_logps_C, top_ids_C, torch.ones_like(top_logps_C)]
            self.scores[:, numbers_N[block]] = torch.stack([each.double() for each in values])
        zero = torch.zeros((), device=logits_NV.device)
        return LossSum(zero, zero)


def build_scoring_batch(
    rows: Sequence[tuple[Sequence[int], range]], length: int, num_positions: int
) -> dict[str, Tensor]:
    """Return a batch for ContinuationScorer, padded on the right; a row of padding if there are no rows.

    Args:
        rows: Tokens of each row, and the numbers under which the scores of its last tokens are recorded.
        length: Number of columns. Columns behind `num_positions` have padding only, at the last position.
        num_positions: Number of positions that the model may have.
    """
    ids_BT = torch.zeros(max(1, len(rows)), length, dtype=torch.int64)
    labels_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    numbers_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    for row, (tokens, numbers) in enumerate(rows):
        last = len(tokens) - 1  # the last token is only a label
        first = last - len(numbers)
        ids_BT[row, :last] = torch.tensor(tokens[:-1])
        labels_BT[row, first:last] = torch.tensor(tokens[first + 1 :])
        numbers_BT[row, first:last] = torch.tensor(numbers)
    batch = {"input_ids": ids_BT, "shift_labels": labels_BT, "targets": numbers_BT}
    if length > num_positions:
        batch["position_ids"] = torch.arange(length).clamp(max=num_positions - 1).repeat(len(ids_BT), 1)
    return batch
