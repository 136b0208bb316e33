"""The transforms that every model goes through after it has weights and before it is compiled, in order.

A transform takes the model and returns it, changed or wrapped; parameters have the whole model's names. Under
ZeRO 3 the parameters are sharded already. Under AutoTP the model is divided later. With pipeline stages, a
transform must change the model in place and not wrap it, since the stages already refer to its layers. To add
a transform, write it and put it into TRANSFORMS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_map_only

from pipeline.config.model_schema import AdapterConfig, ModelConfig
from pipeline.config.patterns import match_parameters
from pipeline.distributed.process_group import Job
from pipeline.errors import ModelError
from pipeline.models.attention import choose_attention, refuse_document_leaks, refuse_lookahead
from pipeline.models.batch_norm import synchronize_batch_norm
from pipeline.models.embeddings import add_embedding_noise
from pipeline.models.sharding import Sharding
from pipeline.models.transformers_facts import is_transformers_model

log = logging.getLogger(__name__)

# With parameters in fp32, these layers compute in fp32 from inputs of any precision. ParametrizationList
# computes a weight from other parameters (weight_norm, spectral_norm).
FP32_LAYERS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    ParametrizationList,
)


def prepare_for_half_precision(model: nn.Module, device: torch.device) -> None:
    """Let the model compute under torch.autocast with parameters in half precision.

    FP32_LAYERS and their subclasses see their own parameters in fp32. Modules and parameters stay the same
    objects, under the same names.

    Args:
        model: The model; layers get a new `forward`, and hooks of spectral_norm are replaced.
        device: The device that the model will compute on.
    """
    for layer in model.modules():
        if isinstance(layer, FP32_LAYERS):
            layer.forward = partial(  # type: ignore[method-assign]
                _call_with_fp32_parameters, layer, type(layer).forward
            )
        elif isinstance(layer, nn.RNNBase):
            layer.forward = partial(_call_with_cast_inputs, layer, device.type)
        for key, hook in layer._forward_pre_hooks.items():
            if isinstance(hook, SpectralNorm):  # torch's older spectral_norm computes its weight in a hook
                layer._forward_pre_hooks[key] = partial(_run_hook_in_fp32, hook)


def _run_hook_in_fp32(hook: SpectralNorm, layer: nn.Module, inputs: Any) -> None:
    _call_with_fp32_parameters(layer, hook, inputs)


def _call_with_fp32_parameters(
    layer: nn.Module, compute: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return `compute(layer, ...)`, during which the layer's attributes are fp32 copies of its parameters."""
    # Looking a parameter up by name makes ZeRO-3 gather it, if it has not done so yet (as for a hook).
    parameters = {name: layer._parameters[name] for name in tuple(layer._parameters)}
    copies = {name: p.float() for name, p in parameters.items() if p is not None}
    # An attribute hides the parameter of its name, and ZeRO-3's own dictionary of parameters stays unchanged.
    vars(layer).update(copies)
    try:
        return compute(layer, *args, **kwargs)
    finally:
        for name in copies:
            del vars(layer)[name]


def _call_with_cast_inputs(layer: nn.Module, device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Call a recurrent layer without autocast, with its inputs in the dtype of its weights.

    Autocast's recurrent kernels do not take every mix of dtypes, and on a GPU they copy the weights in each
    forward.
    """
    dtype = next(layer.parameters(recurse=False)).dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    with torch.autocast(device_type, enabled=False):
        return type(layer).forward(layer, *args, **kwargs)


@dataclass(frozen=True)
class AdapterRequest:
    """Arguments of `adapters.add_adapter` besides the model and its dtype."""

    config: AdapterConfig
    """The recipe's adapter section."""
    seed: int
    """Seed of the adapter's initial values."""
    sharding: Sharding
    """Placement in which the model was built."""
    job: Job
    """Ranks, of which rank 0 reads `config.weights`."""


@dataclass(frozen=True)
class TransformContext:
    """Facts of the run for transforms, besides the recipe's model section."""

    device: torch.device
    """Device that the model will compute on."""
    dp_world_size: int = 1
    """Number of data-parallel ranks."""
    is_autocast: bool = False
    """Whether the engine's parameters are in half precision, while modules are written for fp32."""
    separate_documents: bool = False
    """Whether rows have several documents, separated by `position_ids` that restart at 0."""
    dtype: torch.dtype = torch.float32
    """Dtype of matrix products."""
    adapter: AdapterRequest | None = None
    """Adapter to train in place of the model's own parameters; `None`: train the model."""


Transform = Callable[[nn.Module, ModelConfig, TransformContext], nn.Module]
"""Function of (model, the recipe's model section, context) that returns the model, changed or wrapped."""


def freeze(model: nn.Module, config: ModelConfig, _: TransformContext) -> nn.Module:
    """Freeze the parameters that `model.freeze` matches, so that no optimizer takes them.

    Raises:
        ConfigError: A pattern matches nothing.
        ModelError: No parameter remains to train.
    """
    if not config.freeze:
        return model
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has several names
    frozen = {
        name for pattern in config.freeze for name in match_parameters(pattern, parameters, "model.freeze")
    }
    for name in frozen:
        parameters[name].requires_grad_(False)
    trained_number = sum(p.requires_grad for p in model.parameters())
    if not trained_number:
        raise ModelError(
            f"model.freeze: {', '.join(config.freeze)} match every parameter of the model, so nothing would "
            "be trained; match fewer"
        )
    total = sum(1 for _ in model.parameters())
    log.info("model.freeze: %d of %d parameter tensors are frozen", total - trained_number, total)
    return model


def apply_adapter(model: nn.Module, _: ModelConfig, context: TransformContext) -> nn.Module:
    """Add the recipe's `adapter`, and freeze the base. Collective."""
    request = context.adapter
    if request is not None:
        from pipeline.models.adapters import add_adapter  # imports peft, which takes seconds

        add_adapter(
            model,
            request.config,
            seed=request.seed,
            sharding=request.sharding,
            job=request.job,
            dtype=context.dtype,
        )
    return model


def add_noise_to_embeddings(model: nn.Module, config: ModelConfig, _: TransformContext) -> nn.Module:
    """Let the embeddings add the noise of `model.neftune_alpha` in training."""
    if config.neftune_alpha is not None:
        add_embedding_noise(model, config.neftune_alpha)
    return model


def fuse_gelu(model: nn.Module, _: ModelConfig, __: TransformContext) -> nn.Module:
    """Replace GPT-2's GELU, which takes eight operations in transformers, with torch's single operation."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "NewGELUActivation":
                setattr(module, name, nn.GELU(approximate="tanh"))
    return model


def recompute_activations(model: nn.Module, config: ModelConfig, context: TransformContext) -> nn.Module:
    """Set up `model.activation_checkpointing` for a language model of transformers."""
    section = config.language_model
    if section is not None and is_transformers_model(model):
        from pipeline.models.activation_checkpointing import enable_activation_checkpointing

        enable_activation_checkpointing(
            model,
            section.activation_checkpointing,
            section.activation_offload and context.device.type != "cpu",
        )
    return model


def set_attention(model: nn.Module, config: ModelConfig, context: TransformContext) -> nn.Module:
    """Choose the attention of a language model of transformers, as `model.attention` says."""
    section = config.language_model
    if section is not None and is_transformers_model(model):
        choose_attention(model, section.attention == "auto", context.device)
    return model


def refuse_noncausal_model(model: nn.Module, config: ModelConfig, context: TransformContext) -> nn.Module:
    """Refuse a language model that sees the tokens it predicts; a reward model may see all tokens."""
    if config.language_model is not None and is_transformers_model(model):
        from pipeline.models.huggingface import is_reward_config  # imports transformers

        if not is_reward_config(model.config):
            refuse_lookahead(model, context.device, context.dtype)
    return model


def refuse_mixed_documents(model: nn.Module, _: ModelConfig, context: TransformContext) -> nn.Module:
    """Refuse a model whose attention crosses the documents of a row, if rows have several documents."""
    if context.separate_documents:
        refuse_document_leaks(model, context.device, context.dtype)
    return model


def multiply_in_fp8(model: nn.Module, config: ModelConfig, context: TransformContext) -> nn.Module:
    """Let linear layers multiply in fp8, as `model.fp8` says."""
    section = config.language_model
    if section is not None and section.fp8 != "none":
        from pipeline.models.fp8 import convert_to_fp8  # imports torchao

        convert_to_fp8(model, section.fp8, context.device)
    return model


def synchronize_statistics(model: nn.Module, _: ModelConfig, context: TransformContext) -> nn.Module:
    """Let batch normalization count the samples of all data-parallel ranks."""
    if context.dp_world_size > 1:
        model = synchronize_batch_norm(model, None, context.device)
    return model


def prepare_precision(model: nn.Module, _: ModelConfig, context: TransformContext) -> nn.Module:
    """Let layers written for fp32 compute with parameters in half precision."""
    if context.is_autocast:
        prepare_for_half_precision(model, context.device)
    return model


# Applied in this order.
TRANSFORMS: tuple[Transform, ...] = (
    freeze,
    apply_adapter,
    add_noise_to_embeddings,
    fuse_gelu,
    recompute_activations,
    set_attention,
    refuse_noncausal_model,
    refuse_mixed_documents,
    multiply_in_fp8,
    synchronize_statistics,
    prepare_precision,
)


def apply_transforms(model: nn.Module, config: ModelConfig, context: TransformContext) -> nn.Module:
    """Return the model after all transforms.

    Raises:
        ConfigError: A pattern of the recipe matches nothing.
        ModelError: A transform cannot be applied to this model.
    """
    for transform in TRANSFORMS:
        model = transform(model, config, context)
    return model
