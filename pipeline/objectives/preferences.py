"""Objectives on answers: pairs (DPO, ORPO, SimPO, CPO), answers without pairs (KTO), scores (reward models).

An answer is a segment of a row. A preference loss is one forward of rows: both answers of a pair are in one
row, separated by the document mask, so only sequence parallelism divides a pair over ranks. Its ranks add up
the sums of their answers and then compute the same loss, of which each reports a share. The gradient of that
sum is the incoming gradient times the number of ranks, without a collective. Log-probabilities are summed by
segment in fp64, so the order of the sum does not matter. A batch of preferences is checked on the host.

A pair is two neighbouring segments of a row, the chosen one first. KTO (Ethayarajh et al. 2024, equations 7
and 8) compares answers with a baseline: the divergence of the model from its reference on answers to other
prompts. The baseline is taken over the global batch, so it does not depend on how that is divided. The score
of an answer is the output of a reward model at its last token. Its loss is Bradley-Terry as in TRL 1.16, with
a margin (Touvron et al. 2023, equation 2) and scores centred at 0 (Eisenstein et al. 2023).

Shapes: B rows, T tokens, S the largest number of segments of a row, P = S / 2 places for pairs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.objective_schema import (
    CPOObjectiveConfig,
    DPOObjectiveConfig,
    ORPOObjectiveConfig,
    SimPOObjectiveConfig,
)
from pipeline.data.batches import IGNORE_INDEX, format_batch, get_host_batch
from pipeline.data.preference_layouts import CHOSEN, MISMATCHED, REJECTED
from pipeline.errors import ConfigError, DataError, ModelError
from pipeline.objectives.cross_entropies import VocabularyObjective, get_router
from pipeline.objectives.interface import (
    TARGET_KEYS,
    Batch,
    GlobalBatch,
    LossSum,
    Objective,
    TwoPassObjective,
)
from pipeline.objectives.logits_cross_entropy import FusedKernels
from pipeline.objectives.model_call import ModelCall, get_logits, unwrap_model

_GROUP_ATTRIBUTE = "sequence_group"


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share a row under sequence parallelism, with their collective."""

    size: int = 1
    all_reduce_sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Collective that sums a tensor over the group's ranks, in place."""

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the group's ranks. Collective.

        Each rank then reports a `size`-th of the loss. The gradient is the incoming one times `size`, without
        a collective.
        """
        if self.size == 1:
            return values
        total: Tensor = _Total.apply(values, self)
        return total


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        ctx.size = group.size
        return group.all_reduce_sum(values.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


UNDIVIDED_SEQUENCE = SequenceGroup()


def set_sequence_group(model: nn.Module, group: SequenceGroup) -> None:
    """Record that the model is given a part of each row, and the group that shares the row."""
    setattr(model, _GROUP_ATTRIBUTE, group)


def get_sequence_group(model: Any) -> SequenceGroup:
    """Return the sequence group of a model, wrapped or not; a group of one rank if rows are whole."""
    group: SequenceGroup = getattr(unwrap_model(model), _GROUP_ATTRIBUTE, UNDIVIDED_SEQUENCE)
    return group


# Entries of a batch of preferences.
SEGMENTS = "segments"
KINDS = "segment_kinds"
MARGINS = "margins"
REFERENCE = "reference_logps"
SEGMENT_KEYS = (SEGMENTS, KINDS, MARGINS, REFERENCE)


@dataclass(frozen=True)
class Segments:
    """The log-probabilities that a model gives to the segments of a micro-batch."""

    logps_BS: Tensor
    """Sum of the log-probabilities of a segment's labels, fp64; 0 for a segment without labels."""
    tokens_BS: Tensor
    """Number of labels of a segment, fp64."""
    kinds_BS: Tensor
    group: SequenceGroup
    """Ranks that compute the same numbers."""


class SegmentObjective(VocabularyObjective):
    """Base of the objectives on the log-probabilities of answers.

    Besides a language model's entries, a batch holds `segments` (B, T) int64, the number of each token's
    segment in its row, -1 in padding. It holds `segment_kinds` (B, S) int64, and `reference_logps` (B, S) if
    the loss has a reference. Labels outside of answers are -100.
    """

    unit: str
    has_reference = False
    """Whether the objective reads `reference_logps`."""
    targets: Sequence[str] = (*TARGET_KEYS, *SEGMENT_KEYS)

    def check_answers(self, answers: Mapping[int, int]) -> None:
        """Check that the objective can learn from the training data; this one accepts any answers.

        Args:
            answers: The number of answers of each kind; empty if it is not known.

        Raises:
            DataError: The objective cannot learn from them.
        """

    @abstractmethod
    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""

    @abstractmethod
    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""

    def segments(self, model: Callable[..., Any], batch: Batch) -> Segments:
        """Return the log-probabilities of the segments. Collective if rows are divided over ranks."""
        router = get_router(model)
        if router is not None and router.coefficient:
            raise ConfigError(
                f"model.extra.output_router_logits: the routers' loss is not part of objective {self.name}; "
                "set it to false"
            )
        losses_BT, _ = self.losses(model, batch, of_tokens=True)
        kinds_BS = batch[KINDS]
        segments_BT = batch[SEGMENTS]
        is_answer_BT = (self._get_labels(batch) != IGNORE_INDEX) & (segments_BT >= 0)
        row_B1 = torch.arange(len(kinds_BS), device=kinds_BS.device)[:, None] * kinds_BS.shape[1]
        index_N = (row_B1 + segments_BT.clamp(min=0)).flatten()
        # In fp64, neither the order of the sum nor the number of answers in a row changes the result.
        values_N2 = torch.stack([-losses_BT.double() * is_answer_BT, is_answer_BT.double()], -1).view(-1, 2)
        sums = values_N2.new_zeros(kinds_BS.numel(), 2).index_add(0, index_N, values_N2)
        group = get_sequence_group(model)
        logps_BS, tokens_BS = group.total(sums.view(*kinds_BS.shape, 2)).unbind(-1)
        return Segments(logps_BS, tokens_BS.detach(), kinds_BS, group)

    def kinds(self, batch: Batch) -> Tensor:
        """Return `segment_kinds` (B, S) of a batch, checked on the host.

        Raises:
            DataError: The batch has no entries of preferences, or they have other shapes.
        """
        host = get_host_batch(batch)
        if absent := [key for key in (SEGMENTS, KINDS) if not isinstance(host.get(key), Tensor)]:
            raise DataError(
                f"objective {self.name} reads {absent[0]!r}, but the batch has {format_batch(batch)}; use "
                "data with answers to compare (data.kind: preference)"
            )
        kinds_BS = host[KINDS]
        segments_BT = host[SEGMENTS]
        if segments_BT.dtype != torch.int64 or kinds_BS.dim() != 2 or len(segments_BT) != len(kinds_BS):
            raise DataError(
                f"objective {self.name} expects {SEGMENTS!r} (samples, tokens) int64 and {KINDS!r} (samples, "
                f"segments), but the batch has {format_batch(batch)}"
            )
        if segments_BT.device.type == "cpu" and (highest := int(segments_BT.max())) >= kinds_BS.shape[1]:
            raise DataError(
                f"{SEGMENTS!r} has {highest}, but {KINDS!r} is for {kinds_BS.shape[1]} segments a row: "
                f"expected -1 (none) to {kinds_BS.shape[1] - 1}"
            )
        kinds: Tensor = kinds_BS
        return kinds

    def reference(self, batch: Batch) -> Tensor:
        """Return `reference_logps` (B, S), fp64.

        Raises:
            DataError: The batch has none, or of another shape.
        """
        logps = batch.get(REFERENCE)
        if not isinstance(logps, Tensor) or logps.shape != batch[KINDS].shape:
            raise DataError(
                f"objective {self.name} reads {REFERENCE!r} (samples, segments), but the batch has "
                f"{format_batch(batch)}"
            )
        return logps.double()


class LogprobRecorder(SegmentObjective):
    """Records the log-probabilities of the last micro-batch, calling the model as another objective does.

    Args:
        other: The objective to call the model for.
    """

    unit = "samples"

    def __init__(self, other: SegmentObjective):
        super().__init__(other._call, other._kernels)
        self.name = other.name
        self.logps_BS: Tensor | None = None
        """Log-probabilities of the segments, on every rank but those of pipeline stages before the last."""

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        return (self.kinds(batch) > 0).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        self.logps_BS = self.segments(model, batch).logps_BS
        none = torch.zeros((), device=self.logps_BS.device)
        return LossSum(none, none)


@dataclass(frozen=True)
class PairLoss:
    """The loss of a pair of answers, with the recipe's numbers.

    Sources, as in TRL 1.16: DPO (Rafailov et al. 2023, equation 7), cDPO (Mitchell 2023) for `sigmoid`
    with smoothing, `robust` (Chowdhury et al. 2024, equation 10), `hinge` (SLiC, Zhao et al. 2023), `ipo`
    (Azar et al. 2023, equation 17, of means over tokens), `odds` (ORPO, Hong et al. 2024, equations 4 to 7,
    likewise). SimPO (Meng et al. 2024, equation 6) is `sigmoid` of means over tokens with a margin, CPO (Xu
    et al. 2024, equation 3) `sigmoid` without a reference.
    """

    link: str
    beta: float
    label_smoothing: float = 0.0
    gamma: float = 0.0
    """Margin that beta times the difference of scores has to exceed."""

    def __call__(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the loss of each pair (P,), whose sum is to be divided by the number of pairs.

        Args:
            chosen_P: Scores of chosen answers: sums of log-probabilities, or means over tokens, minus the
                reference's if there is one.
            rejected_P: Scores of rejected answers.
        """
        beta = self.beta
        smoothing = self.label_smoothing
        if self.link == "odds":
            odds_P = (chosen_P - rejected_P) - (log1mexp(chosen_P) - log1mexp(rejected_P))
            return -beta * F.logsigmoid(odds_P)
        if self.link == "ipo":
            return (chosen_P - rejected_P - 1 / (2 * beta)) ** 2
        logits_P = beta * (chosen_P - rejected_P) - self.gamma
        if self.link == "hinge":
            return torch.relu(1 - logits_P)
        right_P = -F.logsigmoid(logits_P)
        wrong_P = -F.logsigmoid(-logits_P)
        if self.link == "robust":
            return ((1 - smoothing) * right_P - smoothing * wrong_P) / (1 - 2 * smoothing)
        return (1 - smoothing) * right_P + smoothing * wrong_P


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0 without cancellation (Mächler 2012, equation 7)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near_zero = x > -math.log(2)
    near = torch.where(is_near_zero, x, -1.0)
    far = torch.where(is_near_zero, -1.0, x)
    return torch.where(is_near_zero, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))


SIDES = ("chosen", "rejected")
ROUNDING = 1e-6  # of log-probabilities in fp32, relative


@dataclass(frozen=True)
class PairTerms:
    """The terms of an objective on pairs."""

    name: str
    loss: PairLoss
    has_reference: bool = False
    by_token: bool = False
    """Whether scores are means over an answer's tokens instead of sums."""
    sft_weight: float = 0.0
    """Weight of the cross entropy of the chosen answers, a mean over their tokens."""


def build_pair_terms(
    section: DPOObjectiveConfig | ORPOObjectiveConfig | SimPOObjectiveConfig | CPOObjectiveConfig,
) -> PairTerms:
    """Return the terms of an objective on pairs."""
    if section.kind == "orpo":
        return PairTerms("orpo", PairLoss("odds", section.beta), by_token=True, sft_weight=1.0)
    if section.kind == "simpo":
        loss = PairLoss("sigmoid", section.beta, section.label_smoothing, section.gamma)
        return PairTerms("simpo", loss, by_token=True, sft_weight=section.sft_weight)
    by_token = section.loss_type == "ipo" or (section.kind == "dpo" and section.length_normalised)
    return PairTerms(
        section.kind,
        PairLoss(section.loss_type, section.beta, section.label_smoothing),
        has_reference=section.kind == "dpo",
        by_token=by_token,
        sft_weight=section.sft_weight,
    )


class PairObjective(SegmentObjective):
    """Base of the objectives on pairs."""

    unit = "pairs"

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count.

        Raises:
            DataError: The segments are not pairs, or see SegmentObjective.kinds.
        """
        kinds_BS = self.kinds(batch)
        wrong_BS = kinds_BS
        if kinds_BS.shape[1] % 2 == 0:
            chosen_BP, rejected_BP = kinds_BS.unflatten(1, (-1, 2)).unbind(-1)
            are_pairs = ((chosen_BP == CHOSEN) & (rejected_BP == REJECTED)) | (chosen_BP + rejected_BP == 0)
            if kinds_BS.device.type != "cpu" or bool(are_pairs.all()):
                return (chosen_BP == CHOSEN).sum()
            wrong_BS = kinds_BS[~are_pairs.all(1)]
        raise DataError(
            f"objective {self.name} compares pairs, but {KINDS!r} of a row are {wrong_BS[0, :12].tolist()}: "
            f"expected pairs of {CHOSEN} (chosen) and {REJECTED} (rejected), then 0 (none)"
        )


class PairwisePreference(PairObjective):
    """The loss of pairs, divided by the number of pairs of the global batch.

    A term on the chosen answers, if there is one, is divided by the number of their tokens. Both terms share
    one count: `prepare_step` sums both counts over the global batch, and the second term is multiplied by
    their ratio.

    `rewards/...` are beta times a log-probability: with a reference, the sum over tokens minus the
    reference's; without one, the score that the loss compares.
    """

    def __init__(self, terms: PairTerms, call: ModelCall | None = None, kernels: FusedKernels | None = None):
        super().__init__(call, kernels)
        self._terms = terms
        self.name = terms.name
        self.has_reference = terms.has_reference
        self.means: Mapping[str, tuple[str, str]] = {
            **{f"rewards/{side}": (f"{side} rewards", "pairs") for side in SIDES},
            "rewards/margin": ("reward margins", "pairs"),
            "rewards/accuracy": ("preferred", "pairs"),
            **{f"logps/{side}": (f"{side} logps", "pairs") for side in SIDES},
        }
        if terms.sft_weight:
            self.means |= {"sft_loss": ("sft losses", "sft tokens")}
            self.weighted = {"sft_loss": terms.sft_weight}
        self._pairs_per_token: Tensor | None = None  # of the global batch

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Compute the ratio of pairs to tokens of chosen answers, if a term on these is asked for."""
        if not self._terms.sft_weight:
            return
        counts = torch.stack([self._count_pairs_and_tokens(each) for each in batch.micro_batches]).sum(0)
        pairs, tokens = batch.all_reduce_sum(counts.to(batch.device, non_blocking=True))
        self._pairs_per_token = pairs / tokens.clamp(min=1)

    def _count_pairs_and_tokens(self, batch: Batch) -> Tensor:
        """Return the numbers of pairs and of chosen tokens (2,), fp64, on the host if the batch is there."""
        host = get_host_batch(batch)
        kinds_BS = host[KINDS]
        segments_BT = host[SEGMENTS]
        is_chosen_BT = kinds_BS.gather(1, segments_BT.clamp(min=0)) == CHOSEN
        tokens = ((self._get_labels(host) != IGNORE_INDEX) & (segments_BT >= 0) & is_chosen_BT).sum()
        return torch.stack([self.count(batch).to(tokens), tokens]).double()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective. Every rank that shares the rows reports its share of the same sums."""
        terms = self._terms
        segments = self.segments(model, batch)
        is_pair_BP = segments.kinds_BS[:, ::2] == CHOSEN
        logps_BS = segments.logps_BS
        relative_logps_BS = logps_BS - self.reference(batch) if terms.has_reference else logps_BS
        scores_BS = (
            relative_logps_BS / segments.tokens_BS.clamp(min=1) if terms.by_token else relative_logps_BS
        )
        # Places without a pair get -1, a score that every loss is finite for.
        chosen, rejected = (torch.where(is_pair_BP, scores_BS[:, side::2], -1.0) for side in (0, 1))
        loss_BP = torch.where(is_pair_BP, terms.loss(chosen, rejected), 0.0)
        pairs = is_pair_BP.sum().double()
        loss_sum = loss_BP.sum()
        rewarded_BS = relative_logps_BS if terms.has_reference else scores_BS
        rewards_BS = terms.loss.beta * rewarded_BS.detach()
        extras = self._build_extras(is_pair_BP, rewards_BS, logps_BS.detach())
        if terms.sft_weight:
            sft_sum = -torch.where(is_pair_BP, logps_BS[:, ::2], 0.0).sum()
            tokens = torch.where(is_pair_BP, segments.tokens_BS[:, ::2], 0.0).sum()
            extras |= {"sft losses": sft_sum.detach(), "sft tokens": tokens}
            if torch.is_grad_enabled():
                assert self._pairs_per_token is not None
                loss_sum = loss_sum + terms.sft_weight * self._pairs_per_token * sft_sum
        share = segments.group.size
        extras = {key: value / share for key, value in (extras | {"pairs": pairs}).items()}
        return LossSum((loss_sum / share).float(), pairs / share, extras)

    @staticmethod
    def _build_extras(is_pair_BP: Tensor, rewards_BS: Tensor, logps_BS: Tensor) -> dict[str, Tensor]:
        def total(values_BP: Tensor) -> Tensor:
            return torch.where(is_pair_BP, values_BP, 0.0).sum()

        margin_BP = rewards_BS[:, ::2] - rewards_BS[:, 1::2]
        # Before training there is no margin but for rounding, which differs from split to split.
        least_BP = ROUNDING * (logps_BS[:, ::2] + logps_BS[:, 1::2]).abs()
        by_side = {f"{side} rewards": total(rewards_BS[:, at::2]) for at, side in enumerate(SIDES)}
        by_side |= {f"{side} logps": total(logps_BS[:, at::2]) for at, side in enumerate(SIDES)}
        return by_side | {
            "reward margins": total(margin_BP),
            "preferred": total((margin_BP > least_BP).double()),
        }


class MismatchedDivergence(SegmentObjective):
    """The mean over mismatched answers of the log-probability minus the reference's, for KTO's baseline.

    A mismatched answer follows the prompt of another example.
    """

    name = "kto"
    unit = "examples"

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        return (self.kinds(batch) == MISMATCHED).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        divergence, num_mismatched = self.divergence(batch, self.segments(model, batch))
        return LossSum(divergence, num_mismatched)

    def divergence(self, batch: Batch, segments: Segments) -> Tensor:
        """Return the sum of the differences and their number (2,), fp64, of this rank's share."""
        is_mismatched_BS = segments.kinds_BS == MISMATCHED
        relative_logps_BS = segments.logps_BS.detach() - self.reference(batch)
        sums = torch.stack(
            [torch.where(is_mismatched_BS, relative_logps_BS, 0.0).sum(), is_mismatched_BS.sum().double()]
        )
        return sums / segments.group.size


class KTO(SegmentObjective, TwoPassObjective):
    """The KTO loss, divided by the number of examples of the global batch.

    The loss of an answer is 1 - sigmoid(beta * d), times the weight of its kind. For a desirable answer, d is
    its reward minus the baseline; for an undesirable one, the baseline minus its reward.

    The baseline must be known before the first backward. A training step of several micro-batches therefore
    takes one more forward of each, with the same random numbers. An evaluation reads its data twice.
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
        self._get_global_sums: Callable[[Tensor], Tensor] = lambda sums: sums
        self._held_out = 0.0
        self._mismatched = MismatchedDivergence(call, kernels)

    @property
    def first_pass(self) -> Objective:
        """See TwoPassObjective."""
        return self._mismatched

    def set_first_pass_mean(self, mean: float) -> None:
        """See TwoPassObjective."""
        self._held_out = mean

    def check_answers(self, answers: Mapping[int, int]) -> None:
        """Check that there are answers of both kinds to train on, or a weight of 0 for the missing one.

        Raises:
            DataError: All answers are of one kind.
        """
        for kind, name, label in (CHOSEN, "desirable", "true"), (REJECTED, "undesirable", "false"):
            if answers and not answers.get(kind) and self._weights[kind]:
                raise DataError(
                    "objective kto compares two kinds of answers, but the training data has "
                    f"{answers.get(CHOSEN, 0)} desirable and {answers.get(REJECTED, 0)} undesirable ones; "
                    f"add rows with the label {label}, or write objective.{name}_weight: 0 to train without"
                )

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count.

        Raises:
            DataError: There is no mismatched answer, or see SegmentObjective.kinds.
        """
        kinds_BS = self.kinds(batch)
        if kinds_BS.device.type == "cpu" and not bool((kinds_BS == MISMATCHED).any()):
            raise DataError(
                f"objective kto compares answers with mismatched ones ({KINDS!r} {MISMATCHED}), but a "
                "micro-batch has none; use data of examples, which has them (data.kind: preference)"
            )
        return ((kinds_BS == CHOSEN) | (kinds_BS == REJECTED)).sum()

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Compute the baseline of the global batch; a single micro-batch does so in its own forward."""
        self._get_global_sums = batch.all_reduce_sum
        if len(batch.micro_batches) == 1:
            return
        device = batch.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for micro_batch in map(batch.to_device, batch.micro_batches):
                total += self._mismatched.divergence(micro_batch, self.segments(batch.model, micro_batch))
        total_over_ranks = batch.all_reduce_sum(total)
        self._get_global_sums = lambda _: total_over_ranks

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective. Every rank that shares the rows reports its share of the same sums."""
        segments = self.segments(model, batch)
        relative_logps_BS = segments.logps_BS - self.reference(batch)
        if torch.is_grad_enabled():
            divergence, num_mismatched = self._get_global_sums(self._mismatched.divergence(batch, segments))
            baseline = (divergence / num_mismatched.clamp(min=1e-9)).clamp(min=0)
        else:
            baseline = relative_logps_BS.new_tensor(max(0.0, self._held_out))
        logits_BS = self._beta * (relative_logps_BS - baseline)
        share = segments.group.size
        loss_sum = 0.0 * logits_BS.sum()
        count = torch.zeros_like(baseline)
        extras = {}
        for kind, side, sign in ((CHOSEN, "chosen", 1), (REJECTED, "rejected", -1)):
            is_kind_BS = segments.kinds_BS == kind
            number = is_kind_BS.sum().double()
            loss_BS = 1 - torch.sigmoid(sign * logits_BS)
            loss_sum = loss_sum + self._weights[kind] * torch.where(is_kind_BS, loss_BS, 0.0).sum()
            count = count + number
            extras[f"{side} rewards"] = (
                self._beta * torch.where(is_kind_BS, relative_logps_BS.detach(), 0.0).sum()
            )
            extras[f"{side} logps"] = torch.where(is_kind_BS, segments.logps_BS.detach(), 0.0).sum()
            extras["desirable" if kind == CHOSEN else "undesirable"] = number
        extras |= {"baselines": baseline * count, "examples": count}
        extras = {key: value / share for key, value in extras.items()}
        return LossSum((loss_sum / share).float(), count / share, extras)


POSITIONS = "position_ids"


class RewardRanking(PairObjective):
    """The loss of a reward model, divided by the number of pairs of the global batch.

    The loss of a pair is -log sigmoid(chosen score - rejected score - margin).

    Args:
        margin_weight: The factor on a pair's margin.
        center_weight: The weight of the squared sum of both scores, which is added to the loss.
        call: The call of the model.
    """

    name = "reward"
    means: Mapping[str, tuple[str, str]] = {
        **{f"rewards/{side}": (f"{side} rewards", "pairs") for side in SIDES},
        "rewards/margin": ("reward margins", "pairs"),
        "rewards/accuracy": ("preferred", "pairs"),
    }

    def __init__(self, margin_weight: float = 1.0, center_weight: float = 0.0, call: ModelCall | None = None):
        super().__init__(call)
        self._margin_weight = margin_weight
        self._center_weight = center_weight

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective. Every rank that shares the rows reports its share of the same sums."""
        is_pair_BP = batch[KINDS][:, ::2] == CHOSEN
        chosen_BP, rejected_BP = self._compute_scores(model, batch).unflatten(1, (-1, 2)).unbind(-1)
        difference_BP = chosen_BP - rejected_BP
        adjusted_BP = difference_BP
        if self._margin_weight and MARGINS in batch:
            adjusted_BP = difference_BP - self._margin_weight * batch[MARGINS][:, ::2]
        loss_BP = -F.logsigmoid(adjusted_BP)
        if self._center_weight:
            loss_BP = loss_BP + self._center_weight * (chosen_BP + rejected_BP) ** 2
        share = get_sequence_group(model).size

        def total(values_BP: Tensor) -> Tensor:
            return torch.where(is_pair_BP, values_BP, 0.0).sum() / share

        metrics = {
            "chosen rewards": chosen_BP,
            "rejected rewards": rejected_BP,
            "reward margins": difference_BP,
            "preferred": (difference_BP > 0).double(),
        }
        pairs = is_pair_BP.sum().double() / share
        extras = {name: total(values.detach()) for name, values in metrics.items()}
        return LossSum(total(loss_BP).float(), pairs, extras | {"pairs": pairs})

    def _compute_scores(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the score (B, S), fp64, of each segment's last token; 0 for places without a segment.

        Collective if rows are divided over ranks.
        """
        kinds_BS = batch[KINDS]
        segments_BT = batch[SEGMENTS]
        if POSITIONS not in batch:
            raise DataError(
                f"objective {self.name} reads {POSITIONS!r}, which the batch lacks; add positions that count "
                "from 0 in each segment"
            )
        scores_BT = get_logits(self._call(model, batch)).squeeze(-1)
        if scores_BT.shape != segments_BT.shape:
            raise ModelError(
                f"objective {self.name} expects a score for each token, (samples, tokens) or (samples, "
                f"tokens, 1), but the model returned {tuple(scores_BT.shape)} for "
                f"{tuple(segments_BT.shape)} tokens"
            )
        group = get_sequence_group(model)
        is_there_BT = segments_BT >= 0
        row_B1 = torch.arange(len(kinds_BS), device=kinds_BS.device)[:, None] * kinds_BS.shape[1]
        index_BT = row_B1 + segments_BT.clamp(min=0)

        def by_segment(values_BT: Tensor) -> Tensor:
            sums = torch.zeros(kinds_BS.numel(), dtype=torch.float64, device=kinds_BS.device)
            sums = sums.index_add(0, index_BT.flatten(), values_BT.double().flatten())
            return group.total(sums.view(kinds_BS.shape))

        lengths_BS = by_segment(is_there_BT)
        is_last_BT = is_there_BT & (batch[POSITIONS] == lengths_BS.flatten()[index_BT] - 1)
        return by_segment(torch.where(is_last_BT, scores_BT.double(), 0.0))
