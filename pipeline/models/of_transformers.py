"""What is transformers', without importing it: that takes longer than torch, and not every model needs it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def is_model(value: object) -> TypeGuard[PreTrainedModel]:
    """Who has one has imported its class."""
    return _is(value, "transformers.modeling_utils", "PreTrainedModel")


def is_generator(value: object) -> bool:
    """Has transformers' own `generate`, or one of its own on top."""
    return _is(value, "transformers.generation.utils", "GenerationMixin")


def is_config(value: object) -> TypeGuard[PreTrainedConfig]:
    return _is(value, "transformers.configuration_utils", "PreTrainedConfig")


def caps_scores(config: PreTrainedConfig) -> bool:
    """Whether attention bounds its scores, as in Gemma 2."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def _is(value: object, module: str, name: str) -> bool:
    imported = sys.modules.get(module)
    return imported is not None and isinstance(value, getattr(imported, name))
