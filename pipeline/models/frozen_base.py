"""How the frozen base under an adapter is held, where each rank has all of it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeline.config.adapter_schema import AdapterConfig
from pipeline.models.adapter_targets import is_transposed, linears, trained_whole
from pipeline.models.sharding import Placed
from pipeline.models.vocabulary import vocabulary_parameters


class FrozenBase(Placed):
    """As Placed, but the weights of frozen linear layers, which each subclass holds in its own way."""

    def __init__(self, others: Placed, adapter: AdapterConfig):
        """
        Args:
            others: How all other parameters are held.
            adapter: What the recipe says of it.
        """
        super().__init__(others._device, others.dtype)
        self.takes_tensors = True
        self._adapter = adapter
        self._transposed: dict[nn.Parameter, bool] = {}

    def made(self, model: nn.Module) -> None:
        """See Sharding.made."""
        for layer in self.layers_of(model).values():
            self._transposed.setdefault(layer.weight, is_transposed(layer))  # type: ignore[arg-type]

    def layers_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The frozen ones, by name, whether they get an adapter or not, but for the output layer: so does
        transformers by its BitsAndBytesConfig.
        """
        kept = {id(p) for p in (*trained_whole(self._adapter, model), *vocabulary_parameters(model))}
        layers = {name: model.get_submodule(name) for name in linears(model)}
        return {
            name: layer
            for name, layer in layers.items()
            if (type(layer) is nn.Linear or is_transposed(layer)) and id(layer.weight) not in kept
        }


class HalfBase(FrozenBase):
    """Under autocast: in its dtype already, in half the memory. The products are the same to the last bit, as
    autocast would round the same weights for each of them.
    """

    def __init__(self, others: Placed, adapter: AdapterConfig, dtype: torch.dtype):
        """See FrozenBase.

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


def hold_in_half(model: nn.Module, trained: Iterable[nn.Parameter], sharding: HalfBase) -> None:
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
