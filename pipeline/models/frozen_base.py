"""Which of a model's layers an adapter's section names, and how the frozen base under it is held."""

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
    """Whether it is linear and its weight is (inputs, outputs): in GPT-2's of transformers."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def find_linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The linear layers, and of each (outputs, inputs)."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif is_transposed(module):
            found[name] = (module.nf, module.nx)
    return found


def _output_layer(model: nn.Module) -> nn.Module | None:
    layer: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return layer


def find_adapter_targets(config: AdapterConfig, model: nn.Module, layers: Mapping[str, Any]) -> list[str]:
    """Names of those, among the linear layers, that get an adapter.

    Raises:
        ConfigError: a name matches nothing, or the output layer.
        ModelError: there is none.
    """
    head = _output_layer(model)
    names = [name for name in layers if head is None or model.get_submodule(name) is not head]
    if not names:
        raise ModelError("adapter: the model has no linear layer that could get one")
    if config.targets is None:
        return names
    found: dict[str, None] = {}
    for pattern in config.targets:
        modules = (name for name, _ in model.named_modules())
        its = match_modules(pattern, layers, "adapter.targets", "linear layer", modules)
        if kept := sorted(set(its) - set(names)):
            raise ConfigError(
                f"adapter.targets: {pattern!r} matches {kept[0]}, the output layer, which gets no adapter; "
                "adapter.modules_to_save trains it whole"
            )
        found.update(dict.fromkeys(its))
    return [name for name in names if name in found]


def find_fully_trained(config: AdapterConfig, model: nn.Module) -> list[nn.Parameter]:
    """Parameters of `modules_to_save`, and of what gives scores.

    Raises:
        ConfigError: a name matches nothing.
    """
    names = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    found = [model.get_parameter(name) for name in getattr(model, "drawn_beside_weights", ())]
    for pattern in config.modules_to_save or ():
        for name in match_modules(pattern, names, "adapter.modules_to_save", "module"):
            found += list(model.get_submodule(name).parameters())
    return found


class FrozenBasePlacement(DevicePlacement):
    """As DevicePlacement, but the weights of frozen linear layers, which each subclass holds in its own way."""

    def __init__(self, others: DevicePlacement, adapter: AdapterConfig):
        """
        Args:
            others: How all other parameters are held.
            adapter: What the recipe says of it.
        """
        super().__init__(others._device, others.dtype)
        self.loads_by_tensor = True
        self._adapter = adapter
        self._transposed: dict[nn.Parameter, bool] = {}

    def divide(self, model: nn.Module) -> None:
        """See Sharding.divide."""
        for layer in self.layers_of(model).values():
            self._transposed.setdefault(layer.weight, is_transposed(layer))  # type: ignore[arg-type]

    def layers_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The frozen ones, by name, whether they get an adapter or not, but for the output layer: so does
        transformers by its BitsAndBytesConfig.
        """
        kept = {
            id(p) for p in (*find_fully_trained(self._adapter, model), *find_vocabulary_parameters(model))
        }
        layers = {name: model.get_submodule(name) for name in find_linear_layers(model)}
        return {
            name: layer
            for name, layer in layers.items()
            if (type(layer) is nn.Linear or is_transposed(layer)) and id(layer.weight) not in kept
        }


class HalfBasePlacement(FrozenBasePlacement):
    """Under autocast: in its dtype already, in half the memory. The products are the same to the last bit, as
    autocast would round the same weights for each of them.
    """

    def __init__(self, others: DevicePlacement, adapter: AdapterConfig, dtype: torch.dtype):
        """See FrozenBasePlacement.

        Args:
            dtype: Of products.
        """
        super().__init__(others, adapter)
        self._products = dtype

    def _kind(self, parameter: nn.Parameter) -> dict[str, Any]:
        kind = super()._kind(parameter)
        return kind | {"dtype": self._products} if parameter in self._transposed else kind

    def release(self, trained: Iterable[nn.Parameter]) -> None:
        """They go back to how all others are held."""
        for parameter in trained:
            if self._transposed.pop(parameter, None) is not None:
                self._place(parameter)


class _CalledAnywhere(nn.Module):
    """A layer whose weight alone is in half precision: outside of autocast it computes as its input is."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Any:
        if self.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return functional_call(self, {"weight": self.weight.to(x.dtype)}, (x,))


@cache
def _called_anywhere(kind: Any) -> Any:
    return type(kind.__name__, (_CalledAnywhere, kind), {})


def accept_fp32_inputs(
    model: nn.Module, trained: Iterable[nn.Parameter], sharding: HalfBasePlacement
) -> None:
    """Has the layers of a base in half precision called with fp32 as well, as by who has the model in hand.

    Args:
        trained: What is trained whole, also where the recipe's section alone did not say so: fp32 again.
        sharding: In which the model was made.
    """
    layers, trained = sharding.layers_of(model), list(trained)
    sharding.release(trained)
    whole = {id(p) for p in trained}
    for layer in layers.values():
        if id(layer.weight) not in whole:
            layer.__class__ = _called_anywhere(type(layer))  # type: ignore[arg-type] # which has a hash
