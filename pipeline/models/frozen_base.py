"""How the frozen base under an adapter is held, where each rank has all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pipeline.config.adapter_schema import AdapterConfig
from pipeline.models.adapter_targets import linears, trained_whole
from pipeline.models.sharding import Placed
from pipeline.models.vocabulary import vocabulary_parameters


def is_transposed(layer: nn.Module) -> bool:
    """Whether its weight is (inputs, outputs): in GPT-2's of transformers."""
    return type(layer).__name__ == "Conv1D"


class OverFrozen(Placed):
    """As Placed, but for the weights of frozen linear layers, which a subclass holds in its own way."""

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

    def hold_as_others(self, parameters: Iterable[nn.Parameter]) -> None:
        """They are trained after all, which the recipe's section alone did not say."""
        for parameter in parameters:
            if self._transposed.pop(parameter, None) is not None:
                self._place(parameter)


class Rounded(OverFrozen):
    """Under autocast: in its dtype already, in half the memory. The products are the same to the last bit, as
    autocast would round the same weights for each of them.
    """

    def __init__(self, others: Placed, adapter: AdapterConfig, dtype: torch.dtype):
        """See OverFrozen.

        Args:
            dtype: Of products.
        """
        super().__init__(others, adapter)
        self._rounded = dtype

    def _kind(self, parameter: nn.Parameter) -> dict[str, Any]:
        kind = super()._kind(parameter)
        return kind | {"dtype": self._rounded} if parameter in self._transposed else kind
