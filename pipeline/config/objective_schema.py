"""The objective section of the recipe. Its `kind` chooses one of these classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from pipeline.config.model_schema import IMPORT_PATH, RecipeSection, get_kind_tag


class _ClassificationKeys(RecipeSection):
    """Base of the sections that read the keys of the classification loss."""

    class_weights: list[Annotated[float, Field(ge=0)]] | None = None
    """Weight of each class in the classification loss. Default: all 1."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread evenly over all classes."""

    @field_validator("class_weights")
    @classmethod
    def _require_weight(cls, value: list[float] | None) -> list[float] | None:
        if value and not any(value):
            raise ValueError("all weights are 0, so nothing is learned; give at least one a weight above 0")
        return value


class AutoObjectiveConfig(_ClassificationKeys):
    """The objective of the model's kind: `causal_lm` for `causal_lm`, `classification` for `cnn`."""

    kind: Literal["auto"] = "auto"
    """Objective to minimise. The loss is the mean over all valid tokens or samples of the global batch."""


class ClassificationObjectiveConfig(_ClassificationKeys):
    """The cross entropy of each sample's class."""

    kind: Literal["classification"]
    """The model returns logits of shape `(..., classes)`."""


class CausalLMObjectiveConfig(RecipeSection):
    """The cross entropy of the next token."""

    kind: Literal["causal_lm"]
    """Tokens with the label -100 do not count."""


class ModelLossObjectiveConfig(RecipeSection):
    """The loss that the model itself computes."""

    kind: Literal["model_loss"]
    """The model is called with inputs and targets, and returns the mean loss of these samples."""


class DPOObjectiveConfig(RecipeSection):
    """Direct preference optimisation: pairs of answers, compared with the run's initial model."""

    kind: Literal["dpo"]
    """The loss is a mean over the pairs of the global batch. Needs `data.kind: preference`."""
    beta: float = Field(0.1, gt=0)
    """Factor of the log-ratios; a larger one keeps the model closer to the reference."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    """Form of the loss. `ipo` compares means over tokens. `robust` corrects for a share `label_smoothing`
    of swapped labels."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs with swapped labels, for `sigmoid` (cDPO) and `robust`."""
    length_normalised: bool = False
    """Whether to compare means over the tokens of an answer instead of sums."""
    sft_weight: float = Field(0.0, ge=0)
    """Weight of an added term: the cross entropy of the chosen answers, a mean over their tokens."""

    @model_validator(mode="after")
    def _check_smoothing(self) -> DPOObjectiveConfig:
        _refuse_unread_smoothing(self.loss_type, self.label_smoothing)
        return self


class KTOObjectiveConfig(RecipeSection):
    """Kahneman-Tversky optimisation: single answers that are desirable or undesirable."""

    kind: Literal["kto"]
    """The loss is a mean over the examples of the global batch. Needs `data.kind: preference`."""
    beta: float = Field(0.1, gt=0)
    """Factor of the log-ratios; a larger one keeps the model closer to the reference."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of the loss of desirable answers."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of the loss of undesirable answers."""

    @model_validator(mode="after")
    def _require_weight(self) -> KTOObjectiveConfig:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError(
                "desirable_weight and undesirable_weight are 0, so nothing is learned; give one of them a "
                "weight above 0"
            )
        return self


class ORPOObjectiveConfig(RecipeSection):
    """Odds ratio preference optimisation, without a reference.

    The loss is the cross entropy of the chosen answers plus an odds-ratio term.
    """

    kind: Literal["orpo"]
    """The cross entropy is a mean over the tokens of the chosen answers, the odds-ratio term a mean over the
    pairs."""
    beta: float = Field(0.1, gt=0)
    """Weight of the odds-ratio term (lambda in the paper)."""


class SimPOObjectiveConfig(RecipeSection):
    """Simple preference optimisation: mean log-probabilities per token with a margin, without a reference."""

    kind: Literal["simpo"]
    """The loss is a mean over the pairs of the global batch."""
    beta: float = Field(2.0, gt=0)
    """Factor of the mean log-probabilities."""
    gamma: float = Field(1.0, ge=0)
    """Margin by which the chosen answer should exceed the rejected one."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs with swapped labels."""
    sft_weight: float = Field(0.0, ge=0)
    """Weight of an added term: the cross entropy of the chosen answers, a mean over their tokens."""


class CPOObjectiveConfig(RecipeSection):
    """Contrastive preference optimisation: DPO without a reference, plus a cross entropy."""

    kind: Literal["cpo"]
    """The loss is a mean over the pairs of the global batch, its cross entropy a mean over tokens."""
    beta: float = Field(0.1, gt=0)
    """Factor of the log-probabilities."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Form of the loss. `ipo` compares means over tokens."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs with swapped labels, for `sigmoid`."""
    sft_weight: float = Field(1.0, ge=0)
    """Weight of the cross entropy of the chosen answers."""

    @model_validator(mode="after")
    def _check_smoothing(self) -> CPOObjectiveConfig:
        _refuse_unread_smoothing(self.loss_type, self.label_smoothing)
        return self


class RewardObjectiveConfig(RecipeSection):
    """A reward model (Bradley-Terry), trained to score chosen answers higher than rejected ones.

    The output layer returns one score for an answer.
    """

    kind: Literal["reward"]
    """The loss is a mean over the pairs of the global batch. Needs `data.kind: preference`."""
    margin_weight: float = Field(1.0, ge=0)
    """Factor of a pair's margin, by which its scores should differ, if the data has one (`margin`, or
    scores of both answers)."""
    center_weight: float = Field(0.0, ge=0)
    """Weight of an added term, the square of the sum of a pair's scores. It keeps scores around 0."""


def _refuse_unread_smoothing(loss_type: str, label_smoothing: float) -> None:
    if label_smoothing and loss_type in ("hinge", "ipo"):
        raise ValueError(
            f"label_smoothing is {label_smoothing:g}, and the loss {loss_type} has none; remove it, or use "
            "loss_type: sigmoid"
        )


class CustomObjectiveConfig(RecipeSection):
    """Your own loss."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:function`. It is called as `function(outputs, batch)` and returns the loss.
    The key runs that code; `--no-import-paths` refuses it."""
    reduction: Literal["sum", "mean"] | None = None
    """Result of the function: the `sum` over a micro-batch, or the `mean` over its targets. A mean is
    multiplied by the number of targets, so that the loss is the mean over the global batch. Default: `sum`;
    a function that seems to return a mean is then an error."""


def _get_tag(value: Any) -> str | None:
    """Return the tag of a section's class: `auto` if it has no key `kind`.

    `None` if the value is no section, or its kind is null.
    """
    if isinstance(value, dict) and "kind" not in value:
        return "auto"
    return get_kind_tag(value)


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
    Discriminator(_get_tag),
]
