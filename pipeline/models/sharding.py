"""What is asked of a builder: to fit the model to the data, and how to hold it while it is made.

Whole, on the host or where it will train, in shards from the first parameter on (ZeRO 3), or, of other ranks'
parts, without values (pipeline stages, tensor parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


class Sharding(Protocol):
    """What a builder needs to know about a split without knowing DeepSpeed.

    What is here does what is right where every rank holds every parameter, in fp32 on the CPU: see NoSharding.
    """

    def construct(self) -> AbstractContextManager[Any]:
        """Inside it, each module's parameters are sharded as soon as its own __init__ is done."""
        return nullcontext()

    def construct_empty(self) -> AbstractContextManager[Any]:
        """As construct, where the code that makes the model needs no values and draws none."""
        return self.construct()

    def divide(self, model: nn.Module) -> None:
        """Let go of the values that this rank does not keep; the model's structure is complete. Collective.

        Raises:
            ModelError: It cannot be divided.
        """
        return None

    def gather(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Inside it the parameters are whole, on the CPU, in fp32, and may be changed; after it, sharded."""
        return nullcontext()

    def place(self, model: nn.Module, draws: bool) -> None:
        """Put what this rank keeps of the built model where it stays until there is an engine.

        Args:
            draws: See ModelRequest. If not, what is there now is not copied.
        """
        return None

    @property
    def loads_by_tensor(self) -> bool:
        """Whether a model may be `made` before it has weights, which then come one tensor at a time."""
        ...

    @property
    def zero3_config(self) -> dict[str, Any] | None:
        """The DeepSpeed configuration under which transformers loads weights straight into shards."""
        ...


class NoSharding(Sharding):
    """Every rank holds every parameter, in fp32 on the CPU."""

    loads_by_tensor = False
    zero3_config: dict[str, Any] | None = None


class DevicePlacement(NoSharding):
    """Every rank holds every parameter, where and in what it trains: host memory has a few of them at a time.

    A parameter is drawn or read in fp32 on the CPU, so that its values are those of any other split, and then
    goes to the device in the run's precision. A model is made with memory that nothing has been written to
    yet, which costs none.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        """Knows nothing of a model yet.

        Args:
            device: Of the rank.
            dtype: Of floating parameters in the engine.
        """
        self._device, self.dtype = device, dtype
        # Else from_pretrained has put them where they stay.
        self.loads_by_tensor = device.type != "cpu" or dtype != torch.float32

    def place(self, model: nn.Module, draws: bool) -> None:
        """See Sharding.place."""
        for parameter in model.parameters():
            if draws:
                self._place(parameter)
            else:
                self._reserve(parameter)

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """See Sharding.gather."""
        lent = list(dict.fromkeys(parameters))
        for parameter in lent:
            if parameter.is_meta:
                allocate_values(parameter)
            elif parameter.is_floating_point():
                parameter.data = parameter.data.to("cpu", torch.float32)
        try:
            yield
        finally:
            for parameter in lent:
                self._place(parameter)

    def _place(self, parameter: nn.Parameter) -> None:
        _hold(parameter, parameter.detach().to(**self._kind(parameter)))

    def _reserve(self, parameter: nn.Parameter) -> None:
        _hold(parameter, torch.empty_like(parameter, **self._kind(parameter)))

    def _kind(self, parameter: nn.Parameter) -> dict[str, Any]:
        dtype = self.dtype if parameter.is_floating_point() else parameter.dtype
        return {"device": self._device, "dtype": dtype}


@dataclass(frozen=True)
class ModelRequest:
    """Facts a builder fits the model to."""

    sharding: Sharding
    vocab_size: int | None = None
    """Entries of the tokenizer."""
    sequence_length: int | None = None
    """Tokens of the longest sequence the data yields."""
    longest: int | None = None
    """Tokens of the longest text that positions count through. `None`: those of a sequence."""
    num_classes: int | None = None
    """Classes of the data set."""
    num_channels: int | None = None
    """Channels of the images."""
    end_of_document_id: int | None = None
    """Token after each document."""
    gives_scores: bool = False
    """The output layer gives one number for each token, in the place of logits."""
    draws: bool = True
    """False: all values are still to come, from a checkpoint or a file; what needs none draws none."""


def build_model_request(config: RunConfig, data: Any, sharding: Sharding, draws: bool = True) -> ModelRequest:
    """Return what the data asks of the model.

    Args:
        data: A DataBundle, which models may not know.
        draws: Whether the model's first weights are trained from.
    """
    return ModelRequest(
        sharding=sharding,
        vocab_size=data.vocab_size,
        sequence_length=config.data.tokens_per_row,
        longest=data.longest,
        num_classes=data.num_classes,
        num_channels=data.num_channels,
        end_of_document_id=data.tokenizer.eos_token_id if data.tokenizer is not None else None,
        gives_scores=config.objective.kind == "reward",
        draws=draws,
    )


def _hold(parameter: nn.Parameter, values: Tensor) -> None:
    """Hold values as give_values does, with hooks if torch allows: if both or neither have values."""
    if parameter.is_meta == values.is_meta:
        parameter.data = values
    else:
        set_values(parameter, values)


def count_elements(parameter: Tensor) -> int:
    """Return how many values the whole parameter has, also if it is sharded, or if two share a byte."""
    state = getattr(parameter, "quant_state", None)
    return (
        math.prod(state.shape)
        if state is not None
        else int(getattr(parameter, "ds_numel", parameter.numel()))
    )


def allocate_values(parameter: nn.Parameter) -> None:
    """Give a parameter without values memory on the CPU, not yet filled; it stays the same object."""
    set_values(parameter, torch.empty_like(parameter, device="cpu"))


def drop_values(parameter: nn.Parameter) -> None:
    """Drop the values of a parameter, and keep its shape and dtype."""
    set_values(parameter, parameter.detach().to("meta"))


def set_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a parameter hold these values, not a copy; it stays the same object with its attributes."""
    filled = nn.Parameter(values, parameter.requires_grad)
    vars(filled).update(vars(parameter))
    torch.utils.swap_tensors(parameter, filled)
