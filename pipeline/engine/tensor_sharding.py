"""AutoTP while a model is made: of a matrix that it will cut, a rank keeps its own part alone.

DeepSpeed cuts matrices that lie whole on every rank. Here it cuts a model without values, to say which part
is whose, and the model itself, of which this rank then puts its parts in place.
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
    """What this rank keeps of one parameter: of the shape that its own has once it is cut."""

    def __init__(self, place: TensorPlacement, dtype: torch.dtype):
        """Allocate the memory at once, so that whole parameters leave no holes between the parts."""
        self.place = place
        self.values = torch.empty(place.own_shape, dtype=dtype)
        self.is_there = False

    @torch.no_grad()
    def take(self, whole: Tensor) -> None:
        for own, there in self._slices():
            self.values[own] = whole[there]
        self.is_there = True

    @torch.no_grad()
    def put(self, whole: Tensor) -> None:
        for own, there in self._slices():
            whole[there] = self.values[own]

    def _slices(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        for boxes in self.place.boxes:
            own, there = (tuple(slice(*bounds) for bounds in box or ()) for box in boxes)
            yield own, there


class TensorSharding:
    """See pipeline.models.sharding.Sharding: this rank has values for its parts of cut matrices alone.

    Every rank draws all weights, module by module, so that random numbers stay in step. A cut parameter is
    whole for as long as it is drawn or filled.

    Where one is made whole again, this rank's part has its values and the rest is NaN. So an `_init_weights`
    that changes a parameter drawn before it element by element does what it does to a whole model; what it
    computes from all of its values (a norm, a mean) is NaN.
    """

    loads_by_tensor = True
    zero3_config: dict[str, Any] | None = None

    def __init__(self, config: dict[str, Any], split: Split):
        """Prepare to cut a model.

        Args:
            config: The DeepSpeed JSON, filled in.
        """
        self._config = {"tensor_parallel": dict(config["tensor_parallel"])}
        self._split = split
        self._is_made = False
        self._parts: dict[nn.Parameter, list[_Part]] = {}

    def construct(self) -> AbstractContextManager[None]:
        """See Sharding.construct: what a module draws for itself is whole until the model is made."""
        return contextlib.nullcontext()

    def construct_empty(self) -> AbstractContextManager[None]:
        """See Sharding.construct_empty. Buffers have values."""
        from accelerate import init_empty_weights

        context: AbstractContextManager[None] = init_empty_weights(include_buffers=False)
        return context

    def divide(self, model: nn.Module) -> None:
        """See Sharding.divide. Makes the tensor groups; the second call of a model does nothing.

        Raises:
            ConfigError: the model's routers are to be balanced.
            ModelError: AutoTP cannot cut it, or does not say how it does.
        """
        if self._is_made:
            return
        self._is_made = True
        refuse_router_loss(model, "tensor parallelism")
        complete_tensor_section(self._config, model)
        build_parallel_state(self._split)
        twin = _without_values(model)
        try:
            # What it prints, it prints again of the model itself. A new embedding draws before it is filled.
            with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
                self._partition(twin)
        except (NotImplementedError, ValueError) as error:  # of how to cut, in DeepSpeed's words
            raise ModelError(f"tensor_parallel: {summarize_error(error)}") from None
        named = dict(model.named_parameters(remove_duplicate=False))
        places = list(place_cut_parameters(twin).values())
        # What is whole under one of its names has all values, from which AutoTP itself takes the parts.
        whole = {named[place.name] for place in places if place.boxes == WHOLE_TENSOR}
        for place in places:
            if (parameter := named[place.name]) not in whole:
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
            part.is_there = True

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
        """Make the model, with all its values, this rank's part of it. Collective; before an optimizer."""
        if has_adapter(model):
            from pipeline.engine.tensor_adapters import detach_adapters  # imports peft, which takes seconds

            with detach_adapters(model):
                self._cut(model)
        else:
            self._cut(model)
        share_vocabulary(model)

    def _cut(self, model: nn.Module) -> None:
        before = dict(model.named_parameters(remove_duplicate=False))
        self._partition(model)
        kept = {part.place.name: part for parts in self._parts.values() for part in parts}
        self._parts = {}
        for name, parameter in model.named_parameters():
            # What is cut may be a new one.
            parameter.requires_grad_(before[name].requires_grad)
            parameter.is_base = is_base(before[name])  # type: ignore[attr-defined]
            if name in kept and kept[name].is_there:
                assert parameter.shape == kept[name].values.shape, name
                assert not parameter._backward_hooks, name  # they would stay with the empty one
                set_values(parameter, kept[name].values)
            assert not parameter.is_meta, name

    def _partition(self, model: nn.Module) -> None:
        for module in model.modules():
            weight = module._parameters["weight"] if isinstance(module, nn.Embedding) else None
            if weight is not None and weight.is_meta:
                allocate_values(weight)  # AutoTP may copy from it, whatever it holds
        set_autotp_mode(training=True)
        engine = SimpleNamespace(local_rank=-1, autotp_size=lambda: self._split.tensor_parallel)
        section = get_tensor_parallel_config(self._config)
        DeepSpeedEngine._apply_autotp_partitioning(engine, model, section)

    def _put_parts(self, parameter: nn.Parameter) -> None:
        parts = [part for part in self._parts[parameter] if part.is_there]
        if parts:
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else 0)
        for part in parts:
            part.put(parameter)

    def _keep_parts(self, parameter: nn.Parameter) -> None:
        for part in self._parts[parameter]:
            part.take(parameter)
        drop_values(parameter)


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters have shapes alone."""
    empty: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, empty)
