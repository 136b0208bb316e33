"""What a token costs a model, by the formula that published figures use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.models.of_transformers import is_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def flops_per_token(model: nn.Module, sequence_length: int | None) -> float | None:
    """FLOPs of forward and backward a token of a row: 6N + 12 L d T (Kaplan et al. 2020; PaLM, appendix B).

    N counts every parameter that a token meets: of a mixture of experts, those the router chooses. The second
    term is attention over the row. Recomputation under activation checkpointing is left out. (torch's
    FlopCounterMode would count it, and cannot run transformers' models on the meta device: their masks read
    values.)

    Args:
        model: Any part of it, under any split: only its transformers config is read.
        sequence_length: T, tokens in a row; None: rows are no text.

    Returns:
        None where the model has no such config.
    """
    config: Any = getattr(model, "config", None)
    if sequence_length is None or not is_config(config):
        return None
    from transformers import AutoModelForCausalLM

    text: Any = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    active = _active_parameters(config, text)
    return 6.0 * active + 12.0 * text.num_hidden_layers * width * sequence_length


def _active_parameters(config: PreTrainedConfig, text: Any) -> float:
    """How many parameters a token meets, from the shapes of the whole model: a split holds parts of them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    experts = next((n for key in _NUM_EXPERTS if (n := getattr(text, key, None))), 1)
    share = getattr(text, "num_experts_per_tok", experts) / experts
    return sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in whole.named_parameters())


_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
