"""Which of a model's layers an adapter's section of the recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeline.config.adapter_schema import AdapterConfig
from pipeline.config.patterns import matching_parts
from pipeline.errors import ConfigError, ModelError


def is_transposed(layer: nn.Module) -> bool:
    """Whether it is linear and its weight is (inputs, outputs): in GPT-2's of transformers."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def linears(model: nn.Module) -> dict[str, tuple[int, int]]:
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


def targets_of(config: AdapterConfig, model: nn.Module, layers: Mapping[str, Any]) -> list[str]:
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
        its = matching_parts(pattern, layers, "adapter.targets", "linear layer", modules)
        if kept := sorted(set(its) - set(names)):
            raise ConfigError(
                f"adapter.targets: {pattern!r} matches {kept[0]}, the output layer, which gets no adapter; "
                "adapter.modules_to_save trains it whole"
            )
        found.update(dict.fromkeys(its))
    return [name for name in names if name in found]


def trained_whole(config: AdapterConfig, model: nn.Module) -> list[nn.Parameter]:
    """Parameters of `modules_to_save`, and of what gives scores.

    Raises:
        ConfigError: a name matches nothing.
    """
    names = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    found = [model.get_parameter(name) for name in getattr(model, "drawn_beside_weights", ())]
    for pattern in config.modules_to_save or ():
        for name in matching_parts(pattern, names, "adapter.modules_to_save", "module"):
            found += list(model.get_submodule(name).parameters())
    return found
