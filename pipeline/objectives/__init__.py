"""What is minimised: the objective that a recipe names, and all there is to choose from."""

from __future__ import annotations

from pipeline.config.model_schema import CausalLMConfig, CNNConfig
from pipeline.config.objective_schema import (
    AutoObjectiveConfig,
    ClassificationObjectiveConfig,
    CustomObjectiveConfig,
)
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.importing import import_object
from pipeline.objectives.cross_entropies import CausalLM, Classification
from pipeline.objectives.given_logits import FusedKernels
from pipeline.objectives.interface import TARGET_KEYS, Batch, GlobalBatch, LossSum, Objective, added
from pipeline.objectives.model_call import ModelCall
from pipeline.objectives.of_answers import OfAnswers, build_of_answers
from pipeline.objectives.output_head import HeadAlone
from pipeline.objectives.own import Custom, ModelLoss
from pipeline.objectives.recorded import Recorded
from pipeline.objectives.router import refuse_router
from pipeline.objectives.segments import SEGMENT_KEYS, BySegment
from pipeline.objectives.sequence_group import ALONE, SequenceGroup, note_group
from pipeline.objectives.vocabulary_part import VocabularyPart, note_part

__all__ = [
    "ALONE",
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


def build_objective(config: RunConfig, compiled: bool = False) -> Objective:
    """The objective the recipe names; `auto` follows the model's kind.

    Args:
        compiled: Whether the run compiles: then the loss over a vocabulary is two kernels.

    Raises:
        ConfigError: `auto` with a model of one's own, or an import path that leads nowhere.
    """
    section = config.objective
    kind = section.kind
    if isinstance(section, AutoObjectiveConfig):
        kinds = {CausalLMConfig: "causal_lm", CNNConfig: "classification"}
        kind = kinds.get(type(config.model), "")
        if not kind:
            raise ConfigError(
                "objective.kind: with a model of your own say what is minimised: causal_lm, classification, "
                "model_loss (the model returns its loss), or package.module:function"
            )
    if isinstance(section, OfAnswers):
        call = ModelCall(config.model.inputs, kept=SEGMENT_KEYS)
        return build_of_answers(section, call, FusedKernels() if compiled else None)
    call = ModelCall(config.model.inputs, with_targets=kind == "model_loss")
    if kind == "classification":
        assert isinstance(section, AutoObjectiveConfig | ClassificationObjectiveConfig)
        are_probabilities = section.outputs == "probabilities"
        return Classification(
            section.class_weights, section.label_smoothing, call, are_probabilities=are_probabilities
        )
    if kind == "causal_lm":
        return CausalLM(call, FusedKernels() if compiled else None)
    if kind == "model_loss":
        return ModelLoss(call)
    assert isinstance(section, CustomObjectiveConfig)
    return Custom(import_object(kind, ConfigError), call, section.reduction)
