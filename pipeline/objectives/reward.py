"""Reward models: the score of an answer is what the model gives at its last token.

Bradley-Terry, as TRL 1.16 has it, with a margin (Touvron et al. 2023, equation 2) and scores centred at 0
(Eisenstein et al. 2023). Shapes: B rows, T tokens, S segments of a row, P = S / 2 places for pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.preference_layouts import CHOSEN
from pipeline.errors import DataError, ModelError
from pipeline.objectives.interface import Batch, LossSum
from pipeline.objectives.model_call import ModelCall
from pipeline.objectives.outputs import logits_of
from pipeline.objectives.preferences import SIDES, OfPairs
from pipeline.objectives.segments import KINDS, MARGINS, SEGMENTS
from pipeline.objectives.sequence_group import group_of

POSITIONS = "position_ids"


class Reward(OfPairs):
    """-log sigmoid of by how much the chosen answer's score is higher, divided by the pairs of the global
    batch.

    Args:
        margin_weight: What a pair's margin is multiplied by, which is taken off the difference.
        center_weight: Of the square of both scores' sum, which is added.
    """

    name = "reward"
    means: Mapping[str, tuple[str, str]] = {
        **{f"rewards/{side}": (f"{side} rewards", "pairs") for side in SIDES},
        "rewards/margin": ("reward margins", "pairs"),
        "rewards/accuracy": ("preferred", "pairs"),
    }

    def __init__(self, margin_weight: float = 1.0, center_weight: float = 0.0, call: ModelCall | None = None):
        super().__init__(call)
        self._margin_weight, self._center_weight = margin_weight, center_weight

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective. Every rank that shares the rows reports its share of the same sums."""
        is_pair_BP = batch[KINDS][:, ::2] == CHOSEN
        chosen_BP, rejected_BP = self._scores(model, batch).unflatten(1, (-1, 2)).unbind(-1)
        difference_BP = chosen_BP - rejected_BP
        wanted_BP = difference_BP
        if self._margin_weight and MARGINS in batch:
            wanted_BP = difference_BP - self._margin_weight * batch[MARGINS][:, ::2]
        loss_BP = -F.logsigmoid(wanted_BP)
        if self._center_weight:
            loss_BP = loss_BP + self._center_weight * (chosen_BP + rejected_BP) ** 2
        share = group_of(model).size

        def total(values_BP: Tensor) -> Tensor:
            return torch.where(is_pair_BP, values_BP, 0.0).sum() / share

        told = {
            "chosen rewards": chosen_BP,
            "rejected rewards": rejected_BP,
            "reward margins": difference_BP,
            "preferred": (difference_BP > 0).double(),
        }
        pairs = is_pair_BP.sum().double() / share
        extras = {name: total(values.detach()) for name, values in told.items()}
        return LossSum(total(loss_BP).float(), pairs, extras | {"pairs": pairs})

    def _scores(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """(B, S), fp64: of each segment its last token's; 0 where there is none. Collective where rows are
        cut."""
        kinds_BS, segments_BT = batch[KINDS], batch[SEGMENTS]
        if POSITIONS not in batch:
            raise DataError(f"objective {self.name} reads {POSITIONS!r}, which count from 0 in each segment")
        scores_BT = logits_of(self._call(model, batch)).squeeze(-1)
        if scores_BT.shape != segments_BT.shape:
            raise ModelError(
                f"objective {self.name} wants a score for each token, (samples, tokens) or (samples, tokens, "
                f"1), and the model returned {tuple(scores_BT.shape)} for {tuple(segments_BT.shape)} tokens"
            )
        group, there_BT = group_of(model), segments_BT >= 0
        row_B1 = torch.arange(len(kinds_BS), device=kinds_BS.device)[:, None] * kinds_BS.shape[1]
        index_BT = row_B1 + segments_BT.clamp(min=0)

        def by_segment(values_BT: Tensor) -> Tensor:
            sums = torch.zeros(kinds_BS.numel(), dtype=torch.float64, device=kinds_BS.device)
            sums = sums.index_add(0, index_BT.flatten(), values_BT.double().flatten())
            return group.total(sums.view(kinds_BS.shape))

        lengths_BS = by_segment(there_BT)
        is_last_BT = there_BT & (batch[POSITIONS] == lengths_BS.flatten()[index_BT] - 1)
        return by_segment(torch.where(is_last_BT, scores_BT.double(), 0.0))
