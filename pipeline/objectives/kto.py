"""KTO: answers that are desirable or not, without pairs (Ethayarajh et al. 2024, equations 7 and 8).

What they are held against is how far the model is from its reference on answers to other prompts, over the
global batch, so that it does not depend on how that is divided. Shapes: B rows, S segments of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.data.preference_layouts import CHOSEN, MISMATCHED, REJECTED
from pipeline.errors import DataError
from pipeline.objectives.given_logits import FusedKernels
from pipeline.objectives.interface import Batch, GlobalBatch, LossSum
from pipeline.objectives.model_call import ModelCall
from pipeline.objectives.segments import KINDS, BySegment, Segments


class Mismatched(BySegment):
    """By how much more likely than to the reference answers are to the model behind prompts of others: the
    sum over these segments, divided by their number.
    """

    name = "kto"
    unit = "examples"

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        return (self.kinds(batch) == MISMATCHED).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        divergence, segments = self.divergence(batch, self.segments(model, batch))
        return LossSum(divergence, segments)

    def divergence(self, batch: Batch, found: Segments) -> Tensor:
        """(2,), fp64: that sum and that number, of this rank's share."""
        of_others_BS = found.kinds_BS == MISMATCHED
        beyond_BS = found.logps_BS.detach() - self.reference(batch)
        sums = torch.stack([torch.where(of_others_BS, beyond_BS, 0.0).sum(), of_others_BS.sum().double()])
        return sums / found.group.size


class KTO(BySegment):
    """1 - sigmoid of beta times an answer's reward over the baseline (desirable), or of the baseline over it,
    weighted; divided by the examples of the global batch.

    A training step of several micro-batches takes one more forward of each, with the same random numbers: the
    baseline must be known before the first backward. An evaluation goes through its data twice.
    """

    name = "kto"
    unit = "examples"
    has_reference = True
    means: Mapping[str, tuple[str, str]] = {
        "rewards/chosen": ("chosen rewards", "desirable"),
        "rewards/rejected": ("rejected rewards", "undesirable"),
        "logps/chosen": ("chosen logps", "desirable"),
        "logps/rejected": ("rejected logps", "undesirable"),
        "kl": ("baselines", "examples"),
    }

    def __init__(
        self,
        beta: float,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        call: ModelCall | None = None,
        kernels: FusedKernels | None = None,
    ):
        super().__init__(call, kernels)
        self._beta = beta
        self._weights = {CHOSEN: desirable_weight, REJECTED: undesirable_weight}
        self._of_global_batch: Callable[[Tensor], Tensor] = lambda sums: sums
        self._held_out = 0.0
        self._mismatched = Mismatched(call, kernels)
        self.ahead = self._mismatched

    def hear(self, mean: float) -> None:
        """See Objective.ahead."""
        self._held_out = mean

    def check_answers(self, answers: Mapping[int, int]) -> None:
        """Check that there are answers of both kinds to train on, or a weight of 0 for the missing one.

        Args:
            answers: Their number by kind; empty: not known.

        Raises:
            DataError: all answers are of one kind.
        """
        for kind, name, label in (CHOSEN, "desirable", "true"), (REJECTED, "undesirable", "false"):
            if answers and not answers.get(kind) and self._weights[kind]:
                raise DataError(
                    "objective kto compares two kinds of answers, and the training data have "
                    f"{answers.get(CHOSEN, 0)} desirable and {answers.get(REJECTED, 0)} undesirable ones: "
                    f"add rows with the label {label}, or write objective.{name}_weight: 0 to train without"
                )

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count.

        Raises:
            DataError: see BySegment.kinds; or there is no mismatched answer.
        """
        kinds_BS = self.kinds(batch)
        if kinds_BS.device.type == "cpu" and not bool((kinds_BS == MISMATCHED).any()):
            raise DataError(
                f"objective kto holds answers against mismatched ones ({KINDS!r} {MISMATCHED}), of which a "
                "micro-batch has none; data of examples has them (data.kind: preference)"
            )
        return ((kinds_BS == CHOSEN) | (kinds_BS == REJECTED)).sum()

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective.prepare_step: the baseline; of a lone micro-batch its own forward tells."""
        self._of_global_batch = batch.all_reduce_sum
        if len(batch.micro_batches) == 1:
            return
        device = batch.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for micro_batch in map(batch.to_device, batch.micro_batches):
                total += self._mismatched.divergence(micro_batch, self.segments(batch.model, micro_batch))
        everyones = batch.all_reduce_sum(total)
        self._of_global_batch = lambda _: everyones

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective. Every rank that shares the rows reports its share of the same sums."""
        found = self.segments(model, batch)
        beyond_BS = found.logps_BS - self.reference(batch)
        if torch.is_grad_enabled():
            divergence, segments = self._of_global_batch(self._mismatched.divergence(batch, found))
            baseline = (divergence / segments.clamp(min=1e-9)).clamp(min=0)
        else:
            baseline = beyond_BS.new_tensor(max(0.0, self._held_out))
        over_BS = self._beta * (beyond_BS - baseline)
        share = found.group.size
        loss_sum, count = 0.0 * over_BS.sum(), torch.zeros_like(baseline)
        extras = {}
        for kind, side, sign in ((CHOSEN, "chosen", 1), (REJECTED, "rejected", -1)):
            is_BS = found.kinds_BS == kind
            number = is_BS.sum().double()
            loss_BS = 1 - torch.sigmoid(sign * over_BS)
            loss_sum = loss_sum + self._weights[kind] * torch.where(is_BS, loss_BS, 0.0).sum()
            count = count + number
            extras[f"{side} rewards"] = self._beta * torch.where(is_BS, beyond_BS.detach(), 0.0).sum()
            extras[f"{side} logps"] = torch.where(is_BS, found.logps_BS.detach(), 0.0).sum()
            extras["desirable" if kind == CHOSEN else "undesirable"] = number
        extras |= {"baselines": baseline * count, "examples": count}
        extras = {key: value / share for key, value in extras.items()}
        return LossSum((loss_sum / share).float(), count / share, extras)
