"""How a model is held while it is made: whole, or (ZeRO-3) in shards from the first parameter on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn


class Sharding(Protocol):
    """What a builder needs to know about ZeRO-3 without knowing DeepSpeed."""

    def construct(self) -> AbstractContextManager[Any]:
        """Inside it, each module's parameters are sharded as soon as its own __init__ is done."""
        ...

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Inside it the parameters are whole, on the CPU, in fp32, and may be changed; after it, sharded."""
        ...

    @property
    def zero3_config(self) -> dict[str, Any] | None:
        """The DeepSpeed configuration under which transformers loads weights straight into shards."""
        ...


class Whole:
    """Every rank holds every parameter."""

    zero3_config: dict[str, Any] | None = None

    def construct(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()
