"""The objective's part of the recipe; `kind` chooses one of the sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from pipeline.config.model_schema import IMPORT_PATH, Closed, kind_tag


class _Weighted(Closed):
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


class _Unweighted(Closed):
    @model_validator(mode="before")
    @classmethod
    def _of_an_older_recipe(cls, section: Any) -> Any:
        """Runs once kept classification's keys, at their defaults, with every kind."""
        if not isinstance(section, dict):
            return section
        defaults = {key: field.default for key, field in _Weighted.model_fields.items()}
        return {key: v for key, v in section.items() if key not in defaults or v != defaults[key]}


class CausalLMObjectiveConfig(_Unweighted):
    """The cross entropy of the next token."""

    kind: Literal["causal_lm"]
    """Tokens whose label is -100 do not count."""


class ModelLossObjectiveConfig(_Unweighted):
    """The loss that the model computes itself."""

    kind: Literal["model_loss"]
    """The model is called with the targets too and returns the mean loss of the samples it was given."""


class CustomObjectiveConfig(_Unweighted):
    """A loss of your own."""

    kind: str = Field(pattern=IMPORT_PATH)
    """`package.module:function` with `function(outputs, batch) -> loss_sum`. It runs that code;
    `--no-import-paths` refuses it."""


def _tag(value: Any) -> str | None:
    is_section = isinstance(value, (dict, Closed))
    return kind_tag(value) or ("auto" if is_section else None)


ObjectiveConfig = Annotated[
    Annotated[AutoObjectiveConfig, Tag("auto")]
    | Annotated[CausalLMObjectiveConfig, Tag("causal_lm")]
    | Annotated[ClassificationObjectiveConfig, Tag("classification")]
    | Annotated[ModelLossObjectiveConfig, Tag("model_loss")]
    | Annotated[CustomObjectiveConfig, Tag("custom")],
    Discriminator(_tag),
]
