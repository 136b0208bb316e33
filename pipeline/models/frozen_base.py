"""The layers that the recipe's adapter section names, and the dtype of the frozen base under the adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeline.config.model_schema import AdapterConfig
from pipeline.config.patterns import match_modules
from pipeline.errors import ConfigError, ModelError
from pipeline.models.embeddings import find_vocabulary_parameters
from pipeline.models.sharding import DevicePlacement


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the layer is linear with a weight (inputs, outputs): transformers' Conv1D, in GPT-2."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def find_linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the linear layers by name, each with its sizes (outputs, inputs)."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            layers[name] = (module.out_features, module.in_features)
        elif is_transposed(module):
            layers[name] = (module.nf, module.nx)
    return layers


def _get_output_layer(model: nn.Module) -> nn.Module | None:
    layer: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return layer


def find_adapter_targets(config: AdapterConfig, model: nn.Module, layers: Mapping[str, Any]) -> list[str]:
    """Return the names of the linear layers that get an adapter.

    Raises:
        ConfigError: A name in `adapter.targets` matches nothing, or it matches the output layer.
        ModelError: The model has no linear layer that could get an adapter.
    """
    head = _get_output_layer(model)
    names = [name for name in layers if head is None or model.get_submodule(name) is not head]
    if not names:
        raise ModelError("adapter: the model has no linear layer to add it to; remove the adapter section")
    if config.targets is None:
        return names
    targets: dict[str, None] = {}
    for pattern in config.targets:
        modules = (name for name, _ in model.named_modules())
        matches = match_modules(pattern, layers, "adapter.targets", "linear layer", modules)
        if kept := sorted(set(matches) - set(names)):
            raise ConfigError(
                f"adapter.targets: {pattern!r} matches {kept[0]}, the output layer, which gets no adapter; "
                "name it in adapter.modules_to_save to train it whole"
            )
        targets.update(dict.fromkeys(matches))
    return [name for name in names if name in targets]


def find_fully_trained(config: AdapterConfig, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `modules_to_save` and of a reward model's score layer.

    Raises:
        ConfigError: A name in `adapter.modules_to_save` matches nothing.
    """
    names = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    parameters = [model.get_parameter(name) for name in getattr(model, "drawn_beside_weights", ())]
    for pattern in config.modules_to_save or ():
        for name in match_modules(pattern, names, "adapter.modules_to_save", "module"):
            parameters += list(model.get_submodule(name).parameters())
    return parameters


class FrozenBasePlacement(DevicePlacement):
    """Places the weights of frozen linear layers as a subclass says, and all others as DevicePlacement does.

    Args:
        others: The placement of all other parameters.
        adapter: The recipe's adapter section.
    """

    def __init__(self, others: DevicePlacement, adapter: AdapterConfig):
        super().__init__(others._device, others.dtype)
        self.loads_by_tensor = True
        self._adapter = adapter
        self._transposed: dict[nn.Parameter, bool] = {}

    def divide(self, model: nn.Module) -> None:
        """See Sharding.divide."""
        for layer in self.layers_of(model).values():
            self._transposed.setdefault(layer.weight, is_transposed(layer))  # type: ignore[arg-type]

    def layers_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the frozen linear layers by name, with or without an adapter, but not the output layer.

        transformers' BitsAndBytesConfig chooses the same layers, so an exported adapter fits this base.
        """
        excluded = {
            id(p) for p in (*find_fully_trained(self._adapter, model), *find_vocabulary_parameters(model))
        }
        layers = {name: model.get_submodule(name) for name in find_linear_layers(model)}
        return {
            name: layer
            for name, layer in layers.items()
            if (type(layer) is nn.Linear or is_transposed(layer)) and id(layer.weight) not in excluded
        }


class HalfBasePlacement(FrozenBasePlacement):
    """Holds the frozen base in autocast's dtype, in half the memory of fp32.

    Autocast would round these weights for each product, and keeps no copy of a weight that needs no gradient.
    Products are therefore the same to the last bit. Only DoRA's lengths, which are norms of the weights
    themselves, differ, by 2e-5. Embeddings, norms and the output layer stay fp32: no product rounds the first
    two.

    Args:
        others: The placement of all other parameters.
        adapter: The recipe's adapter section.
        dtype: The dtype of products under autocast.
    """

    def __init__(self, others: DevicePlacement, adapter: AdapterConfig, dtype: torch.dtype):
        super().__init__(others, adapter)
        self._product_dtype = dtype

    def _tensor_options(self, parameter: nn.Parameter) -> dict[str, Any]:
        options = super()._tensor_options(parameter)
        return options | {"dtype": self._product_dtype} if parameter in self._transposed else options

    def release(self, trained: Iterable[nn.Parameter]) -> None:
        """Place these parameters as all others are placed, since they are trained after all."""
        for parameter in trained:
            if self._transposed.pop(parameter, None) is not None:
                self._place_parameter(parameter)


class _CastingLayer(nn.Module):
    """A layer with a weight in half precision that, outside of autocast, computes in its input's dtype."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Any:
        if self.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return functional_call(self, {"weight": self.weight.to(x.dtype)}, (x,))


@cache
def _build_casting_class(kind: Any) -> Any:
    return type(kind.__name__, (_CastingLayer, kind), {})


def accept_fp32_inputs(
    model: nn.Module, trained: Iterable[nn.Parameter], sharding: HalfBasePlacement
) -> None:
    """Let the layers of a half-precision base be called in fp32 too, as `Run.model` and generation do.

    Outside of autocast such a layer casts its weight to its input's fp32. The model is then the one that peft
    opens over a bf16 base, to 1e-6.

    Args:
        model: The model, changed in place.
        trained: Parameters that are trained whole, also those that only `adapter.weights` names. They become
            fp32 again.
        sharding: The placement in which the model was built.
    """
    layers = sharding.layers_of(model)
    trained = list(trained)
    sharding.release(trained)
    whole = {id(p) for p in trained}
    for layer in layers.values():
        if id(layer.weight) not in whole:
            layer.__class__ = _build_casting_class(type(layer))  # type: ignore[arg-type]
