"""The request to a model builder: facts of the data, and the place of parameters while the model is built.

A model can be built whole on the host, whole on its device, or sharded from the first parameter on (ZeRO 3).
With pipeline stages and tensor parallelism, parameters of other ranks are built without values, on torch's
meta device.
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
    """The split as a model builder sees it, without DeepSpeed.

    The bodies of the methods here are right for a rank that has every parameter in fp32 on the CPU; see
    NoSharding.
    """

    def construct(self) -> AbstractContextManager[Any]:
        """Return a context in which each module's parameters are sharded as soon as its __init__ ends."""
        return nullcontext()

    def construct_empty(self) -> AbstractContextManager[Any]:
        """Return a context like `construct`, for code that neither needs parameter values nor draws any."""
        return self.construct()

    def divide(self, model: nn.Module) -> None:
        """Free the values that this rank does not train, once the model has all its modules. Collective.

        Raises:
            ModelError: The model cannot be divided.
        """
        return None

    def gather(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Return a context in which the parameters are whole, in fp32 on the CPU, and may be changed.

        When it ends, they are sharded again.
        """
        return nullcontext()

    def place(self, model: nn.Module, draws: bool) -> None:
        """Move this rank's part of the built model to where it stays until an engine takes it.

        Args:
            model: The model, built and divided.
            draws: Whether the present values are moved along. If not, memory is reserved without values,
                since a checkpoint or a file will fill them; see ModelRequest.draws.
        """
        return None

    @property
    def loads_by_tensor(self) -> bool:
        """Return whether pretrained weights are loaded one tensor at a time into the divided model."""
        ...

    @property
    def zero3_config(self) -> dict[str, Any] | None:
        """DeepSpeed configuration with which transformers reads into shards; `None` without ZeRO 3."""
        ...


class NoSharding(Sharding):
    """Keeps every parameter on every rank, in fp32 on the CPU."""

    loads_by_tensor = False
    zero3_config: dict[str, Any] | None = None


class DevicePlacement(NoSharding):
    """Keeps every parameter on every rank, on the device and in the dtype of training.

    A rank's host never stores a whole fp32 model for its device. Each parameter is drawn or read in fp32 on
    the CPU, so its values equal those of any other split. It then goes to the device in the run's precision,
    a module at a time. Before that, parameters are constructed without values, in memory that the system does
    not allocate until it is written. Every rank draws all values: if rank 0 drew and sent them, that would
    take as long.

    Args:
        device: The rank's device.
        dtype: The dtype of floating-point parameters in the engine.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device = device
        self.dtype = dtype
        # Otherwise from_pretrained itself puts tensors into their final place: in fp32, on the CPU.
        self.loads_by_tensor = device.type != "cpu" or dtype != torch.float32

    def place(self, model: nn.Module, draws: bool) -> None:
        """See Sharding.place."""
        for parameter in model.parameters():
            if draws:
                self._place_parameter(parameter)
            else:
                self._reserve_parameter(parameter)

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """See Sharding.gather."""
        gathered = list(dict.fromkeys(parameters))
        for parameter in gathered:
            if parameter.is_meta:
                allocate_values(parameter)
            elif parameter.is_floating_point():
                parameter.data = parameter.data.to("cpu", torch.float32)
        try:
            yield
        finally:
            for parameter in gathered:
                self._place_parameter(parameter)

    def _place_parameter(self, parameter: nn.Parameter) -> None:
        """Move a parameter's values to where training expects them."""
        _set_values_keeping_hooks(parameter, parameter.detach().to(**self._tensor_options(parameter)))

    def _reserve_parameter(self, parameter: nn.Parameter) -> None:
        """Allocate the memory of a parameter where training expects it, without values."""
        _set_values_keeping_hooks(parameter, torch.empty_like(parameter, **self._tensor_options(parameter)))

    def _tensor_options(self, parameter: nn.Parameter) -> dict[str, Any]:
        dtype = self.dtype if parameter.is_floating_point() else parameter.dtype
        return {"device": self._device, "dtype": dtype}


@dataclass(frozen=True)
class ModelRequest:
    """Facts of the data and the run that a builder fits the model to; `None` where the data have no such."""

    sharding: Sharding
    """Split under which the model is built."""
    vocab_size: int | None = None
    """Number of entries of the tokenizer."""
    sequence_length: int | None = None
    """Number of tokens of the longest row that the data yield."""
    longest: int | None = None
    """Number of tokens of the longest text with consecutive positions; `None`: `sequence_length`."""
    num_classes: int | None = None
    """Number of classes of the data set."""
    num_channels: int | None = None
    """Number of channels of the images."""
    end_of_document_id: int | None = None
    """Id of the token after each document."""
    gives_scores: bool = False
    """Whether the output layer gives one score for each token instead of logits."""
    draws: bool = True
    """Whether initial weights are drawn; `False` if a checkpoint or a file will fill all of them."""


def build_model_request(config: RunConfig, data: Any, sharding: Sharding, draws: bool = True) -> ModelRequest:
    """Return the request for a model that fits the run's data.

    Args:
        config: The run's configuration.
        data: The run's DataBundle, a class that `models/` may not import.
        sharding: The split under which the model is built.
        draws: Whether initial weights are drawn; see ModelRequest.draws.
    """
    return ModelRequest(
        sharding=sharding,
        vocab_size=data.vocab_size,
        sequence_length=config.data.tokens_per_row,
        longest=data.longest_segment,
        num_classes=data.num_classes,
        num_channels=data.num_channels,
        end_of_document_id=data.tokenizer.eos_token_id if data.tokenizer is not None else None,
        gives_scores=config.objective.kind == "reward",
        draws=draws,
    )


def _set_values_keeping_hooks(parameter: nn.Parameter, values: Tensor) -> None:
    """Make `values` the parameter's data, without a copy, and keep autograd hooks if torch allows that.

    An assignment to `.data` keeps the hooks. It works only if both tensors or neither are on the meta device.
    """
    if parameter.is_meta == values.is_meta:
        parameter.data = values
    else:
        set_values(parameter, values)


def count_elements(parameter: Tensor) -> int:
    """Return the number of values of the whole parameter, even if it is sharded by ZeRO 3 or in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return math.prod(state.shape)
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def allocate_values(parameter: nn.Parameter) -> None:
    """Allocate CPU memory for a parameter on the meta device, and leave it uninitialized.

    The parameter stays the same object.
    """
    set_values(parameter, torch.empty_like(parameter, device="cpu"))


def free_values(parameter: nn.Parameter) -> None:
    """Free the values of a parameter. It keeps its shape and dtype, on the meta device."""
    set_values(parameter, parameter.detach().to("meta"))


def set_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Make `values` the parameter's data, without a copy.

    The parameter stays the same object and keeps its attributes, but loses its autograd hooks.
    """
    filled = nn.Parameter(values, parameter.requires_grad)
    vars(filled).update(vars(parameter))
    torch.utils.swap_tensors(parameter, filled)
