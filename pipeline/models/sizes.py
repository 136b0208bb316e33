"""A module's parameters as the planner's formulas take them: names and shapes, wherever the values lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from pipeline.models.frozen_base import is_transposed, linears
from pipeline.models.of_transformers import is_config
from pipeline.planning.model import Dimensions, Model, Parameter

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def model_of(module: nn.Module, named: Iterable[tuple[str, nn.Parameter]] | None = None) -> Model:
    """The model, whole where ZeRO 3 holds it in shards; of a part that was cut, that part.

    Args:
        named: Its parameters, where the module's own names are not those of the whole model.
    """
    parameters = module.named_parameters() if named is None else named
    config = getattr(module, "config", None)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    layers = {f"{name}.weight": module.get_submodule(name) for name in linears(module)}
    found = tuple(
        Parameter(name, _shape(p), p.requires_grad, _layer(layers.get(name), head)) for name, p in parameters
    )
    name = str(getattr(config, "model_type", type(module).__name__))
    return Model(name, found, _dimensions(config))


def _shape(parameter: Any) -> tuple[int, ...]:
    if hasattr(parameter, "quant_state"):
        return tuple(parameter.quant_state.shape)
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _layer(layer: nn.Module | None, head: nn.Module | None) -> Any:
    if layer is None or layer is head:
        return None
    return "transposed" if is_transposed(layer) else "linear"


def _dimensions(config: Any) -> Dimensions | None:
    """Of a language model of transformers."""
    if not is_config(config):
        return None
    text: Any = config.get_text_config()
    heads, hidden, layers = (
        getattr(text, key, None) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(layers, int)):
        return None
    experts = next((n for key in EXPERTS if (n := getattr(text, key, None))), 0)
    given = (getattr(text, key, None) for key in ("intermediate_size", "n_inner"))  # the latter GPT-2's
    intermediate = next(filter(None, given), 4 * hidden)
    if experts:
        intermediate = getattr(text, "moe_intermediate_size", None) or intermediate
    return Dimensions(
        family=str(config.model_type),
        layers=layers,
        hidden=hidden,
        intermediate=int(intermediate),
        heads=heads,
        key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or hidden // heads),
        vocabulary=int(text.vocab_size),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=getattr(text, "num_experts_per_tok", None) or 0,
    )
