"""What is minimised: the objective that a recipe names, and all there is to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipeline.config.import_paths import import_object
from pipeline.config.objective_schema import (
    AutoObjectiveConfig,
    ClassificationObjectiveConfig,
    CustomObjectiveConfig,
    KTOObjectiveConfig,
    RewardObjectiveConfig,
)
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.objectives.cross_entropies import CausalLM, Classification, refuse_router
from pipeline.objectives.given_logits import FusedKernels
from pipeline.objectives.interface import (
    TARGET_KEYS,
    Batch,
    GlobalBatch,
    LossSum,
    Objective,
    VocabularyPart,
    added,
    note_part,
)
from pipeline.objectives.linear_cross_entropy import HeadAlone
from pipeline.objectives.model_call import ModelCall
from pipeline.objectives.own import Custom, ModelLoss
from pipeline.objectives.preferences import (
    ALONE,
    KTO,
    SEGMENT_KEYS,
    BySegment,
    Pairs,
    PairTerms,
    Recorded,
    Reward,
    SequenceGroup,
    cpo_terms,
    dpo_terms,
    note_group,
    orpo_terms,
    simpo_terms,
)

__all__ = [
    "ALONE",
    "OBJECTIVES",
    "TARGET_KEYS",
    "Batch",
    "BySegment",
    "CausalLM",
    "GlobalBatch",
    "HeadAlone",
    "LossSum",
    "Objective",
    "Recorded",
    "SequenceGroup",
    "VocabularyPart",
    "added",
    "build_objective",
    "note_group",
    "note_part",
    "refuse_router",
]


Inputs = Sequence[str] | None
"""`model.inputs`; see ModelCall."""
Builder = Callable[[Any, Inputs, bool], Objective]
"""(The objective's section, the model's inputs, whether the run compiles) -> objective."""


def build_objective(config: RunConfig, compiled: bool = False) -> Objective:
    """Build the objective that the recipe names; `auto` follows the model's kind.

    Args:
        compiled: Whether the run compiles: then the loss over a vocabulary is two kernels.

    Raises:
        ConfigError: `auto` with a model of one's own, or an import path that leads nowhere.
    """
    section = config.objective
    kind = config.model.default_objective if section.kind == "auto" else section.kind
    if kind is None:
        raise ConfigError(
            "objective.kind: with a model of your own say what is minimised: causal_lm, classification, "
            "model_loss (the model returns its loss), or package.module:function"
        )
    return OBJECTIVES.get(kind, _custom)(section, config.model.inputs, compiled)


def _causal_lm(_: Any, inputs: Inputs, compiled: bool) -> Objective:
    return CausalLM(ModelCall(inputs), _kernels(compiled))


def _classification(
    section: AutoObjectiveConfig | ClassificationObjectiveConfig, inputs: Inputs, _: bool
) -> Objective:
    return Classification(
        section.class_weights,
        section.label_smoothing,
        ModelCall(inputs),
        are_probabilities=section.outputs == "probabilities",
    )


def _model_loss(_: Any, inputs: Inputs, __: bool) -> Objective:
    return ModelLoss(ModelCall(inputs, with_targets=True))


def _pairs(terms: Callable[[Any], PairTerms], section: Any, inputs: Inputs, compiled: bool) -> Objective:
    return Pairs(terms(section), ModelCall(inputs, kept=SEGMENT_KEYS), _kernels(compiled))


def _kto(section: KTOObjectiveConfig, inputs: Inputs, compiled: bool) -> Objective:
    return KTO(
        section.beta,
        section.desirable_weight,
        section.undesirable_weight,
        ModelCall(inputs, kept=SEGMENT_KEYS),
        _kernels(compiled),
    )


def _reward(section: RewardObjectiveConfig, inputs: Inputs, _: bool) -> Objective:
    return Reward(section.margin_weight, section.center_weight, ModelCall(inputs, kept=SEGMENT_KEYS))


def _custom(section: CustomObjectiveConfig, inputs: Inputs, _: bool) -> Objective:
    return Custom(import_object(section.kind, ConfigError), ModelCall(inputs), section.reduction)


def _kernels(compiled: bool) -> FusedKernels | None:
    return FusedKernels() if compiled else None


OBJECTIVES: dict[str, Builder] = {
    "causal_lm": _causal_lm,
    "classification": _classification,
    "model_loss": _model_loss,
    "dpo": partial(_pairs, dpo_terms),
    "orpo": partial(_pairs, orpo_terms),
    "simpo": partial(_pairs, simpo_terms),
    "cpo": partial(_pairs, cpo_terms),
    "kto": _kto,
    "reward": _reward,
}
"""`objective.kind` -> builder. Any other kind is an import path of a user's function, as `_custom` takes."""
