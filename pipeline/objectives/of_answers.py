"""The objectives on answers that a recipe names, out of the parts that they share."""

from __future__ import annotations

from pipeline.config.objective_schema import (
    CPOObjectiveConfig,
    DPOObjectiveConfig,
    KTOObjectiveConfig,
    ORPOObjectiveConfig,
    RewardObjectiveConfig,
    SimPOObjectiveConfig,
)
from pipeline.objectives.given_logits import FusedKernels
from pipeline.objectives.kto import KTO
from pipeline.objectives.model_call import ModelCall
from pipeline.objectives.preference_losses import PairLoss
from pipeline.objectives.preferences import Pairs, PairTerms
from pipeline.objectives.reward import Reward
from pipeline.objectives.segments import BySegment

OfAnswers = (
    DPOObjectiveConfig
    | KTOObjectiveConfig
    | ORPOObjectiveConfig
    | SimPOObjectiveConfig
    | CPOObjectiveConfig
    | RewardObjectiveConfig
)
WITH_REFERENCE = (DPOObjectiveConfig, KTOObjectiveConfig)


def build_of_answers(section: OfAnswers, call: ModelCall, kernels: FusedKernels | None) -> BySegment:
    """The objective of a section."""
    if isinstance(section, KTOObjectiveConfig):
        return KTO(section.beta, section.desirable_weight, section.undesirable_weight, call, kernels)
    if isinstance(section, RewardObjectiveConfig):
        return Reward(section.margin_weight, section.center_weight, call)
    return Pairs(_terms(section), call, kernels)


def _terms(
    section: DPOObjectiveConfig | ORPOObjectiveConfig | SimPOObjectiveConfig | CPOObjectiveConfig,
) -> PairTerms:
    kind, beta = section.kind, section.beta
    if isinstance(section, ORPOObjectiveConfig):
        return PairTerms(kind, PairLoss("odds", beta), by_token=True, sft_weight=1.0)
    smoothing, sft = section.label_smoothing, section.sft_weight
    if isinstance(section, SimPOObjectiveConfig):
        loss = PairLoss("sigmoid", beta, smoothing, section.gamma)
        return PairTerms(kind, loss, by_token=True, sft_weight=sft)
    loss, by_token = PairLoss(section.loss_type, beta, smoothing), section.loss_type == "ipo"
    if isinstance(section, CPOObjectiveConfig):
        return PairTerms(kind, loss, by_token=by_token, sft_weight=sft)
    return PairTerms(kind, loss, True, by_token or section.length_normalised, sft)
