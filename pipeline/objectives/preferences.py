"""Objectives on pairs of answers: DPO and its kin, with a reference, and ORPO, SimPO and CPO without.

A pair is two segments of a row next to each other, the chosen one first. Shapes: B rows, S segments of a row,
P = S / 2 places for pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.data.batches import IGNORE_INDEX, on_host
from pipeline.data.preference_layouts import CHOSEN, REJECTED
from pipeline.errors import DataError
from pipeline.objectives.given_logits import FusedKernels
from pipeline.objectives.interface import Batch, GlobalBatch, LossSum
from pipeline.objectives.model_call import ModelCall
from pipeline.objectives.preference_losses import PairLoss
from pipeline.objectives.segments import KINDS, SEGMENTS, BySegment

SIDES = ("chosen", "rejected")
ROUNDING = 1e-6  # of log-probabilities in fp32, relative


@dataclass(frozen=True)
class PairTerms:
    """What is minimised of a pair."""

    name: str
    loss: PairLoss
    has_reference: bool = False
    by_token: bool = False
    """Scores are means over an answer's tokens, else sums."""
    sft_weight: float = 0.0
    """Of the cross entropy of the chosen answers, a mean over their tokens."""


class OfPairs(BySegment):
    """What objectives on pairs have in common."""

    unit = "pairs"

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count.

        Raises:
            DataError: see BySegment.kinds; or segments are no pairs.
        """
        kinds_BS = self.kinds(batch)
        if kinds_BS.shape[1] % 2 == 0:
            chosen_BP, rejected_BP = kinds_BS.unflatten(1, (-1, 2)).unbind(-1)
            are_pairs = ((chosen_BP == CHOSEN) & (rejected_BP == REJECTED)) | (chosen_BP + rejected_BP == 0)
            if kinds_BS.device.type != "cpu" or bool(are_pairs.all()):
                return (chosen_BP == CHOSEN).sum()
        raise DataError(
            f"objective {self.name} compares pairs, and {KINDS!r} of a row are {_odd(kinds_BS)}: expected "
            f"{CHOSEN} (chosen), {REJECTED} (rejected), again and again, then 0"
        )


class Pairs(OfPairs):
    """The loss of pairs, divided by the pairs of the global batch; a term on the chosen answers, if there is
    one, by the tokens of these.

    `rewards/...` are beta times the log-probability, less the reference's where there is one: a sum over
    tokens then, else what the loss compares.
    """

    def __init__(self, terms: PairTerms, call: ModelCall | None = None, kernels: FusedKernels | None = None):
        super().__init__(call, kernels)
        self._terms = terms
        self.name, self.has_reference = terms.name, terms.has_reference
        self.means: Mapping[str, tuple[str, str]] = {
            **{f"rewards/{side}": (f"{side} rewards", "pairs") for side in SIDES},
            "rewards/margin": ("reward margins", "pairs"),
            "rewards/accuracy": ("preferred", "pairs"),
            **{f"logps/{side}": (f"{side} logps", "pairs") for side in SIDES},
        }
        if terms.sft_weight:
            self.means |= {"sft_loss": ("sft losses", "sft tokens")}
            self.weighted = {"sft_loss": terms.sft_weight}
        self._pairs_a_token: Tensor | None = None  # of the global batch

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective.prepare_step: how many tokens the chosen answers have for a pair, where that is
        needed."""
        if not self._terms.sft_weight:
            return
        counts = torch.stack([self._pairs_and_tokens(each) for each in batch.micro_batches]).sum(0)
        pairs, tokens = batch.all_reduce_sum(counts.to(batch.device, non_blocking=True))
        self._pairs_a_token = pairs / tokens.clamp(min=1)

    def _pairs_and_tokens(self, batch: Batch) -> Tensor:
        """(2,), fp64, on the host where the batch is known there."""
        host = on_host(batch)
        kinds_BS, segments_BT = host[KINDS], host[SEGMENTS]
        of_chosen_BT = kinds_BS.gather(1, segments_BT.clamp(min=0)) == CHOSEN
        tokens = ((self._labels(host) != IGNORE_INDEX) & (segments_BT >= 0) & of_chosen_BT).sum()
        return torch.stack([self.count(batch).to(tokens), tokens]).double()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective. Every rank that shares the rows reports its share of the same sums."""
        terms, found = self._terms, self.segments(model, batch)
        is_pair_BP = found.kinds_BS[:, ::2] == CHOSEN
        logps_BS = found.logps_BS
        beyond_BS = logps_BS - self.reference(batch) if terms.has_reference else logps_BS
        scores_BS = beyond_BS / found.tokens_BS.clamp(min=1) if terms.by_token else beyond_BS
        # Where there is no pair, numbers that every loss takes.
        chosen, rejected = (torch.where(is_pair_BP, scores_BS[:, side::2], -1.0) for side in (0, 1))
        loss_BP = torch.where(is_pair_BP, terms.loss(chosen, rejected), 0.0)
        pairs = is_pair_BP.sum().double()
        loss_sum = loss_BP.sum()
        told_BS = beyond_BS if terms.has_reference else scores_BS
        rewards_BS = terms.loss.beta * told_BS.detach()
        extras = self._extras(is_pair_BP, rewards_BS, logps_BS.detach())
        if terms.sft_weight:
            sft_sum = -torch.where(is_pair_BP, logps_BS[:, ::2], 0.0).sum()
            tokens = torch.where(is_pair_BP, found.tokens_BS[:, ::2], 0.0).sum()
            extras |= {"sft losses": sft_sum.detach(), "sft tokens": tokens}
            if torch.is_grad_enabled():
                assert self._pairs_a_token is not None
                loss_sum = loss_sum + terms.sft_weight * self._pairs_a_token * sft_sum
        share = found.group.size
        extras = {key: value / share for key, value in (extras | {"pairs": pairs}).items()}
        return LossSum((loss_sum / share).float(), pairs / share, extras)

    @staticmethod
    def _extras(is_pair_BP: Tensor, rewards_BS: Tensor, logps_BS: Tensor) -> dict[str, Tensor]:
        def total(values_BP: Tensor) -> Tensor:
            return torch.where(is_pair_BP, values_BP, 0.0).sum()

        margin_BP = rewards_BS[:, ::2] - rewards_BS[:, 1::2]
        # At first there is none, but for rounding, which is every split's own.
        least_BP = ROUNDING * (logps_BS[:, ::2] + logps_BS[:, 1::2]).abs()
        by_side = {f"{side} rewards": total(rewards_BS[:, at::2]) for at, side in enumerate(SIDES)}
        by_side |= {f"{side} logps": total(logps_BS[:, at::2]) for at, side in enumerate(SIDES)}
        return by_side | {
            "reward margins": total(margin_BP),
            "preferred": total((margin_BP > least_BP).double()),
        }


def _odd(kinds_BS: Tensor) -> list[int]:
    """A row that shows what is wrong."""
    for row in kinds_BS.tolist():
        pairs = list(zip(row[::2], row[1::2], strict=False))
        if len(row) % 2 or any(pair not in ((CHOSEN, REJECTED), (0, 0)) for pair in pairs):
            return list(row[:12])
    return []
