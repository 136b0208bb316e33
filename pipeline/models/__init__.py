"""Builds the nn.Module that a recipe names.

Initial weights depend on the seed alone, not on the split, the precision or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeline.config.model_schema import CausalLMConfig, ModelConfig
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.models.custom import build_cnn, build_custom
from pipeline.models.sharding import ModelRequest


@tag_errors(Phase.MODEL)
def build_model(config: ModelConfig, request: ModelRequest, seed: int) -> nn.Module:
    """Return the model that the recipe names, built, divided and placed by `request.sharding`.

    With NoSharding it is whole, in fp32 on the CPU. torch's global random numbers are seeded with `seed`.

    Raises:
        ModelError: The model cannot be built or does not fit the data, or its weights do not fit the model.
    """
    torch.manual_seed(seed)
    build = MODELS.get(config.kind, build_custom)
    model = build(config, request)
    request.sharding.divide(model)
    request.sharding.place(model, request.draws)
    return model


def _build_causal_lm(config: CausalLMConfig, request: ModelRequest) -> nn.Module:
    from pipeline.models.huggingface import build_causal_lm  # imports transformers, which takes seconds

    return build_causal_lm(config, request)


MODELS: dict[str, Callable[[Any, ModelRequest], nn.Module]] = {
    "causal_lm": _build_causal_lm,
    "cnn": build_cnn,
}
"""Builder of each `model.kind`. Any other kind is an import path, which `build_custom` calls."""
