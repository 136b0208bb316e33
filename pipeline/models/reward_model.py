"""Language models of transformers whose output layer gives one number, a score, in the place of logits.

Weights have the names of transformers' sequence classification, which opens what is exported.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from pipeline.errors import ModelError

SCORE = "score.weight"


def is_reward_model(config: PretrainedConfig) -> bool:
    """Whether a folder's configuration is that of a model that scores."""
    names = getattr(config, "architectures", None) or [""]
    return str(names[0]).endswith("ForSequenceClassification") and config.num_labels == 1


def model_class(config: PretrainedConfig) -> Any:
    """Of a configuration that says what the model is: has `from_config` and `from_pretrained`."""
    return reward_model_class(config) if is_reward_model(config) else AutoModelForCausalLM


def reward_model_class(config: PretrainedConfig) -> Any:
    """The class for this configuration, which is made one of a model that scores; it has the auto classes'
    `from_config` and `from_pretrained`.

    Raises:
        ModelError: transformers has none.
    """
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if causal is None or named is None:
        raise ModelError(
            f"objective.kind: reward: transformers has no model of type {config.model_type} for sequence "
            "classification, as which it is exported; use another model"
        )
    config.num_labels = 1
    config.tie_word_embeddings = False
    return _scoring(causal, named.__name__)


@cache
def _scoring(causal: Any, name: str) -> Any:
    ignored = list(getattr(causal, "_keys_to_ignore_on_load_unexpected", None) or ())

    class Scoring(causal):
        # The output layer is neither tied nor cut.
        _tied_weights_keys: ClassVar[dict[str, str]] = {}
        _tp_plan: ClassVar[dict[str, str]] = {}
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*ignored, r"^(lm_head|embed_out)\."]
        drawn_beside_weights = (SCORE,)

        def __init__(self, config: Any, *given: Any, **named: Any):
            super().__init__(config, *given, **named)
            head = self.get_output_embeddings()
            self._head_name = next(name for name, child in self.named_children() if child is head)
            del self._modules[self._head_name]
            self.score = nn.Linear(head.in_features, 1, bias=False)

        @property
        def generate(self) -> Any:
            raise AttributeError("it writes no text")

        @classmethod
        def from_config(cls, config: Any, *, trust_remote_code: bool = False, **how: Any) -> Any:
            """As AutoModelForCausalLM has it. The class is there, so no code is fetched."""
            return cls._from_config(config, **how)

        def __getattr__(self, name: str) -> Any:
            is_head = name == self.__dict__.get("_head_name")
            return super().__getattr__("score" if is_head else name)

    Scoring.__name__ = Scoring.__qualname__ = name
    return Scoring
