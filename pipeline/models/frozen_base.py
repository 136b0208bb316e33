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
    """Return whether the layer is transformers' Conv1D (GPT-2): linear, with a weight (inputs, outputs)."""
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
    """Return the names of the linear layers that get an adapter, in the model's order.

    Args:
        config: The recipe's adapter section.
        model: The model.
        layers: The model's linear layers by name; see find_linear_layers.

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
        if heads := sorted(set(matches) - set(names)):
            raise ConfigError(
                f"adapter.targets: {pattern!r} matches {heads[0]}, the output layer, which gets no adapter; "
                "name it in adapter.modules_to_save to train it whole"
            )
        targets.update(dict.fromkeys(matches))
    return [name for name in names if name in targets]


def find_fully_trained(config: AdapterConfig, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters to train whole: those of `modules_to_save` and of a reward model's score layer.

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
    """Places the weights of frozen linear layers as a subclass says, and other parameters on the device.

    Args:
        others: The placement of all other parameters, whose device and dtype this one takes over.
        adapter: The recipe's adapter section.
    """

    def __init__(self, others: DevicePlacement, adapter: AdapterConfig):
        super().__init__(others._device, others.dtype)
        self.loads_by_tensor = True
        self._adapter = adapter
        self._frozen_weights: dict[nn.Parameter, bool] = {}
        """Weights of frozen linear layers, each with whether it is stored as (inputs, outputs).

        `divide` fills it.
        """

    def divide(self, model: nn.Module) -> None:
        """Note the weights of the frozen linear layers. Nothing is freed."""
        for layer in self.find_frozen_layers(model).values():
            self._frozen_weights.setdefault(layer.weight, is_transposed(layer))  # type: ignore[arg-type]

    def find_frozen_layers(self, model: nn.Module) -> dict[str, nn.Module]:
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
    """Stores the weights of frozen linear layers in autocast's dtype, in half the memory of fp32.

    Autocast would round fp32 weights to this dtype for each matrix product, since it caches no rounded copy
    of a weight without gradient. So products are the same to the last bit. Only DoRA's magnitudes, which are
    norms of the weights themselves, differ, by 2e-5. Other parameters stay fp32, since autocast does not
    round embeddings and norms.

    Args:
        others: The placement of all other parameters.
        adapter: The recipe's adapter section.
        dtype: The dtype in which autocast multiplies.
    """

    def __init__(self, others: DevicePlacement, adapter: AdapterConfig, dtype: torch.dtype):
        super().__init__(others, adapter)
        self._product_dtype = dtype

    def _tensor_options(self, parameter: nn.Parameter) -> dict[str, Any]:
        options = super()._tensor_options(parameter)
        if parameter in self._frozen_weights:
            options["dtype"] = self._product_dtype
        return options

    def exclude_trained(self, trained: Iterable[nn.Parameter]) -> None:
        """Place these parameters like all others, also those that `divide` has noted as frozen weights."""
        for parameter in trained:
            was_frozen = self._frozen_weights.pop(parameter, None) is not None
            if was_frozen:
                self._place_parameter(parameter)


class _CastingLayer(nn.Module):
    """A layer with a weight in half precision that computes in its input's dtype outside of autocast."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Any:
        if self.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return functional_call(self, {"weight": self.weight.to(x.dtype)}, (x,))


@cache
def _build_casting_class(layer_class: Any) -> Any:
    """Return a subclass of a layer's class, of the same name, that casts its weight; see _CastingLayer."""
    return type(layer_class.__name__, (_CastingLayer, layer_class), {})


def accept_fp32_inputs(
    model: nn.Module, trained: Iterable[nn.Parameter], sharding: HalfBasePlacement
) -> None:
    """Let the layers of a half-precision base take fp32 inputs, which `Run.model` and generation give them.

    Outside of autocast such a layer casts its weight to its input's fp32. Outputs are then those of the model
    that peft opens over a bf16 base, to 1e-6.

    Args:
        model: The model, changed in place: its frozen layers change their class.
        trained: Parameters that are trained whole, including those that only `adapter.weights` names. They
            become fp32 again.
        sharding: The placement in which the model was built.
    """
    layers = sharding.find_frozen_layers(model)
    trained = list(trained)
    sharding.exclude_trained(trained)
    trained_ids = {id(p) for p in trained}
    for layer in layers.values():
        if id(layer.weight) not in trained_ids:
            layer.__class__ = _build_casting_class(type(layer))  # type: ignore[arg-type]
