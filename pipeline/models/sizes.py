"""Sizes of a model for the planner and for perf/mfu: names and shapes of parameters, and FLOPs."""

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


log = logging.getLogger(__name__)

# Fields of transformers' configs with the number of experts of a layer, and with the number of experts that a
# router chooses for each token.
NUM_EXPERTS_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN_FIELDS = ("num_experts_per_tok", "moe_k")

# Number of classes for a data kind whose recipe states none; for other kinds IMAGENET_CLASSES.
NUM_CLASSES = {"digits": 10}
IMAGENET_CLASSES = 1000


def measure_module(
    module: nn.Module, named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None
) -> ModelSpec:
    """Return the sizes of a model or a part of one. Under ZeRO 3, shapes are those of undivided parameters.

    Args:
        module: The model or a part of it.
        named_parameters: The parameters with their names in the whole model; `None`: the module's own names.
    """
    parameters = module.named_parameters() if named_parameters is None else named_parameters
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
    """Return the shape of a parameter before quantization, and before ZeRO 3 divides it."""
    if hasattr(parameter, "quant_state"):
        return tuple(parameter.quant_state.shape)
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _describe_layer(layer: nn.Module | None, head: nn.Module | None) -> Any:
    """Return the layout of a linear layer's weight; see ParameterSpec.layer."""
    if layer is None or layer is head:
        return None
    return "transposed" if is_transposed(layer) else "linear"


def _read_first(config: Any, names: Iterable[str], default: int) -> Any:
    """Return the first of these fields that the config has, and that is not 0; `default` if there is none."""
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
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    layers = getattr(text, "num_hidden_layers", None)
    if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(layers, int)):
        return None
    experts = _read_first(text, NUM_EXPERTS_FIELDS, 0)
    # n_inner is the name in GPT-2's config, where None stands for 4 times the hidden size.
    intermediate = _read_first(text, ("intermediate_size", "n_inner"), 4 * hidden)
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


class MetaDeviceSharding(NoSharding):
    """Builds a model without values: on the meta device."""

    def construct(self) -> Any:
        """Return a context in which tensors are on the meta device."""
        return torch.device("meta")


def measure_recipe(config: RunConfig) -> ModelSpec:
    """Return names and shapes of the parameters of the model that a recipe trains.

    The model is built without values. A model of the user's own runs the user's code.

    Raises:
        ModelError: The model cannot be built, or cannot be built without values.
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
    name = section.kind
    if language is not None:
        name = language.pretrained or language.architecture or section.kind
    return mark_trained(replace(measure_module(module), name=name), section.freeze, config.adapter)


def _build_module(config: RunConfig) -> nn.Module:
    """Return the recipe's model on the meta device, as it is before an adapter is added."""
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

        _, hf_config = read_model_config(language.pretrained, language.trust_remote_code)
        if language.grow_vocabulary:
            text = hf_config.get_text_config()
            text.vocab_size = max(vocabulary_size or 0, text.vocab_size)
        if config.objective.kind == "reward":
            model_class = get_reward_model_class(hf_config)
        else:
            model_class = get_model_class(hf_config)
        pretrained_model: nn.Module
        with torch.device("meta"):
            pretrained_model = model_class.from_config(hf_config)
        return pretrained_model
    cnn = section.cnn
    num_classes = cnn.num_classes if cnn is not None else None
    images = config.data.images
    request = ModelRequest(
        MetaDeviceSharding(),
        vocab_size=vocabulary_size,
        sequence_length=config.data.tokens_per_row,
        # The longest row of preferences is known only when they are prepared. 1 passes the check against the
        # number of positions of the model.
        longest=1 if config.data.kind == "preference" else None,
        num_classes=num_classes or NUM_CLASSES.get(config.data.kind, IMAGENET_CLASSES),
        num_channels=images.channels if images is not None else None,
        gives_scores=config.objective.kind == "reward",
        draws=False,
    )
    return build_model(section, request, config.seed)


def flops_per_token(
    model: nn.Module, sequence_length: int | None, causal: bool = False, *, frozen: bool = False
) -> float | None:
    """Return FLOPs of forward and backward for a token: 6N + 12LdT (Kaplan et al. 2020; PaLM, appendix B).

    N is the number of elements of all matrices that a token is multiplied by. The head counts once, tied or
    not; embeddings do not count; of a mixture of experts, the experts that a router chooses count. L is the
    number of layers, and d the number of query heads times their width. A token attends to its whole row,
    packed or not, as in published figures, or to a layer's window if that is shorter. Recomputation under
    activation checkpointing does not count.

    Args:
        model: Any part of the model, under any split: only its transformers config is read.
        sequence_length: T, the number of tokens in a row; `None` if rows are not text.
        causal: Whether to count only the keys before a token, half of the row on average, not the whole row.
        frozen: Whether the matrices are not trained, as under an adapter. Then the first term is 4N, and the
            adapter does not count.

    Returns:
        The FLOPs; `None` if rows are not text, or the model has no config of a transformers language model.
    """
    if sequence_length is None:
        return None
    counts = _count_multiply_adds(model, sequence_length, causal)
    if counts is None:
        return None
    flops_per_element = 4.0 if frozen else 6.0
    return flops_per_element * (counts.blocks + counts.outside) + 6.0 * counts.attention


def block_flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Return the FLOPs of all blocks' forward for a token; 0 if the model is no transformers language model.

    These are an upper bound of what activation checkpointing repeats: torch skips a block's last product in
    the recomputation, since no gradient needs its result.
    """
    counts = _count_multiply_adds(model, sequence_length, causal=False)
    return 0.0 if counts is None else 2.0 * (counts.blocks + counts.attention)


class MultiplyAdds(NamedTuple):
    """Numbers of multiply-add operations in the forward of one token; each is 2 FLOPs."""

    blocks: float
    """Number for the matrices of blocks."""
    outside: float
    """Number for the matrices outside of blocks, such as the head."""
    attention: float
    """Number for queries with keys, and for attention weights with values."""


def _count_multiply_adds(model: nn.Module, sequence_length: int, causal: bool) -> MultiplyAdds | None:
    """Return the multiply-adds of a token; `None` if the model is no transformers language model."""
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
    key_width = getattr(text, "qk_head_dim", None) or width
    value_width = getattr(text, "v_head_dim", None) or width
    num_keys = sum(_count_keys(window, sequence_length, causal) for window in _list_windows(text))
    in_blocks, outside = _count_matrix_elements(config, text)
    return MultiplyAdds(
        blocks=in_blocks, outside=outside, attention=heads * (key_width + value_width) * num_keys
    )


def compute_fp8_share(model: nn.Module, scaling: str, token_flops: float | None) -> float:
    """Return the share of a token's FLOPs that is in fp8, from 0 to 1.

    An fp8 layer computes its output and two gradients. All three products are in fp8, except that
    `rowwise_with_gw_hp` computes the gradient of the weight in high precision.

    Args:
        model: The model; only its config is read.
        scaling: The value of `model.fp8`.
        token_flops: The result of `flops_per_token`.
    """
    if scaling == "none" or token_flops is None:
        return 0.0
    from pipeline.models.fp8 import find_fp8_layers

    full_model = _build_without_values(model.config)
    elements = sum(layer.in_features * layer.out_features for layer in find_fp8_layers(full_model))
    flops_per_element = 4.0 if scaling == "rowwise_with_gw_hp" else 6.0
    return flops_per_element * elements / token_flops


def _build_without_values(config: Any) -> Any:
    """Return the undivided model of a config, on the meta device."""
    from pipeline.models.huggingface import get_model_class

    with torch.device("meta"):
        return get_model_class(config).from_config(config)


def _list_windows(text: Any) -> list[float]:
    """Return the number of tokens back that each layer attends to.

    It is infinity without a window, and 0 for a layer without attention.
    """
    window = getattr(text, "sliding_window", None) or float("inf")
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # without layer types, every layer has the window
        return [window] * text.num_hidden_layers
    chunk = getattr(text, "attention_chunk_size", None) or float("inf")
    windows = {"full_attention": float("inf"), "sliding_attention": window, "chunked_attention": chunk}
    return [windows.get(kind, 0.0) for kind in kinds]


def _count_keys(window: float, length: int, causal: bool) -> float:
    """Return the number of keys that a token attends to: the tokens of the row, or of the window if shorter.

    If `causal`, masked keys do not count, and the result is the mean over the tokens of the row.
    """
    max_keys = min(window, length)
    return max_keys - max_keys**2 / (2 * length) if causal else max_keys


def _count_matrix_elements(config: PreTrainedConfig, text: Any) -> tuple[float, float]:
    """Return the numbers of matrix elements that a token is multiplied by: in blocks, and outside of them.

    They are counted in an undivided model without values, since under a split a rank has only parts of it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    full_model = _build_without_values(config)
    embedding_ids = {id(m.weight) for m in full_model.modules() if isinstance(m, nn.Embedding)}
    head = full_model.get_output_embeddings()
    if head is not None:
        embedding_ids.discard(id(head.weight))  # tied: the head multiplies by it
    num_experts = _read_first(text, NUM_EXPERTS_FIELDS, 1)
    experts_per_token = _read_first(text, EXPERTS_PER_TOKEN_FIELDS, num_experts)
    blocks = [module for module in full_model.modules() if isinstance(module, GradientCheckpointingLayer)]
    block_ids = {id(p) for block in blocks for p in block.parameters()}
    in_blocks = 0.0
    outside = 0.0
    for name, p in full_model.named_parameters():
        is_matrix = p.dim() > 1 and not name.endswith("bias")
        if not is_matrix or id(p) in embedding_ids:
            continue
        used_share = experts_per_token / num_experts if ".experts." in name else 1.0
        if id(p) in block_ids:
            in_blocks += p.numel() * used_share
        else:
            outside += p.numel() * used_share
    return in_blocks, outside
