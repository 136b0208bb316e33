"""Objectives on answers: pairs (DPO, ORPO, SimPO, CPO), answers without pairs (KTO), scores (reward models).

A segment of a row is a prompt with one answer to it; only the tokens of the answer have labels. A loss takes
one forward of a micro-batch; KTO may take a second one without gradients. Both answers of a pair are in one
row, separated by the document mask. Only sequence parallelism divides a pair over ranks: these ranks
all-reduce the sums of each segment, compute the same loss, and each reports 1 / ranks of it.
Log-probabilities are summed by segment in fp64, so the order of the sum does not matter. A batch of
preferences is checked on the host.

A pair is two neighbouring segments of a row, the chosen one first. KTO (Ethayarajh et al. 2024, equations 7
and 8) compares answers with a baseline: the divergence of the model from its reference on answers to other
prompts. The baseline is a mean over the global batch, so it does not depend on the split. A reward model's
score of an answer is its output at the last token of the segment. Its loss is Bradley-Terry as in TRL 1.16,
with a margin (Touvron et al. 2023, equation 2) and scores centred at 0 (Eisenstein et al. 2023).

Shapes: B rows, T tokens, S places for segments in a row, P = S / 2 places for pairs. A row with fewer
segments has unused places, of kind 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
from pipeline.objectives.cross_entropies import VocabularyObjective, get_router_settings
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
    """Number of ranks."""
    all_reduce_sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Collective that sums a tensor over the group's ranks in place, and returns it."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum over the group's ranks, differentiable. Collective in forward only.

        All ranks must compute the same loss from the sum, and each must report a `size`-th of that loss. The
        incoming gradients are then equal on all ranks, and `size` times one of them is their sum.
        """
        if self.size == 1:
            return values
        total: Tensor = _SumOverSequenceGroup.apply(values, self)
        return total


class _SumOverSequenceGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        ctx.size = group.size
        return group.all_reduce_sum(values.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


UNDIVIDED_SEQUENCE = SequenceGroup()
"""Group of a model whose rows are not divided over ranks."""


def set_sequence_group(model: nn.Module, group: SequenceGroup) -> None:
    """Record on the model the group of ranks that have parts of the same rows."""
    setattr(model, _GROUP_ATTRIBUTE, group)


def get_sequence_group(model: Any) -> SequenceGroup:
    """Return the sequence group of a model, wrapped or not; a group of one rank if rows are undivided."""
    group: SequenceGroup = getattr(unwrap_model(model), _GROUP_ATTRIBUTE, UNDIVIDED_SEQUENCE)
    return group


# Keys of a batch of preferences; see SegmentObjective.
SEGMENTS = "segments"
KINDS = "segment_kinds"
MARGINS = "margins"
REFERENCE = "reference_logps"
SEGMENT_KEYS = (SEGMENTS, KINDS, MARGINS, REFERENCE)
"""Entries that only the objective reads."""
POSITIONS = "position_ids"


@dataclass(frozen=True)
class SegmentLogprobs:
    """The log-probabilities that a model gives to the segments of a micro-batch."""

    logps_BS: Tensor
    """Sum of the log-probabilities of a segment's labels, fp64; 0 for a segment without labels."""
    tokens_BS: Tensor
    """Number of labels of a segment, fp64."""
    kinds_BS: Tensor
    """The batch's `segment_kinds`."""
    group: SequenceGroup
    """Ranks that have the same values: those that share the rows."""


class SegmentObjective(VocabularyObjective):
    """Base of the objectives on answers, which are segments of a row.

    A batch has the entries of a language model, with labels of -100 outside of answers, and besides:

    - `segments` (B, T) int64: the index of each token's segment in its row, -1 in padding.
    - `segment_kinds` (B, S) int64: CHOSEN, REJECTED or MISMATCHED; 0 in unused places.
    - `reference_logps` (B, S), if `has_reference`: the log-probability of each answer under the reference
      model, which is the run's initial model.
    - `margins` (B, S), optional: by how much a pair's scores should differ, at the place of the chosen
      answer. Only RewardRanking reads it.
    """

    unit: str
    has_reference = False
    """Whether a run computes `reference_logps` before it trains with this objective."""
    targets: Sequence[str] = (*TARGET_KEYS, *SEGMENT_KEYS)

    def check_answer_counts(self, num_answers: Mapping[int, int]) -> None:
        """Check that the objective can learn from the training data; this one accepts any answers.

        Args:
            num_answers: Number of answers of each kind; empty if it is not known.

        Raises:
            DataError: The objective cannot learn from these answers.
        """

    @abstractmethod
    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""

    @abstractmethod
    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""

    def compute_segment_logprobs(self, model: Callable[..., Any], batch: Batch) -> SegmentLogprobs:
        """Run a forward, and return the log-probabilities. Collective if rows are divided over ranks.

        Raises:
            ConfigError: The model's routers have a load-balancing loss.
            DataError: Labels have another shape, or are outside of the vocabulary.
            ModelError: The model returned other logits than (B, T, V).
        """
        router = get_router_settings(model)
        if router is not None and router.coefficient:
            raise ConfigError(
                f"model.extra.output_router_logits: the routers' loss is not part of objective {self.name}; "
                "set it to false"
            )
        losses_BT, _ = self.compute_losses(model, batch, per_token=True)
        kinds_BS = batch[KINDS]
        segments_BT = batch[SEGMENTS]
        is_answer_BT = (self._get_labels(batch) != IGNORE_INDEX) & (segments_BT >= 0)
        index_N = _index_places(segments_BT, kinds_BS).flatten()
        # In fp64, neither the order of the sum nor the number of answers in a row changes the result.
        values_N2 = torch.stack([-losses_BT.double() * is_answer_BT, is_answer_BT.double()], -1).view(-1, 2)
        sums = values_N2.new_zeros(kinds_BS.numel(), 2).index_add(0, index_N, values_N2)
        group = get_sequence_group(model)
        logps_BS, tokens_BS = group.sum_over_ranks(sums.view(*kinds_BS.shape, 2)).unbind(-1)
        return SegmentLogprobs(logps_BS, tokens_BS.detach(), kinds_BS, group)

    def read_kinds(self, batch: Batch) -> Tensor:
        """Return `segment_kinds` (B, S), from the batch's copy on the host if there is one, and check them.

        Raises:
            DataError: The batch has no entries of preferences, or they have other shapes or values.
        """
        host = get_host_batch(batch)
        missing = [key for key in (SEGMENTS, KINDS) if not isinstance(host.get(key), Tensor)]
        if missing:
            raise DataError(
                f"objective {self.name} needs {missing[0]!r}, but the batch has {format_batch(batch)}; use "
                "data with answers to compare (data.kind: preference)"
            )
        kinds_BS = host[KINDS]
        segments_BT = host[SEGMENTS]
        has_row_kinds = kinds_BS.dim() == 2 and len(segments_BT) == len(kinds_BS)
        if segments_BT.dtype != torch.int64 or not has_row_kinds:
            raise DataError(
                f"objective {self.name} expects {SEGMENTS!r} (samples, tokens) int64 and {KINDS!r} (samples, "
                f"segments), but the batch has {format_batch(batch)}; use data.kind: preference, which "
                "adds them"
            )
        num_places = kinds_BS.shape[1]
        highest = int(segments_BT.max()) if segments_BT.device.type == "cpu" else -1
        if highest >= num_places:
            raise DataError(
                f"{SEGMENTS!r} has {highest}, but {KINDS!r} is for {num_places} segments a row: "
                f"expected -1 (none) to {num_places - 1}"
            )
        kinds: Tensor = kinds_BS
        return kinds

    def read_reference_logps(self, batch: Batch) -> Tensor:
        """Return `reference_logps` (B, S), fp64.

        Raises:
            DataError: The batch has no such entry, or one of another shape.
        """
        logps = batch.get(REFERENCE)
        if not isinstance(logps, Tensor) or logps.shape != batch[KINDS].shape:
            raise DataError(
                f"objective {self.name} needs {REFERENCE!r} (samples, segments), but the batch has "
                f"{format_batch(batch)}; a run with data.kind: preference adds them itself"
            )
        return logps.double()


def _index_places(segments_BT: Tensor, kinds_BS: Tensor) -> Tensor:
    """Return the index (B, T) of each token's segment in `kinds_BS.flatten()`.

    Padding gets the index of its row's first segment.
    """
    num_rows, num_places = kinds_BS.shape
    row_offset_B1 = torch.arange(num_rows, device=kinds_BS.device)[:, None] * num_places
    return row_offset_B1 + segments_BT.clamp(min=0)


class LogprobRecorder(SegmentObjective):
    """Records the log-probabilities of the last micro-batch, calling the model as another objective does.

    The loss that it returns is 0, with a count of 0.

    Args:
        other: The objective whose call of the model, kernels and name are used.
    """

    unit = "answers"

    def __init__(self, other: SegmentObjective):
        super().__init__(other._call, other._kernels)
        self.name = other.name
        self.logps_BS: Tensor | None = None
        """Log-probabilities of the segments; `None` before a forward, and on ranks without the last stage."""

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        return (self.read_kinds(batch) > 0).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """Set `logps_BS`, and return a loss of 0."""
        self.logps_BS = self.compute_segment_logprobs(model, batch).logps_BS
        zero = torch.zeros((), device=self.logps_BS.device)
        return LossSum(zero, zero)


@dataclass(frozen=True)
class PairLoss:
    """The loss of a pair of answers, a function of the difference of their scores.

    Sources, as in TRL 1.16:

    - `sigmoid`: DPO (Rafailov et al. 2023, equation 7), with smoothing cDPO (Mitchell 2023), without a
      reference CPO (Xu et al. 2024, equation 3), and on means over tokens, with a margin, SimPO (Meng et al.
      2024, equation 6)
    - `hinge`: SLiC (Zhao et al. 2023)
    - `ipo`: Azar et al. 2023, equation 17, on means over tokens
    - `robust`: Chowdhury et al. 2024, equation 10
    - `odds`: ORPO (Hong et al. 2024, equations 4 to 7), on means over tokens
    """

    form: Literal["sigmoid", "hinge", "ipo", "robust", "odds"]
    """Formula of the loss."""
    beta: float
    """Factor of the difference of scores. For `odds`, it is the weight of the loss.

    For `ipo`, the difference should be 1 / (2 * beta).
    """
    label_smoothing: float = 0.0
    """Assumed share of pairs with swapped labels, for `sigmoid` and `robust`."""
    gamma: float = 0.0
    """Margin that beta times the difference of scores should exceed, for `sigmoid`, `hinge` and `robust`."""

    def __call__(self, chosen_BP: Tensor, rejected_BP: Tensor) -> Tensor:
        """Return the loss of each pair (B, P).

        Args:
            chosen_BP: Scores of chosen answers: sums of log-probabilities, or means over tokens, minus the
                reference's if there is one. For `odds` they must be below 0.
            rejected_BP: Scores of rejected answers.
        """
        beta = self.beta
        smoothing = self.label_smoothing
        difference_BP = chosen_BP - rejected_BP
        if self.form == "odds":
            log_odds_ratio_BP = difference_BP - (log1mexp(chosen_BP) - log1mexp(rejected_BP))
            return -beta * F.logsigmoid(log_odds_ratio_BP)
        if self.form == "ipo":
            return (difference_BP - 1 / (2 * beta)) ** 2
        logits_BP = beta * difference_BP - self.gamma
        if self.form == "hinge":
            return torch.relu(1 - logits_BP)
        as_labelled_BP = -F.logsigmoid(logits_BP)
        swapped_BP = -F.logsigmoid(-logits_BP)
        if self.form == "robust":
            return ((1 - smoothing) * as_labelled_BP - smoothing * swapped_BP) / (1 - 2 * smoothing)
        return (1 - smoothing) * as_labelled_BP + smoothing * swapped_BP


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0 without cancellation (Mächler 2012, equation 7)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near_zero = x > -math.log(2)
    near = torch.where(is_near_zero, x, -1.0)
    far = torch.where(is_near_zero, -1.0, x)
    return torch.where(is_near_zero, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))


SIDES = ("chosen", "rejected")
"""Answers of a pair as metrics name them, in their order in a row."""
LOGP_ROUNDING_ERROR = 1e-6
"""Relative rounding error of log-probabilities in fp32."""


@dataclass(frozen=True)
class PairSettings:
    """The differences between DPO, ORPO, SimPO and CPO: the loss, the scores it compares, the SFT term."""

    name: str
    """The recipe's `objective.kind`."""
    loss: PairLoss
    """Loss of a pair, given its scores."""
    has_reference: bool = False
    """Whether scores are relative to the log-probabilities of the reference model."""
    by_token: bool = False
    """Whether scores are means over an answer's tokens instead of sums."""
    sft_weight: float = 0.0
    """Weight of the SFT term: the cross entropy of the chosen answers, a mean over their tokens."""


def build_pair_settings(
    section: DPOObjectiveConfig | ORPOObjectiveConfig | SimPOObjectiveConfig | CPOObjectiveConfig,
) -> PairSettings:
    """Return the settings that a recipe's `objective` section stands for."""
    if section.kind == "orpo":
        return PairSettings("orpo", PairLoss("odds", section.beta), by_token=True, sft_weight=1.0)
    if section.kind == "simpo":
        loss = PairLoss("sigmoid", section.beta, section.label_smoothing, section.gamma)
        return PairSettings("simpo", loss, by_token=True, sft_weight=section.sft_weight)
    by_token = section.loss_type == "ipo" or (section.kind == "dpo" and section.length_normalised)
    return PairSettings(
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
            DataError: The segments are not pairs, or see SegmentObjective.read_kinds.
        """
        kinds_BS = self.read_kinds(batch)
        num_places = kinds_BS.shape[1]
        if num_places % 2:
            raise DataError(
                f"objective {self.name} compares pairs, but {KINDS!r} has {num_places} places in each row; "
                "give an even number of places"
            )
        first_BP, second_BP = kinds_BS.unflatten(1, (-1, 2)).unbind(-1)
        is_pair_BP = (first_BP == CHOSEN) & (second_BP == REJECTED)
        is_unused_BP = first_BP + second_BP == 0
        is_valid_BP = is_pair_BP | is_unused_BP
        if kinds_BS.device.type == "cpu" and not bool(is_valid_BP.all()):
            wrong_BS = kinds_BS[~is_valid_BP.all(1)]
            raise DataError(
                f"objective {self.name} compares pairs, but {KINDS!r} of a row are "
                f"{wrong_BS[0, :12].tolist()}: expected {CHOSEN} (chosen) and {REJECTED} (rejected) "
                "alternately, then 0 in unused places"
            )
        return (first_BP == CHOSEN).sum()


class PairwisePreference(PairObjective):
    """The loss of pairs, divided by the number of pairs of the global batch.

    With `sft_weight` the loss has a second term: the cross entropy of the chosen answers, divided by the
    number of their tokens. An engine divides the whole loss by the number of pairs. So the second term is
    multiplied by (pairs / chosen tokens) of the global batch, which `prepare_step` computes.

    The metrics `rewards/...` are beta times a log-probability. With a reference, it is the sum over tokens
    minus the reference's, also if the loss compares means over tokens. Without one, it is the score that the
    loss compares.

    Args:
        settings: The loss, and the scores that it compares.
        call: The call of the model.
        kernels: See VocabularyObjective.
    """

    def __init__(
        self, settings: PairSettings, call: ModelCall | None = None, kernels: FusedKernels | None = None
    ):
        super().__init__(call, kernels)
        self._settings = settings
        self.name = settings.name
        self.has_reference = settings.has_reference
        self.means: Mapping[str, tuple[str, str]] = {
            **{f"rewards/{side}": (f"{side} rewards", "pairs") for side in SIDES},
            "rewards/margin": ("reward margins", "pairs"),
            "rewards/accuracy": ("preferred", "pairs"),
            **{f"logps/{side}": (f"{side} logps", "pairs") for side in SIDES},
        }
        if settings.sft_weight:
            self.means |= {"sft_loss": ("sft losses", "sft tokens")}
            self.eval_weights = {"sft_loss": settings.sft_weight}
        self._pairs_per_token: Tensor | None = None  # the global batch's ratio; None before prepare_step

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Compute the ratio of pairs to chosen tokens. Collective with an SFT term; does nothing without."""
        if not self._settings.sft_weight:
            return
        counts = torch.stack([self._count_pairs_and_tokens(each) for each in batch.micro_batches]).sum(0)
        pairs, tokens = batch.all_reduce_sum(counts.to(batch.device, non_blocking=True))
        self._pairs_per_token = pairs / tokens.clamp(min=1)

    def _count_pairs_and_tokens(self, batch: Batch) -> Tensor:
        """Return the numbers of pairs and of tokens of chosen answers (2,), fp64, on the host if possible."""
        host = get_host_batch(batch)
        kinds_BS = host[KINDS]
        segments_BT = host[SEGMENTS]
        is_chosen_BT = kinds_BS.gather(1, segments_BT.clamp(min=0)) == CHOSEN
        tokens = ((self._get_labels(host) != IGNORE_INDEX) & (segments_BT >= 0) & is_chosen_BT).sum()
        return torch.stack([self.count(batch).to(tokens), tokens]).double()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective. If several ranks share the rows, each reports 1 / ranks of the loss and the sums."""
        settings = self._settings
        segments = self.compute_segment_logprobs(model, batch)
        is_pair_BP = segments.kinds_BS[:, ::2] == CHOSEN
        logps_BS = segments.logps_BS
        relative_logps_BS = logps_BS
        if settings.has_reference:
            relative_logps_BS = logps_BS - self.read_reference_logps(batch)
        scores_BS = relative_logps_BS
        if settings.by_token:
            scores_BS = relative_logps_BS / segments.tokens_BS.clamp(min=1)
        # Every loss is finite for -1, the score of unused places. So they add no NaN to the gradients.
        chosen_BP = torch.where(is_pair_BP, scores_BS[:, ::2], -1.0)
        rejected_BP = torch.where(is_pair_BP, scores_BS[:, 1::2], -1.0)
        loss_BP = torch.where(is_pair_BP, settings.loss(chosen_BP, rejected_BP), 0.0)
        pairs = is_pair_BP.sum().double()
        loss_sum = loss_BP.sum()
        rewarded_BS = relative_logps_BS if settings.has_reference else scores_BS
        rewards_BS = settings.loss.beta * rewarded_BS.detach()
        extras = self._build_extras(is_pair_BP, rewards_BS, logps_BS.detach())
        if settings.sft_weight:
            sft_sum = -torch.where(is_pair_BP, logps_BS[:, ::2], 0.0).sum()
            tokens = torch.where(is_pair_BP, segments.tokens_BS[:, ::2], 0.0).sum()
            extras |= {"sft losses": sft_sum.detach(), "sft tokens": tokens}
            if torch.is_grad_enabled():  # an evaluation adds the term at its end; see Objective.eval_weights
                assert self._pairs_per_token is not None
                loss_sum = loss_sum + settings.sft_weight * self._pairs_per_token * sft_sum
        num_ranks = segments.group.size
        extras = {key: value / num_ranks for key, value in (extras | {"pairs": pairs}).items()}
        return LossSum((loss_sum / num_ranks).float(), pairs / num_ranks, extras)

    @staticmethod
    def _build_extras(is_pair_BP: Tensor, rewards_BS: Tensor, logps_BS: Tensor) -> dict[str, Tensor]:
        """Return the sums over pairs for the metrics of `means`, except for the number of pairs."""

        def sum_pairs(values_BP: Tensor) -> Tensor:
            return torch.where(is_pair_BP, values_BP, 0.0).sum()

        margin_BP = rewards_BS[:, ::2] - rewards_BS[:, 1::2]
        # Before training, model and reference agree: a margin is only rounding error, whose sign depends on
        # the split. So a margin of that size does not count as preferred.
        rounding_error_BP = LOGP_ROUNDING_ERROR * (logps_BS[:, ::2] + logps_BS[:, 1::2]).abs()
        extras = {f"{side} rewards": sum_pairs(rewards_BS[:, at::2]) for at, side in enumerate(SIDES)}
        extras |= {f"{side} logps": sum_pairs(logps_BS[:, at::2]) for at, side in enumerate(SIDES)}
        return extras | {
            "reward margins": sum_pairs(margin_BP),
            "preferred": sum_pairs((margin_BP > rounding_error_BP).double()),
        }


class MismatchedDivergence(SegmentObjective):
    """KTO's baseline: the mean over mismatched answers of the log-probability minus the reference's.

    A mismatched answer follows the prompt of another example. Only KTO uses this objective. It reads
    `reference_logps`, but its own `has_reference` is False, since KTO's makes the run compute them.
    """

    name = "kto"
    unit = "examples"

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        return (self.read_kinds(batch) == MISMATCHED).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        segments = self.compute_segment_logprobs(model, batch)
        divergence, num_mismatched = self.sum_divergence(batch, segments)
        return LossSum(divergence, num_mismatched)

    def sum_divergence(self, batch: Batch, segments: SegmentLogprobs) -> Tensor:
        """Return the sum of the differences and their number (2,), fp64, without gradients.

        If several ranks share the rows, each returns 1 / ranks of both.

        Raises:
            DataError: See read_reference_logps.
        """
        is_mismatched_BS = segments.kinds_BS == MISMATCHED
        log_ratios_BS = segments.logps_BS.detach() - self.read_reference_logps(batch)
        sums = torch.stack(
            [torch.where(is_mismatched_BS, log_ratios_BS, 0.0).sum(), is_mismatched_BS.sum().double()]
        )
        return sums / segments.group.size


class KTO(SegmentObjective, TwoPassObjective):
    """The KTO loss, divided by the number of examples of the global batch.

    The log-ratio of an answer is its log-probability minus the reference's. The loss of an answer is
    1 - sigmoid(beta * d), times the weight of its kind. For a desirable answer, d is its log-ratio minus the
    baseline; for an undesirable one, the baseline minus its log-ratio. The metrics `rewards/...` are beta
    times the log-ratio.

    The baseline must be known before the first backward. A training step of several micro-batches therefore
    takes one more forward of each, with the same random numbers. An evaluation reads its data twice.

    Args:
        beta: Factor of the log-ratios.
        desirable_weight: Weight of the loss of desirable answers, of kind CHOSEN.
        undesirable_weight: Weight of the loss of undesirable answers, of kind REJECTED.
        call: The call of the model.
        kernels: See VocabularyObjective.
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
        self._first_pass_mean = 0.0
        self._mismatched = MismatchedDivergence(call, kernels)

    @property
    def first_pass(self) -> Objective:
        """See TwoPassObjective."""
        return self._mismatched

    def set_first_pass_mean(self, mean: float) -> None:
        """See TwoPassObjective."""
        self._first_pass_mean = mean

    def check_answer_counts(self, num_answers: Mapping[int, int]) -> None:
        """Check that there are answers of both kinds to train on, or a weight of 0 for the missing kind.

        Args:
            num_answers: See SegmentObjective.check_answer_counts.

        Raises:
            DataError: There is no answer of a kind whose weight is not 0.
        """
        if not num_answers:
            return
        for kind, name, label in (CHOSEN, "desirable", "true"), (REJECTED, "undesirable", "false"):
            if not num_answers.get(kind) and self._weights[kind]:
                raise DataError(
                    "objective kto compares two kinds of answers, but the training data has "
                    f"{num_answers.get(CHOSEN, 0)} desirable and {num_answers.get(REJECTED, 0)} undesirable "
                    f"ones; add rows with the label {label}, or set objective.{name}_weight: 0 to train "
                    f"without {name} ones"
                )

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count.

        Raises:
            DataError: There is no mismatched answer, or see SegmentObjective.read_kinds.
        """
        kinds_BS = self.read_kinds(batch)
        if kinds_BS.device.type == "cpu" and not bool((kinds_BS == MISMATCHED).any()):
            raise DataError(
                f"objective kto needs mismatched answers for its baseline ({KINDS!r} {MISMATCHED}), but a "
                "micro-batch has none; use data.kind: preference, which adds them"
            )
        return ((kinds_BS == CHOSEN) | (kinds_BS == REJECTED)).sum()

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Run a forward of each micro-batch, and sum the divergence over the global batch. Collective.

        With a single micro-batch, the loss itself sums the divergence over the ranks in its forward.
        """
        self._get_global_sums = batch.all_reduce_sum
        if len(batch.micro_batches) == 1:
            return
        device = batch.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for micro_batch in map(batch.to_device, batch.micro_batches):
                segments = self.compute_segment_logprobs(batch.model, micro_batch)
                total += self._mismatched.sum_divergence(micro_batch, segments)
        total_over_ranks = batch.all_reduce_sum(total)
        self._get_global_sums = lambda _: total_over_ranks

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective. If several ranks share the rows, each reports 1 / ranks of the loss and the sums."""
        segments = self.compute_segment_logprobs(model, batch)
        log_ratios_BS = segments.logps_BS - self.read_reference_logps(batch)
        if torch.is_grad_enabled():
            divergence, num_mismatched = self._get_global_sums(
                self._mismatched.sum_divergence(batch, segments)
            )
            baseline = (divergence / num_mismatched.clamp(min=1e-9)).clamp(min=0)
        else:
            baseline = log_ratios_BS.new_tensor(max(0.0, self._first_pass_mean))
        logits_BS = self._beta * (log_ratios_BS - baseline)
        # NaN if any log-ratio is infinite, also that of a mismatched answer.
        loss_sum = 0.0 * logits_BS.sum()
        count = torch.zeros_like(baseline)
        extras = {}
        for kind, side, label, sign in (
            (CHOSEN, "chosen", "desirable", 1),
            (REJECTED, "rejected", "undesirable", -1),
        ):
            is_kind_BS = segments.kinds_BS == kind
            num_answers = is_kind_BS.sum().double()
            loss_BS = 1 - torch.sigmoid(sign * logits_BS)
            loss_sum = loss_sum + self._weights[kind] * torch.where(is_kind_BS, loss_BS, 0.0).sum()
            count = count + num_answers
            extras[f"{side} rewards"] = (
                self._beta * torch.where(is_kind_BS, log_ratios_BS.detach(), 0.0).sum()
            )
            extras[f"{side} logps"] = torch.where(is_kind_BS, segments.logps_BS.detach(), 0.0).sum()
            extras[label] = num_answers
        extras |= {"baselines": baseline * count, "examples": count}
        num_ranks = segments.group.size
        extras = {key: value / num_ranks for key, value in extras.items()}
        return LossSum((loss_sum / num_ranks).float(), count / num_ranks, extras)


class RewardRanking(PairObjective):
    """The loss of a reward model, divided by the number of pairs of the global batch.

    The loss of a pair is -log sigmoid(chosen score - rejected score - margin_weight * margin).

    Args:
        margin_weight: Factor of a pair's margin; the margin is 0 if the batch has no `margins`.
        center_weight: Weight of the added term (chosen score + rejected score)^2, which centres scores at 0.
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
        """See Objective. If several ranks share the rows, each reports 1 / ranks of the loss and the sums."""
        is_pair_BP = batch[KINDS][:, ::2] == CHOSEN
        chosen_BP, rejected_BP = self._compute_scores(model, batch).unflatten(1, (-1, 2)).unbind(-1)
        difference_BP = chosen_BP - rejected_BP
        adjusted_BP = difference_BP
        if self._margin_weight and MARGINS in batch:
            adjusted_BP = difference_BP - self._margin_weight * batch[MARGINS][:, ::2]
        loss_BP = -F.logsigmoid(adjusted_BP)
        if self._center_weight:
            loss_BP = loss_BP + self._center_weight * (chosen_BP + rejected_BP) ** 2
        num_ranks = get_sequence_group(model).size

        def sum_pairs(values_BP: Tensor) -> Tensor:
            return torch.where(is_pair_BP, values_BP, 0.0).sum() / num_ranks

        values_by_name = {
            "chosen rewards": chosen_BP,
            "rejected rewards": rejected_BP,
            "reward margins": difference_BP,
            "preferred": (difference_BP > 0).double(),
        }
        pairs = is_pair_BP.sum().double() / num_ranks
        extras = {name: sum_pairs(values.detach()) for name, values in values_by_name.items()}
        return LossSum(sum_pairs(loss_BP).float(), pairs, extras | {"pairs": pairs})

    def _compute_scores(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the score (B, S), fp64, of each segment's last token; 0 in unused places.

        Collective if rows are divided over ranks.

        Raises:
            DataError: The batch has no `position_ids`.
            ModelError: The model returned something else than one score for each token.
        """
        kinds_BS = batch[KINDS]
        segments_BT = batch[SEGMENTS]
        if POSITIONS not in batch:
            raise DataError(
                f"objective {self.name} needs {POSITIONS!r} that count from 0 in each segment, but the batch "
                f"has {format_batch(batch)}; use data.kind: preference, which adds them"
            )
        scores_BT = get_logits(self._call(model, batch)).squeeze(-1)
        if scores_BT.shape != segments_BT.shape:
            raise ModelError(
                f"objective {self.name} expects a score for each token, (samples, tokens) or (samples, "
                f"tokens, 1), but the model returned {tuple(scores_BT.shape)} for "
                f"{tuple(segments_BT.shape)} tokens"
            )
        group = get_sequence_group(model)
        is_token_BT = segments_BT >= 0
        index_BT = _index_places(segments_BT, kinds_BS)

        def sum_by_segment(values_BT: Tensor) -> Tensor:
            sums = torch.zeros(kinds_BS.numel(), dtype=torch.float64, device=kinds_BS.device)
            sums = sums.index_add(0, index_BT.flatten(), values_BT.double().flatten())
            return group.sum_over_ranks(sums.view(kinds_BS.shape))

        lengths_BS = sum_by_segment(is_token_BT)
        is_last_BT = is_token_BT & (batch[POSITIONS] == lengths_BS.flatten()[index_BT] - 1)
        return sum_by_segment(torch.where(is_last_BT, scores_BT.double(), 0.0))
