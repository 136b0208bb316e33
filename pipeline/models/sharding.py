"""What is asked of a builder: to fit the model to the data, and how to hold it while it is made.

Whole, in shards from the first parameter on (ZeRO 3), or, of other ranks' parts, without values (pipeline
stages, tensor parallelism).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Sharding(Protocol):
    """What a builder needs to know about a split without knowing DeepSpeed."""

    def construct(self) -> AbstractContextManager[Any]:
        """Inside it, each module's parameters are sharded as soon as its own __init__ is done."""
        ...

    def construct_empty(self) -> AbstractContextManager[Any]:
        """As construct, where the code that makes the model needs no values and draws none."""
        ...

    def made(self, model: nn.Module) -> None:
        """The model's structure stands: what this rank does not keep of its values is let go. Collective.

        Raises:
            ModelError: it cannot be divided.
        """
        ...

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Inside it the parameters are whole, on the CPU, in fp32, and may be changed; after it, sharded."""
        ...

    @property
    def takes_tensors(self) -> bool:
        """Whether a model may be `made` before it has weights, which then come one tensor at a time."""
        ...

    @property
    def zero3_config(self) -> dict[str, Any] | None:
        """The DeepSpeed configuration under which transformers loads weights straight into shards."""
        ...


class Whole:
    """Every rank holds every parameter."""

    takes_tensors = False
    zero3_config: dict[str, Any] | None = None

    def construct(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def construct_empty(self) -> AbstractContextManager[Any]:
        return self.construct()

    def made(self, model: nn.Module) -> None:
        pass

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class ModelRequest:
    """Facts a builder fits the model to."""

    sharding: Sharding
    vocab_size: int | None = None
    """Entries of the tokenizer."""
    sequence_length: int | None = None
    """Tokens of the longest sequence the data yields."""
    num_classes: int | None = None
    """Classes of the data set."""
    num_channels: int | None = None
    """Channels of the images."""
    end_of_document_id: int | None = None
    """Token after each document."""


def give_memory(parameter: nn.Parameter) -> None:
    """One without values gets memory on the CPU, not yet filled; it stays the same object."""
    give_values(parameter, torch.empty_like(parameter, device="cpu"))


def let_go(parameter: nn.Parameter) -> None:
    """Keeps its shape and dtype, not its values."""
    give_values(parameter, parameter.detach().to("meta"))


def give_values(parameter: nn.Parameter, values: Tensor) -> None:
    """It holds these, not a copy of them, and stays the same object with what was noted on it."""
    filled = nn.Parameter(values, parameter.requires_grad)
    vars(filled).update(vars(parameter))
    torch.utils.swap_tensors(parameter, filled)


@contextmanager
def runnable(model: Any) -> Iterator[None]:
    """Inside it a model of transformers evaluates on the CPU, though some of its parameters have no values.

    A module has values of its own only during its forward, small random ones that its name decides: every run
    sees the same ones, and no more than one module's are in memory.
    """
    was_training, attention = model.training, model.config._attn_implementation
    if "flash" in attention:
        model.config._attn_implementation = "sdpa"  # flash attention does not run on a CPU
    model.eval()
    hooks = []
    for name, module in model.named_modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            lent: dict[str, Any] = {}
            hooks.append(module.register_forward_pre_hook(partial(_lend, lent, name)))
            hooks.append(module.register_forward_hook(partial(_take_back, lent), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
        if model.config._attn_implementation != attention:
            model.config._attn_implementation = attention


def _lend(lent: dict[str, Any], name: str, module: nn.Module, _: Any) -> None:
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            lent[key] = parameter
            module._parameters[key] = nn.Parameter(trial_values(parameter, f"{name}.{key}"), False)


def _take_back(lent: dict[str, Any], module: nn.Module, *_: Any) -> None:
    module._parameters.update(lent)
    lent.clear()


def trial_values(parameter: Tensor, name: str) -> Tensor:
    """Of the parameter's shape: matrices around 0, vectors (most scale something) around 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    centre = 1.0 if parameter.dim() < 2 else 0.0
    return torch.empty(parameter.shape, dtype=parameter.dtype).normal_(centre, 0.02, generator=generator)
