"""What a token costs a model, by the formula that published figures use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pipeline.models.of_transformers import is_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def flops_per_token(
    model: nn.Module, sequence_length: int | None, causal: bool = False, *, frozen: bool = False
) -> float | None:
    """FLOPs of forward and backward a token of a row: 6N + 12 L d T (Kaplan et al. 2020; PaLM, appendix B).

    N counts the elements of every matrix that a token is multiplied by: a head once, tied or not, no table
    that is looked up in, and of a mixture of experts those that the router chooses. d is heads times their
    width, whatever the keys' heads are. Attention is over the row, of several documents or one, or over a
    layer's window where that is shorter. Recomputation under activation checkpointing is left out.

    Args:
        model: Any part of it, under any split: only its transformers config is read.
        sequence_length: T, tokens in a row; None: rows are no text.
        causal: Count the keys that a token sees, half of the row on average, in place of the whole row.
        frozen: The matrices are not trained, as under an adapter, whose own are left out: 4N.

    Returns:
        None where the model has no such config.
    """
    if sequence_length is None:
        return None
    products = _products(model, sequence_length, causal)
    if products is None:
        return None
    return (4.0 if frozen else 6.0) * (products.blocks + products.head) + 6.0 * products.attention


def block_flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """What of it is the forward of the repeated blocks, which activation checkpointing makes again: a bound,
    since torch leaves out a block's last product, whose result nobody keeps. 0 where it is not known.
    """
    products = _products(model, sequence_length, causal=False)
    return 0.0 if products is None else 2.0 * (products.blocks + products.attention)


class Products(NamedTuple):
    """Multiplications and additions of a token's forward."""

    blocks: float
    """By the matrices of the blocks."""
    head: float
    """By other matrices."""
    attention: float


def _products(model: nn.Module, sequence_length: int, causal: bool) -> Products | None:
    config: Any = getattr(model, "config", None)
    if not is_config(config):
        return None
    from transformers import AutoModelForCausalLM

    text: Any = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Multi-head latent attention has other widths for keys and values.
    widths = (getattr(text, "qk_head_dim", None) or width) + (getattr(text, "v_head_dim", None) or width)
    keys = sum(_keys(window, sequence_length, causal) for window in _windows(text))
    return Products(*_matrix_elements(config, text), attention=heads * widths * keys)


def fp8_share(model: nn.Module, recipe: str, cost: float | None) -> float:
    """The part of those FLOPs that is multiplied in fp8: the three products of its layers, or two of them.

    Args:
        recipe: `model.fp8`.
        cost: What `flops_per_token` gives.
    """
    if recipe == "none" or cost is None:
        return 0.0
    from pipeline.models.fp8 import linear_layers

    whole = _without_values(model.config)
    elements = sum(layer.in_features * layer.out_features for layer in linear_layers(whole))
    return (4.0 if recipe == "rowwise_with_gw_hp" else 6.0) * elements / cost


def _without_values(config: Any) -> Any:
    """The whole model."""
    from pipeline.models.reward_model import model_class

    with torch.device("meta"):
        return model_class(config).from_config(config)


def _windows(text: Any) -> list[float]:
    """How far back each layer looks: infinity, a window, or 0 where it keeps a state in place of keys."""
    window = getattr(text, "sliding_window", None) or float("inf")
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # a window without kinds of layers is every layer's
        return [window] * text.num_hidden_layers
    chunk = getattr(text, "attention_chunk_size", None) or float("inf")
    of_kind = {"full_attention": float("inf"), "sliding_attention": window, "chunked_attention": chunk}
    return [of_kind.get(kind, 0.0) for kind in kinds]


def _keys(window: float, length: int, causal: bool) -> float:
    """Keys a token meets: of the row or the window; `causal`: the mean over a row that fills up."""
    most = min(window, length)
    return most - most**2 / (2 * length) if causal else most


def _matrix_elements(config: PreTrainedConfig, text: Any) -> tuple[float, float]:
    """Of what a token is multiplied by, in the blocks and outside of them, from the shapes of the whole
    model: a split holds parts of them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    whole = _without_values(config)
    tables = {id(module.weight) for module in whole.modules() if isinstance(module, nn.Embedding)}
    head = whole.get_output_embeddings()
    if head is not None:
        tables.discard(id(head.weight))
    experts = next((n for key in _NUM_EXPERTS if (n := getattr(text, key, None))), 1)
    chosen = next((n for key in _CHOSEN if (n := getattr(text, key, None))), experts)
    blocks = [module for module in whole.modules() if isinstance(module, GradientCheckpointingLayer)]
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    elements = {True: 0.0, False: 0.0}
    for name, p in whole.named_parameters():
        if p.dim() > 1 and not name.endswith("bias") and id(p) not in tables:
            part = chosen / experts if ".experts." in name else 1.0
            elements[id(p) in in_blocks] += p.numel() * part
    return elements[True], elements[False]


_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k")
