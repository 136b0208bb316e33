"""A small model whose weights are a formula, so that its values are the same on any machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 64


def small_model(
    phase: float, kind: Callable[[LlamaConfig], PreTrainedModel] = LlamaForCausalLM
) -> PreTrainedModel:
    """Another phase is another model: the reference."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_labels=1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,  # with one transformers does not look for several answers in a row
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = kind(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            values = torch.sin(places * (0.7 + 0.013 * number) + phase * torch.cos(3 * places)) * 0.25
            if parameter.dim() == 1:
                values += 1
            parameter.copy_(values.view(parameter.shape))
    return model


def margin_of(pair: dict[str, list[int]]) -> float:
    """One that is some formula's too."""
    return len(pair["chosen"]) / 4
