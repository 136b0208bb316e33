"""Objectives on answers: pairs (DPO, ORPO, SimPO, CPO), answers without pairs (KTO), scores (reward models).

An answer is a segment of a row. A batch of preferences is checked on the host, and log-probabilities are
summed by segment, over the ranks that share a row where a sequence is cut.

A pair is two segments of a row next to each other, the chosen one first. KTO (Ethayarajh et al. 2024,
equations 7 and 8) holds answers against how far the model is from its reference on answers to other prompts,
over the global batch, so that it does not depend on how that is divided. The score of an answer is what a
reward model gives at its last token: Bradley-Terry, as TRL 1.16 has it, with a margin (Touvron et al. 2023,
equation 2) and scores centred at 0 (Eisenstein et al. 2023).

Shapes: B rows, T tokens, S segments of a row at the most, P = S / 2 places for pairs.
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
    """How many ranks share a row, and how they are heard."""

    size: int = 1
    all_reduce_sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """In place. Collective."""

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the group's ranks, of which each reports its share, a `size`-th. Collective.

        Its gradient is that of all ranks, without a collective.
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
    """Record that the model is given a part of each row."""
    setattr(model, _GROUP_ATTRIBUTE, group)


def get_sequence_group(model: Any) -> SequenceGroup:
    """Return the group of a model, wrapped or not; one of a single rank if rows are whole."""
    group: SequenceGroup = getattr(unwrap_model(model), _GROUP_ATTRIBUTE, UNDIVIDED_SEQUENCE)
    return group


SEGMENTS, KINDS, MARGINS, REFERENCE = "segments", "segment_kinds", "margins", "reference_logps"
SEGMENT_KEYS = (SEGMENTS, KINDS, MARGINS, REFERENCE)


@dataclass(frozen=True)
class Segments:
    """What a model says of the segments of a micro-batch."""

    logps_BS: Tensor
    """Log-probabilities of their labels summed, fp64; 0 where there are none."""
    tokens_BS: Tensor
    """How many labels, fp64."""
    kinds_BS: Tensor
    group: SequenceGroup
    """Ranks that compute the same of them."""


class SegmentObjective(VocabularyObjective):
    """What objectives on the log-probabilities of answers have in common.

    A batch holds, besides a language model's entries, `segments` (B, T) int64: which of its row's segments a
    token belongs to, -1 in padding; `segment_kinds` (B, S) int64; and `reference_logps` (B, S) where the loss
    has a reference. Labels are -100 but for the answers'.
    """

    unit: str
    has_reference = False
    """Whether it reads `reference_logps`."""
    targets: Sequence[str] = (*TARGET_KEYS, *SEGMENT_KEYS)

    def check_answers(self, answers: Mapping[int, int]) -> None:
        """Check that the objective can learn from the training data: any answers will do.

        Args:
            answers: Their number by kind; empty: not known.

        Raises:
            DataError: It cannot.
        """

    @abstractmethod
    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""

    @abstractmethod
    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""

    def segments(self, model: Callable[..., Any], batch: Batch) -> Segments:
        """Return what the model says of the segments. Collective if rows are cut."""
        router = get_router(model)
        if router is not None and router.coefficient:
            raise ConfigError(
                f"model.extra.output_router_logits: the routers' auxiliary loss is not part of objective "
                f"{self.name}; set it to false"
            )
        losses_BT, _ = self.losses(model, batch, of_tokens=True)
        kinds_BS, segments_BT = batch[KINDS], batch[SEGMENTS]
        in_one = (self._labels(batch) != IGNORE_INDEX) & (segments_BT >= 0)
        row_B1 = torch.arange(len(kinds_BS), device=kinds_BS.device)[:, None] * kinds_BS.shape[1]
        index_N = (row_B1 + segments_BT.clamp(min=0)).flatten()
        # In fp64 neither the order of the sum nor how many answers share a row shows.
        found_N2 = torch.stack([-losses_BT.double() * in_one, in_one.double()], -1).view(-1, 2)
        sums = found_N2.new_zeros(kinds_BS.numel(), 2).index_add(0, index_N, found_N2)
        group = get_sequence_group(model)
        logps_BS, tokens_BS = group.total(sums.view(*kinds_BS.shape, 2)).unbind(-1)
        return Segments(logps_BS, tokens_BS.detach(), kinds_BS, group)

    def kinds(self, batch: Batch) -> Tensor:
        """Return `segment_kinds` (B, S) of a batch, checked on the host.

        Raises:
            DataError: it is no batch of preferences.
        """
        host = get_host_batch(batch)
        if absent := [key for key in (SEGMENTS, KINDS) if not isinstance(host.get(key), Tensor)]:
            raise DataError(
                f"objective {self.name} reads {absent[0]!r}, and the batch has {format_batch(batch)}; "
                "data with answers to compare has it (data.kind: preference)"
            )
        kinds_BS, segments_BT = host[KINDS], host[SEGMENTS]
        if segments_BT.dtype != torch.int64 or kinds_BS.dim() != 2 or len(segments_BT) != len(kinds_BS):
            raise DataError(
                f"objective {self.name} wants {SEGMENTS!r} (samples, tokens) int64 and {KINDS!r} (samples, "
                f"segments), and the batch has {format_batch(batch)}"
            )
        if segments_BT.device.type == "cpu" and (highest := int(segments_BT.max())) >= kinds_BS.shape[1]:
            raise DataError(
                f"{SEGMENTS!r} has {highest}, and {KINDS!r} is for {kinds_BS.shape[1]} segments a row: "
                f"expected -1 (none) to {kinds_BS.shape[1] - 1}"
            )
        kinds: Tensor = kinds_BS
        return kinds

    def reference(self, batch: Batch) -> Tensor:
        """Return `reference_logps` (B, S), fp64.

        Raises:
            DataError: the batch has none.
        """
        found = batch.get(REFERENCE)
        if not isinstance(found, Tensor) or found.shape != batch[KINDS].shape:
            raise DataError(
                f"objective {self.name} reads {REFERENCE!r} (samples, segments), and the batch has "
                f"{format_batch(batch)}"
            )
        return found.double()


class LogprobRecorder(SegmentObjective):
    """Of the last micro-batch; calls the model as another objective does."""

    unit = "samples"

    def __init__(self, other: SegmentObjective):
        super().__init__(other._call, other._kernels)
        self.name = other.name
        self.logps_BS: Tensor | None = None
        """On every rank that was given the rows, but for pipeline stages before the last."""

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
    """Which loss of a pair: numbers of the recipe.

    Sources, as TRL 1.16 has them: DPO (Rafailov et al. 2023, equation 7), cDPO (Mitchell 2023) for `sigmoid`
    with smoothing, `robust` (Chowdhury et al. 2024, equation 10), `hinge` (SLiC, Zhao et al. 2023), `ipo`
    (Azar et al. 2023, equation 17, of means over tokens), `odds` (ORPO, Hong et al. 2024, equations 4 to 7,
    likewise). SimPO (Meng et al. 2024, equation 6) is `sigmoid` of means over tokens with a margin, CPO (Xu
    et al. 2024, equation 3) `sigmoid` without a reference.
    """

    link: str
    beta: float
    label_smoothing: float = 0.0
    gamma: float = 0.0
    """What beta times the difference has to exceed."""

    def __call__(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return (P,), to be divided by the number of pairs.

        Args:
            chosen_P, rejected_P: Scores: log-probabilities, their sums or means over tokens, less a
            reference's.
        """
        beta, smoothing = self.beta, self.label_smoothing
        if self.link == "odds":
            odds_P = (chosen_P - rejected_P) - (log1mexp(chosen_P) - log1mexp(rejected_P))
            return -beta * F.logsigmoid(odds_P)
        if self.link == "ipo":
            return (chosen_P - rejected_P - 1 / (2 * beta)) ** 2
        logits_P = beta * (chosen_P - rejected_P) - self.gamma
        if self.link == "hinge":
            return torch.relu(1 - logits_P)
        right_P, wrong_P = -F.logsigmoid(logits_P), -F.logsigmoid(-logits_P)
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
    """What is minimised of a pair."""

    name: str
    loss: PairLoss
    has_reference: bool = False
    by_token: bool = False
    """Scores are means over an answer's tokens, else sums."""
    sft_weight: float = 0.0
    """Of the cross entropy of the chosen answers, a mean over their tokens."""


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
    """What objectives on pairs have in common."""

    unit = "pairs"

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count.

        Raises:
            DataError: see SegmentObjective.kinds; or segments are no pairs.
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
            f"objective {self.name} compares pairs, and {KINDS!r} of a row are {wrong_BS[0, :12].tolist()}: "
            f"expected {CHOSEN} (chosen), {REJECTED} (rejected), again and again, then 0"
        )


class PairwisePreference(PairObjective):
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
        """Return (2,), fp64, on the host if the batch is known there."""
        host = get_host_batch(batch)
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


class MismatchedDivergence(SegmentObjective):
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
        """Return (2,), fp64: that sum and that number, of this rank's share."""
        of_others_BS = found.kinds_BS == MISMATCHED
        beyond_BS = found.logps_BS.detach() - self.reference(batch)
        sums = torch.stack([torch.where(of_others_BS, beyond_BS, 0.0).sum(), of_others_BS.sum().double()])
        return sums / found.group.size


class KTO(SegmentObjective, TwoPassObjective):
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
                    "objective kto compares two kinds of answers, and the training data have "
                    f"{answers.get(CHOSEN, 0)} desirable and {answers.get(REJECTED, 0)} undesirable ones: "
                    f"add rows with the label {label}, or write objective.{name}_weight: 0 to train without"
                )

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count.

        Raises:
            DataError: see SegmentObjective.kinds; or there is no mismatched answer.
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


POSITIONS = "position_ids"


class RewardRanking(PairObjective):
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
        share = get_sequence_group(model).size

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
        """Return (B, S), fp64: the score of each segment's last token, else 0. Collective if rows are cut."""
        kinds_BS, segments_BT = batch[KINDS], batch[SEGMENTS]
        if POSITIONS not in batch:
            raise DataError(f"objective {self.name} reads {POSITIONS!r}, which count from 0 in each segment")
        scores_BT = get_logits(self._call(model, batch)).squeeze(-1)
        if scores_BT.shape != segments_BT.shape:
            raise ModelError(
                f"objective {self.name} wants a score for each token, (samples, tokens) or (samples, tokens, "
                f"1), and the model returned {tuple(scores_BT.shape)} for {tuple(segments_BT.shape)} tokens"
            )
        group, there_BT = get_sequence_group(model), segments_BT >= 0
        row_B1 = torch.arange(len(kinds_BS), device=kinds_BS.device)[:, None] * kinds_BS.shape[1]
        index_BT = row_B1 + segments_BT.clamp(min=0)

        def by_segment(values_BT: Tensor) -> Tensor:
            sums = torch.zeros(kinds_BS.numel(), dtype=torch.float64, device=kinds_BS.device)
            sums = sums.index_add(0, index_BT.flatten(), values_BT.double().flatten())
            return group.total(sums.view(kinds_BS.shape))

        lengths_BS = by_segment(there_BT)
        is_last_BT = there_BT & (batch[POSITIONS] == lengths_BS.flatten()[index_BT] - 1)
        return by_segment(torch.where(is_last_BT, scores_BT.double(), 0.0))
