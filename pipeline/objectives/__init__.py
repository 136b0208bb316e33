"""The registry of objectives, and the function that builds a recipe's objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.config.import_paths import import_object
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.objectives.cross_entropies import CausalLM, Classification, refuse_router_loss
from pipeline.objectives.custom_loss import CustomLoss, ModelLoss
from pipeline.objectives.interface import (
    TARGET_KEYS,
    Batch,
    GlobalBatch,
    LossSum,
    Objective,
    VocabularyPart,
    set_vocabulary_part,
    sum_losses,
)
from pipeline.objectives.linear_cross_entropy import HeadOnlyModel
from pipeline.objectives.logits_cross_entropy import FusedKernels
from pipeline.objectives.model_call import ModelCall
from pipeline.objectives.preferences import (
    KTO,
    SEGMENT_KEYS,
    UNDIVIDED_SEQUENCE,
    LogprobRecorder,
    PairwisePreference,
    RewardRanking,
    SegmentObjective,
    SequenceGroup,
    build_pair_settings,
    set_sequence_group,
)

__all__ = [
    "OBJECTIVES",
    "TARGET_KEYS",
    "UNDIVIDED_SEQUENCE",
    "Batch",
    "CausalLM",
    "GlobalBatch",
    "HeadOnlyModel",
    "LogprobRecorder",
    "LossSum",
    "Objective",
    "SegmentObjective",
    "SequenceGroup",
    "VocabularyPart",
    "build_objective",
    "refuse_router_loss",
    "set_sequence_group",
    "set_vocabulary_part",
    "sum_losses",
]


def build_objective(config: RunConfig, compiled: bool = False) -> Objective:
    """Build the objective that the recipe names; `auto` follows the model's kind.

    Args:
        config: The run's configuration.
        compiled: Whether the run uses torch.compile; the losses of language models are then compiled too.

    Raises:
        ConfigError: An import path does not resolve.
    """
    section = config.objective
    kind = config.model.default_objective if section.kind == "auto" else section.kind
    assert kind is not None, "refused by find_contradictions"
    build = OBJECTIVES.get(kind, _build_custom)
    kernels = FusedKernels() if compiled else None
    return build(section, config.model.inputs, kernels)


Inputs = Sequence[str] | None
"""Type of the recipe's `model.inputs`; see ModelCall."""


def _build_custom(section: Any, inputs: Inputs, _: FusedKernels | None) -> Objective:
    return CustomLoss(import_object(section.kind, ConfigError), ModelCall(inputs), section.reduction)


def _build_pairs(section: Any, inputs: Inputs, kernels: FusedKernels | None) -> Objective:
    return PairwisePreference(build_pair_settings(section), ModelCall(inputs, withheld=SEGMENT_KEYS), kernels)


def _build_kto(section: Any, inputs: Inputs, kernels: FusedKernels | None) -> Objective:
    return KTO(
        section.beta,
        section.desirable_weight,
        section.undesirable_weight,
        ModelCall(inputs, withheld=SEGMENT_KEYS),
        kernels,
    )


def _build_reward(section: Any, inputs: Inputs, _: FusedKernels | None) -> Objective:
    call = ModelCall(inputs, withheld=SEGMENT_KEYS)
    return RewardRanking(section.margin_weight, section.center_weight, call)


OBJECTIVES: dict[str, Callable[[Any, Inputs, FusedKernels | None], Objective]] = {
    "causal_lm": lambda section, inputs, kernels: CausalLM(ModelCall(inputs), kernels),
    "classification": lambda section, inputs, _: Classification(
        section.class_weights, section.label_smoothing, ModelCall(inputs)
    ),
    "model_loss": lambda section, inputs, _: ModelLoss(ModelCall(inputs, with_targets=True)),
    "dpo": _build_pairs,
    "orpo": _build_pairs,
    "simpo": _build_pairs,
    "cpo": _build_pairs,
    "kto": _build_kto,
    "reward": _build_reward,
}
"""Builder of each `objective.kind`, called with (section `objective`, `model.inputs`, kernels or `None`).

Any other kind is the import path of a user's function; see CustomLoss.
"""
