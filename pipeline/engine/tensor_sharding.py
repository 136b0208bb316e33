"""Tensor-parallel sharding while a model is made: a rank keeps only its own parts of cut matrices.

DeepSpeed's AutoTP cuts matrices that are whole on every rank, so host memory would limit the model's size.
Here AutoTP first cuts a copy without values, which shows every rank's part of each matrix. All weights are
drawn or read in the same order, one module or tensor at a time, and a rank keeps its parts. At the end AutoTP
cuts the model itself, and the rank puts its parts in place.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.module_inject import set_autotp_mode
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.config import get_tensor_parallel_config
from torch import Tensor, nn

from pipeline.config.split import Split
from pipeline.engine.deepspeed_base import build_parallel_state
from pipeline.engine.state import WHOLE_TENSOR, TensorPlacement
from pipeline.engine.tensor_parallel import complete_tensor_section, place_cut_parameters, share_vocabulary
from pipeline.errors import ModelError, summarize_error
from pipeline.models.adapters import has_adapter, is_base
from pipeline.models.sharding import allocate_values, drop_values, set_values
from pipeline.objectives import refuse_router_loss


class _Part:
    """Holds this rank's part of one parameter, in the shape that the parameter has after the cut."""

    def __init__(self, place: TensorPlacement, dtype: torch.dtype):
        """Allocate the memory now, so that freed whole parameters leave no gaps between the parts."""
        self.place = place
        self.values = torch.empty(place.local_shape, dtype=dtype)
        self.has_values = False

    @torch.no_grad()
    def copy_from(self, whole: Tensor) -> None:
        """Copy this rank's part out of the whole parameter."""
        for own, there in self._slices():
            self.values[own] = whole[there]
        self.has_values = True

    @torch.no_grad()
    def copy_into(self, whole: Tensor) -> None:
        """Copy this rank's part into the whole parameter."""
        for own, there in self._slices():
            whole[there] = self.values[own]

    def _slices(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        for boxes in self.place.boxes:
            own, there = (tuple(slice(*bounds) for bounds in box or ()) for box in boxes)
            yield own, there


class TensorSharding:
    """Implements pipeline.models.sharding.Sharding: a rank has values only for its parts of cut matrices.

    Every rank draws all weights in the same order, module by module, so that initial weights depend on the
    seed alone. A cut parameter is whole only while it is drawn or filled.

    A parameter that is made whole again has values in this rank's part and NaN elsewhere. An `_init_weights`
    may therefore change drawn parameters element by element, as in a whole model. A result that needs all
    values of a parameter (a norm, a mean) is NaN.
    """

    loads_by_tensor = True
    zero3_config: dict[str, Any] | None = None

    def __init__(self, config: dict[str, Any], split: Split):
        """Prepare to cut a model.

        Args:
            config: Resolved DeepSpeed JSON.
            split: Split of the run.
        """
        self._config = {"tensor_parallel": dict(config["tensor_parallel"])}
        self._split = split
        self._is_made = False
        self._parts: dict[nn.Parameter, list[_Part]] = {}

    def construct(self) -> AbstractContextManager[None]:
        """See Sharding.construct. Weights that a module draws itself are whole until the model is made."""
        return contextlib.nullcontext()

    def construct_empty(self) -> AbstractContextManager[None]:
        """See Sharding.construct_empty. Buffers have values."""
        from accelerate import init_empty_weights

        context: AbstractContextManager[None] = init_empty_weights(include_buffers=False)
        return context

    def divide(self, model: nn.Module) -> None:
        """See Sharding.divide. Makes the tensor-parallel groups. A second call does nothing.

        Raises:
            ConfigError: the model is a mixture of experts whose routers are to be balanced.
            ModelError: AutoTP cannot cut the model, or does not state how it does.
        """
        if self._is_made:
            return
        self._is_made = True
        refuse_router_loss(model, "tensor parallelism")
        complete_tensor_section(self._config, model)
        build_parallel_state(self._split)
        twin = _without_values(model)
        try:
            # AutoTP's output is hidden, since it appears again when the model itself is cut. A new embedding
            # draws random numbers before it is filled.
            with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
                self._partition(twin)
        except (NotImplementedError, ValueError) as error:  # DeepSpeed's errors about how to cut
            raise ModelError(f"tensor_parallel: {summarize_error(error)}") from None
        named = dict(model.named_parameters(remove_duplicate=False))
        places = list(place_cut_parameters(twin).values())
        # A tied parameter that is whole under one of its names keeps all values; AutoTP cuts it later.
        whole = {named[place.name] for place in places if place.boxes == WHOLE_TENSOR}
        for place in places:
            parameter = named[place.name]
            if parameter not in whole:
                self._parts.setdefault(parameter, []).append(_Part(place, parameter.dtype))
        for parameter in self._parts:
            if not parameter.is_meta:
                self._keep_parts(parameter)

    def place(self, model: nn.Module, draws: bool) -> None:
        """See Sharding.place."""
        for parameter in model.parameters():
            if parameter.is_meta and parameter not in self._parts:
                allocate_values(parameter)
        for part in (part for parts in self._parts.values() for part in parts):
            part.has_values = True

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """See Sharding.gather."""
        lent = []
        for parameter in dict.fromkeys(parameters):
            if parameter.is_meta and parameter in self._parts:
                lent.append(parameter)
            elif parameter.is_meta:
                allocate_values(parameter)
        for parameter in lent:
            allocate_values(parameter)
            self._put_parts(parameter)
        try:
            yield
        finally:
            for parameter in lent:
                self._keep_parts(parameter)

    def cut(self, model: nn.Module) -> None:
        """Cut the model, which has all its values, to this rank's part. Collective.

        Call it before an optimizer is made.
        """
        if has_adapter(model):
            from pipeline.engine.tensor_adapters import (
                detach_adapters,
            )  # late: it imports peft, which takes seconds

            with detach_adapters(model):
                self._cut(model)
        else:
            self._cut(model)
        share_vocabulary(model)

    def _cut(self, model: nn.Module) -> None:
        before = dict(model.named_parameters(remove_duplicate=False))
        self._partition(model)
        parts = {part.place.name: part for parts in self._parts.values() for part in parts}
        self._parts = {}
        for name, parameter in model.named_parameters():
            # AutoTP may have made new parameters, without these attributes.
            parameter.requires_grad_(before[name].requires_grad)
            parameter.is_base = is_base(before[name])  # type: ignore[attr-defined]
            if name in parts and parts[name].has_values:
                assert parameter.shape == parts[name].values.shape, name
                assert not parameter._backward_hooks, name  # they would stay with the replaced parameter
                set_values(parameter, parts[name].values)
            assert not parameter.is_meta, name

    def _partition(self, model: nn.Module) -> None:
        for module in model.modules():
            weight = module._parameters["weight"] if isinstance(module, nn.Embedding) else None
            if weight is not None and weight.is_meta:
                allocate_values(weight)  # AutoTP may copy from it; the values do not matter
        set_autotp_mode(training=True)
        engine = SimpleNamespace(local_rank=-1, autotp_size=lambda: self._split.tensor_parallel)
        section = get_tensor_parallel_config(self._config)
        DeepSpeedEngine._apply_autotp_partitioning(engine, model, section)

    def _put_parts(self, parameter: nn.Parameter) -> None:
        parts = [part for part in self._parts[parameter] if part.has_values]
        if parts:
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else 0)
        for part in parts:
            part.copy_into(parameter)

    def _keep_parts(self, parameter: nn.Parameter) -> None:
        for part in self._parts[parameter]:
            part.copy_from(parameter)
        drop_values(parameter)


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose parameters have no values."""
    empty: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, empty)
