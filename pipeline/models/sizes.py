"""Sizes of a model for the planner and for perf/mfu: names and shapes of parameters, and operations."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pipeline.config.import_paths import import_object
from pipeline.config.schema import RunConfig
from pipeline.errors import ModelError, PipelineError, summarize_error
from pipeline.models import build_model
from pipeline.models.frozen_base import find_linear_layers, is_transposed
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.transformers_facts import is_transformers_config
from pipeline.planner.model import DecoderDimensions, ModelSpec, ParameterSpec
from pipeline.planner.shapes import mark_trained, read_vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k")


def measure_module(module: nn.Module, named: Iterable[tuple[str, nn.Parameter]] | None = None) -> ModelSpec:
    """Return the sizes of a model or a part of one; under ZeRO 3, sizes are those of whole parameters.

    Args:
        module: The model or a part of it.
        named: The parameters by their names in the whole model, if the module's own names differ.
    """
    parameters = module.named_parameters() if named is None else named
    config = getattr(module, "config", None)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    layers = {f"{name}.weight": module.get_submodule(name) for name in find_linear_layers(module)}
    specs = tuple(
        ParameterSpec(name, _get_shape(p), p.requires_grad, _describe_layer(layers.get(name), head))
        for name, p in parameters
    )
    name = str(getattr(config, "model_type", type(module).__name__))
    return ModelSpec(name, specs, _read_dimensions(config))


def _get_shape(parameter: Any) -> tuple[int, ...]:
    if hasattr(parameter, "quant_state"):
        return tuple(parameter.quant_state.shape)
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _describe_layer(layer: nn.Module | None, head: nn.Module | None) -> Any:
    if layer is None or layer is head:
        return None
    return "transposed" if is_transposed(layer) else "linear"


def _read_first(config: Any, names: Iterable[str], default: int) -> Any:
    """Return the value of the first of these fields that the config has and that is not 0."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return default


def _read_dimensions(config: Any) -> DecoderDimensions | None:
    """Return the dimensions of a language model of transformers; `None` for any other model."""
    if not is_transformers_config(config):
        return None
    text: Any = config.get_text_config()
    heads, hidden, layers = (
        getattr(text, key, None) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(layers, int)):
        return None
    experts = _read_first(text, EXPERTS, 0)
    given = (getattr(text, key, None) for key in ("intermediate_size", "n_inner"))  # n_inner is GPT-2's
    intermediate = next(filter(None, given), 4 * hidden)
    if experts:
        intermediate = getattr(text, "moe_intermediate_size", None) or intermediate
    return DecoderDimensions(
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


log = logging.getLogger(__name__)

CLASSES = {"digits": 10}  # number of classes by data kind; other kinds count as ImageNet, with 1,000


class Unfilled(NoSharding):
    """Builds a model without values."""

    def construct(self) -> Any:
        """Return the meta device as a context."""
        return torch.device("meta")


def measure_recipe(config: RunConfig) -> ModelSpec:
    """Return names and shapes of the parameters of the model that a recipe trains.

    Raises:
        ModelError: The model cannot be built, or not without values.
    """
    section = config.model
    try:
        module = _build_module(config)
    except PipelineError:
        raise
    except Exception as error:  # from the user's code, or from a library that needs values
        log.debug("%s cannot be built without values", section.kind, exc_info=True)
        raise ModelError(
            "model: its parameters cannot be counted without building it "
            f"({type(error).__name__}: {summarize_error(error)}); start a run, which prints its memory "
            "before the first step"
        ) from None
    language = section.language_model
    name = section.kind if language is None else language.pretrained or language.architecture or section.kind
    return mark_trained(replace(measure_module(module), name=name), section.freeze, config.adapter)


def _build_module(config: RunConfig) -> nn.Module:
    section = config.model
    vocabulary_size = read_vocabulary_size(config)
    if section.custom is not None:
        with torch.device("meta"):
            module = import_object(section.kind, ModelError)(**section.custom.args)
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"model.kind: {section.kind} returned a {type(module).__name__}, not an nn.Module"
            )
        return module
    language = section.language_model
    if language is not None and language.pretrained is not None:
        from pipeline.models.huggingface import get_model_class, get_reward_model_class, read_model_config

        _, hf_config = read_model_config(language)
        if language.grow_vocabulary:
            text = hf_config.get_text_config()
            text.vocab_size = max(vocabulary_size or 0, text.vocab_size)
        is_reward = config.objective.kind == "reward"
        whole_model: nn.Module
        with torch.device("meta"):
            whole_model = (get_reward_model_class if is_reward else get_model_class)(hf_config).from_config(
                hf_config
            )
        return whole_model
    cnn = section.cnn
    images = config.data.images
    request = ModelRequest(
        Unfilled(),
        vocab_size=vocabulary_size,
        sequence_length=config.data.tokens_per_row,
        longest=1 if config.data.kind == "preference" else None,  # known once the answers are prepared
        num_classes=(cnn.num_classes if cnn is not None else None) or CLASSES.get(config.data.kind, 1000),
        num_channels=images.channels if images is not None else None,
        gives_scores=config.objective.kind == "reward",
        draws=False,
    )
    return build_model(section, request, config.seed)


def flops_per_token(
    model: nn.Module, sequence_length: int | None, causal: bool = False, *, frozen: bool = False
) -> float | None:
    """Return FLOPs of forward and backward a token: 6N + 12 L d T (Kaplan et al. 2020; PaLM, appendix B).

    N counts the elements of every matrix that a token is multiplied by: the head once, tied or not, no lookup
    table, and of a mixture of experts those that the router chooses. d is the number of query heads times
    their width. Attention covers the whole row, packed or not, as in published figures, or a layer's window
    if that is shorter. Recomputation under activation checkpointing is not counted.

    Args:
        model: Any part of the model, under any split: only its transformers config is read.
        sequence_length: T, tokens in a row; `None`: rows are no text.
        causal: Whether to count the keys that a token sees, half of the row on average, not the whole row.
        frozen: Whether the matrices are not trained, as under an adapter (4N); the adapter is not counted.

    Returns:
        The FLOPs; `None` if the model has no config of a transformers language model.
    """
    if sequence_length is None:
        return None
    products = _count_products(model, sequence_length, causal)
    if products is None:
        return None
    return (4.0 if frozen else 6.0) * (products.blocks + products.head) + 6.0 * products.attention


def block_flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Return the FLOPs a token of the blocks' forward, which activation checkpointing repeats; 0 if unknown.

    This is an upper bound: torch skips a block's last product in the recomputation, since no gradient needs
    its result.
    """
    products = _count_products(model, sequence_length, causal=False)
    return 0.0 if products is None else 2.0 * (products.blocks + products.attention)


class Products(NamedTuple):
    """Numbers of multiply-add operations in the forward of one token."""

    blocks: float
    """Number of products with the matrices of blocks."""
    head: float
    """Number of products with other matrices."""
    attention: float
    """Number of products in attention."""


def _count_products(model: nn.Module, sequence_length: int, causal: bool) -> Products | None:
    config: Any = getattr(model, "config", None)
    if not is_transformers_config(config):
        return None
    from transformers import AutoModelForCausalLM

    text: Any = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Multi-head latent attention has other widths for keys and values.
    widths = (getattr(text, "qk_head_dim", None) or width) + (getattr(text, "v_head_dim", None) or width)
    keys = sum(_count_keys(window, sequence_length, causal) for window in _list_windows(text))
    return Products(*_count_matrix_elements(config, text), attention=heads * widths * keys)


def compute_fp8_share(model: nn.Module, recipe: str, cost: float | None) -> float:
    """Return the share of a token's FLOPs that is in fp8: three products of each fp8 layer, or two.

    Args:
        model: The model, of which the config is read.
        recipe: The recipe's `model.fp8`.
        cost: The result of `flops_per_token`.
    """
    if recipe == "none" or cost is None:
        return 0.0
    from pipeline.models.fp8 import find_fp8_layers

    whole = _build_without_values(model.config)
    elements = sum(layer.in_features * layer.out_features for layer in find_fp8_layers(whole))
    return (4.0 if recipe == "rowwise_with_gw_hp" else 6.0) * elements / cost


def _build_without_values(config: Any) -> Any:
    """Return the whole model of a config, without values."""
    from pipeline.models.huggingface import get_model_class

    with torch.device("meta"):
        return get_model_class(config).from_config(config)


def _list_windows(text: Any) -> list[float]:
    """Return the number of keys back that each layer attends to: infinity, a window, or 0 without keys."""
    window = getattr(text, "sliding_window", None) or float("inf")
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # without layer types, every layer has the window
        return [window] * text.num_hidden_layers
    chunk = getattr(text, "attention_chunk_size", None) or float("inf")
    of_kind = {"full_attention": float("inf"), "sliding_attention": window, "chunked_attention": chunk}
    return [of_kind.get(kind, 0.0) for kind in kinds]


def _count_keys(window: float, length: int, causal: bool) -> float:
    """Return the number of keys of a token: of the row or the window, or their causal mean over the row."""
    most = min(window, length)
    return most - most**2 / (2 * length) if causal else most


def _count_matrix_elements(config: PreTrainedConfig, text: Any) -> tuple[float, float]:
    """Return the numbers of matrix elements that a token is multiplied by: in blocks, and outside of them.

    They are counted in a whole model without values, since under a split a rank holds parts of it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    whole = _build_without_values(config)
    tables = {id(module.weight) for module in whole.modules() if isinstance(module, nn.Embedding)}
    head = whole.get_output_embeddings()
    if head is not None:
        tables.discard(id(head.weight))
    experts = _read_first(text, EXPERTS, 1)
    chosen = _read_first(text, CHOSEN, experts)
    blocks = [module for module in whole.modules() if isinstance(module, GradientCheckpointingLayer)]
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    elements = {True: 0.0, False: 0.0}
    for name, p in whole.named_parameters():
        if p.dim() > 1 and not name.endswith("bias") and id(p) not in tables:
            part = chosen / experts if ".experts." in name else 1.0
            elements[id(p) in in_blocks] += p.numel() * part
    return elements[True], elements[False]
