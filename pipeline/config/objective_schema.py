"""The objective's part of the recipe; `kind` chooses one of the sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from pipeline.config.model_schema import IMPORT_PATH, RecipeSection, kind_tag


class _Weighted(RecipeSection):
    """What classification reads."""

    class_weights: list[Annotated[float, Field(ge=0)]] | None = None
    """Weight of each class in the classification loss. Default: all 1."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread evenly over all classes."""

    @field_validator("class_weights")
    @classmethod
    def _some_weight(cls, value: list[float] | None) -> list[float] | None:
        if value and not any(value):
            raise ValueError("all weights are 0, so nothing is learned; give a class a weight above 0")
        return value


class AutoObjectiveConfig(_Weighted):
    """By the model's kind: `causal_lm` for `causal_lm`, `classification` for `cnn`, whose keys it takes."""

    kind: Literal["auto"] = "auto"
    """What is minimised. The loss is the mean over all valid tokens or samples of the global batch."""


class ClassificationObjectiveConfig(_Weighted):
    """The cross entropy of a sample's class."""

    kind: Literal["classification"]
    """The model gives logits `(..., classes)`."""


class CausalLMObjectiveConfig(RecipeSection):
    """The cross entropy of the next token."""

    kind: Literal["causal_lm"]
    """Tokens whose label is -100 do not count."""


class ModelLossObjectiveConfig(RecipeSection):
    """The loss that the model computes itself."""

    kind: Literal["model_loss"]
    """The model is called with the targets too and returns the mean loss of the samples it was given."""


class DPOObjectiveConfig(RecipeSection):
    """Direct preference optimisation: pairs of answers, held against the model that the run starts from."""

    kind: Literal["dpo"]
    """The loss is a mean over the pairs of the global batch. Needs `data.kind: preference`."""
    beta: float = Field(0.1, gt=0)
    """How closely the model is held to the reference: what log-ratios are multiplied by."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    """`ipo` compares means over tokens; `robust` undoes labels that are wrong `label_smoothing` of the
    time."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose labels are the wrong way round: of `sigmoid` (cDPO) and `robust`."""
    length_normalised: bool = False
    """Compare means over the tokens of an answer in place of sums."""
    sft_weight: float = Field(0.0, ge=0)
    """Of the cross entropy of the chosen answers, a mean over their tokens, that is added."""

    @model_validator(mode="after")
    def _smoothed(self) -> DPOObjectiveConfig:
        _refuse_smoothing(self.loss_type, self.label_smoothing)
        return self


class KTOObjectiveConfig(RecipeSection):
    """Kahneman-Tversky optimisation: answers that are desirable or not, without pairs."""

    kind: Literal["kto"]
    """The loss is a mean over the examples of the global batch. Needs `data.kind: preference`."""
    beta: float = Field(0.1, gt=0)
    """How closely the model is held to the reference: what log-ratios are multiplied by."""
    desirable_weight: float = Field(1.0, ge=0)
    """Of the desirable answers' losses."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Of the undesirable answers' losses."""

    @model_validator(mode="after")
    def _some_weight(self) -> KTOObjectiveConfig:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError(
                "desirable_weight and undesirable_weight are 0, so nothing is learned; give one of them a "
                "weight above 0"
            )
        return self


class ORPOObjectiveConfig(RecipeSection):
    """Odds ratio preference optimisation: the chosen answers' cross entropy and a term of odds; no
    reference."""

    kind: Literal["orpo"]
    """The cross entropy is a mean over the chosen answers' tokens, the term of odds over the pairs."""
    beta: float = Field(0.1, gt=0)
    """Weight of the term of odds (lambda in the paper)."""


class SimPOObjectiveConfig(RecipeSection):
    """Simple preference optimisation: mean log-probabilities of a token, with a margin; no reference."""

    kind: Literal["simpo"]
    """The loss is a mean over the pairs of the global batch."""
    beta: float = Field(2.0, gt=0)
    """What mean log-probabilities are multiplied by."""
    gamma: float = Field(1.0, ge=0)
    """What the difference has to exceed."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose labels are the wrong way round."""
    sft_weight: float = Field(0.0, ge=0)
    """Of the cross entropy of the chosen answers, a mean over their tokens, that is added."""


class CPOObjectiveConfig(RecipeSection):
    """Contrastive preference optimisation: DPO without a reference, and the chosen answers' cross entropy."""

    kind: Literal["cpo"]
    """The loss is a mean over the pairs of the global batch, the cross entropy one over tokens."""
    beta: float = Field(0.1, gt=0)
    """What log-probabilities are multiplied by."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """`ipo` compares means over tokens."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose labels are the wrong way round: of `sigmoid`."""
    sft_weight: float = Field(1.0, ge=0)
    """Of the cross entropy of the chosen answers."""

    @model_validator(mode="after")
    def _smoothed(self) -> CPOObjectiveConfig:
        _refuse_smoothing(self.loss_type, self.label_smoothing)
        return self


class RewardObjectiveConfig(RecipeSection):
    """A reward model (Bradley-Terry): the output layer gives an answer's score, and chosen answers come to
    have higher ones."""

    kind: Literal["reward"]
    """The loss is a mean over the pairs of the global batch. Needs `data.kind: preference`."""
    margin_weight: float = Field(1.0, ge=0)
    """What a pair's margin is multiplied by where the data have one (`margin`, or both answers' scores): by
    so much scores have to differ."""
    center_weight: float = Field(0.0, ge=0)
    """Of the square of a pair's summed scores, which is added: it keeps scores around 0."""


def _refuse_smoothing(loss_type: str, label_smoothing: float) -> None:
    if label_smoothing and loss_type in ("hinge", "ipo"):
        raise ValueError(
            f"label_smoothing is {label_smoothing:g}, and the loss {loss_type} knows none; leave it out, or "
            "use loss_type: sigmoid"
        )


class CustomObjectiveConfig(RecipeSection):
    """A loss of your own."""

    kind: str = Field(pattern=IMPORT_PATH)
    """`package.module:function` with `function(outputs, batch) -> loss`. It runs that code;
    `--no-import-paths` refuses it."""
    reduction: Literal["sum", "mean"] | None = None
    """What the function returns: the `sum` over a micro-batch, or the `mean` over its targets, which is
    multiplied by their number, so that the loss is the mean over those of the global batch. Default: a sum,
    and a function that returns a mean is an error."""


def _tag(value: Any) -> str | None:
    is_section = isinstance(value, (dict, RecipeSection))
    return kind_tag(value) or ("auto" if is_section else None)


ObjectiveConfig = Annotated[
    Annotated[AutoObjectiveConfig, Tag("auto")]
    | Annotated[CausalLMObjectiveConfig, Tag("causal_lm")]
    | Annotated[ClassificationObjectiveConfig, Tag("classification")]
    | Annotated[ModelLossObjectiveConfig, Tag("model_loss")]
    | Annotated[DPOObjectiveConfig, Tag("dpo")]
    | Annotated[KTOObjectiveConfig, Tag("kto")]
    | Annotated[ORPOObjectiveConfig, Tag("orpo")]
    | Annotated[SimPOObjectiveConfig, Tag("simpo")]
    | Annotated[CPOObjectiveConfig, Tag("cpo")]
    | Annotated[RewardObjectiveConfig, Tag("reward")]
    | Annotated[CustomObjectiveConfig, Tag("custom")],
    Discriminator(_tag),
]
