"""Modules written for fp32, computed with parameters in half precision and buffers as they were made.

So DeepSpeed holds them. torch.autocast settles the types of products; here are the layers it does not help.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_map_only

# Given parameters in fp32 they compute their statistics so, from inputs of any precision. The last computes a
# weight from others (weight_norm, spectral_norm).
IN_FP32 = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    ParametrizationList,
)


def prepare_for_half_precision(model: nn.Module, device: torch.device) -> None:
    """Lets the model be computed under torch.autocast with parameters in half precision.

    Normalisation layers (subclasses too) see their own parameters in fp32. Objects and names stay.
    """
    for layer in model.modules():
        if isinstance(layer, IN_FP32):
            layer.forward = partial(  # type: ignore[method-assign]
                _with_fp32_parameters, layer, type(layer).forward
            )
        elif isinstance(layer, nn.RNNBase):
            layer.forward = partial(_with_inputs_cast, layer, device.type)
        for key, hook in layer._forward_pre_hooks.items():
            if isinstance(hook, SpectralNorm):  # the older one computes its weight in a hook
                layer._forward_pre_hooks[key] = partial(_before_forward, hook)


def _before_forward(hook: SpectralNorm, layer: nn.Module, inputs: Any) -> None:
    _with_fp32_parameters(layer, hook, inputs)


def _with_fp32_parameters(layer: nn.Module, compute: Callable[..., Any], *args: Any, **named: Any) -> Any:
    # ZeRO-3 gathers what is looked up by name, where it has not done so before (for a hook).
    own = {name: layer._parameters[name] for name in tuple(layer._parameters)}
    copies = {name: p.float() for name, p in own.items() if p is not None}
    # An attribute hides the parameter of its name, and ZeRO-3's own dictionary of parameters is left alone.
    vars(layer).update(copies)
    try:
        return compute(layer, *args, **named)
    finally:
        for name in copies:
            del vars(layer)[name]


# Autocast's recurrent kernels do not take every mixture, and on a GPU copy the weights each forward.
def _with_inputs_cast(layer: nn.Module, device_type: str, *args: Any, **named: Any) -> Any:
    dtype = next(layer.parameters(recurse=False)).dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    args, named = tree_map_only(Tensor, cast, (args, named))
    with torch.autocast(device_type, enabled=False):
        return type(layer).forward(layer, *args, **named)
