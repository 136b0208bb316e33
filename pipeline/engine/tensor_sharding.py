"""Tensor-parallel sharding while a model is made: a rank stores only its own parts of cut matrices.

DeepSpeed's AutoTP cuts matrices that are whole on every rank, so host memory would limit the model's size.
Here AutoTP first cuts a copy without values, which shows this rank's part of each matrix. Then all weights
are drawn or read in the same order on every rank, one module or tensor at a time, and each rank saves its
parts. At the end AutoTP cuts the model itself, and each rank sets the parameters to its saved parts.
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
from pipeline.engine.tensor_parallel import (
    complete_tensor_section,
    enable_vocabulary_parallel_loss,
    place_cut_parameters,
)
from pipeline.errors import ModelError, summarize_error
from pipeline.models.adapters import has_adapter, is_base
from pipeline.models.sharding import allocate_values, free_values, set_values
from pipeline.objectives import refuse_router_loss


class _Part:
    """Stores this rank's part of one parameter, in the shape that the parameter has after the cut."""

    def __init__(self, placement: TensorPlacement, dtype: torch.dtype):
        """Allocate memory for the values.

        All parts are allocated before parameters get values, so that freed whole parameters leave no gaps.
        """
        self.placement = placement
        self.values = torch.empty(placement.local_shape, dtype=dtype)
        self.has_values = False
        """Whether `values` are the parameter's; before, they are undefined."""

    @torch.no_grad()
    def copy_from(self, whole: Tensor) -> None:
        """Copy this rank's part out of the whole parameter."""
        for part_index, whole_index in self._find_slices():
            self.values[part_index] = whole[whole_index]
        self.has_values = True

    @torch.no_grad()
    def copy_into(self, whole: Tensor) -> None:
        """Copy this rank's part into the whole parameter."""
        for part_index, whole_index in self._find_slices():
            whole[whole_index] = self.values[part_index]

    def _find_slices(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield pairs of indices: of a box in the part, and of the same values in the whole parameter."""
        for boxes in self.placement.boxes:
            part_index, whole_index = (tuple(slice(*bounds) for bounds in box or ()) for box in boxes)
            yield part_index, whole_index


class TensorSharding:
    """Implements pipeline.models.sharding.Sharding: a rank has values only for its parts of cut matrices.

    Every rank draws all weights in the same order, module by module, so that initial weights depend on the
    seed only. A cut parameter is whole only while it is drawn or filled.

    A parameter that is made whole again has values in this rank's part and NaN elsewhere. Therefore an
    `_init_weights` may change drawn parameters element by element, as in a whole model. But a result that
    needs all values of a parameter (a norm, a mean) is NaN.
    """

    loads_by_tensor = True
    zero3_config: dict[str, Any] | None = None

    def __init__(self, config: dict[str, Any], split: Split):
        """Prepare to divide a model.

        Args:
            config: Resolved DeepSpeed JSON.
            split: Split of the run.
        """
        self._config = {"tensor_parallel": dict(config["tensor_parallel"])}
        self._split = split
        self._is_divided = False
        self._parts: dict[nn.Parameter, list[_Part]] = {}

    def construct(self) -> AbstractContextManager[None]:
        """See Sharding.construct. Nothing is sharded here: `divide` saves parts and drops whole values."""
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
            ModelError: AutoTP cannot cut the model, or does not state how it cuts a parameter.
        """
        if self._is_divided:
            return
        self._is_divided = True
        refuse_router_loss(model, "tensor parallelism")
        complete_tensor_section(self._config, model)
        build_parallel_state(self._split)
        empty_copy = _copy_without_values(model)
        try:
            # AutoTP's console output is hidden, since it appears again when the model itself is cut. The
            # random state is restored, since AutoTP makes embeddings, which draw initial weights.
            with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
                self._apply_autotp(empty_copy)
        except (NotImplementedError, ValueError) as error:  # DeepSpeed's errors about how to cut
            raise ModelError(f"tensor_parallel: {summarize_error(error)}") from None
        parameters_by_name = dict(model.named_parameters(remove_duplicate=False))
        placements = list(place_cut_parameters(empty_copy).values())
        # A tied parameter that is whole under one of its names keeps all values; AutoTP cuts it later.
        whole = {
            parameters_by_name[placement.name] for placement in placements if placement.boxes == WHOLE_TENSOR
        }
        for placement in placements:
            parameter = parameters_by_name[placement.name]
            if parameter not in whole:
                self._parts.setdefault(parameter, []).append(_Part(placement, parameter.dtype))
        for parameter in self._parts:
            if not parameter.is_meta:
                self._save_parts(parameter)

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
        temporary = []
        for parameter in dict.fromkeys(parameters):
            if parameter.is_meta and parameter in self._parts:
                temporary.append(parameter)
            elif parameter.is_meta:
                allocate_values(parameter)
        for parameter in temporary:
            allocate_values(parameter)
            self._fill_from_parts(parameter)
        try:
            yield
        finally:
            for parameter in temporary:
                self._save_parts(parameter)

    def cut(self, model: nn.Module) -> None:
        """Cut the model to this rank's parts, after all its values were drawn or read. Collective.

        Call it before an optimizer is made.
        """
        if has_adapter(model):
            # Imported late, since it imports peft, which takes seconds.
            from pipeline.engine.tensor_adapters import detach_adapters

            with detach_adapters(model):
                self._cut(model)
        else:
            self._cut(model)
        enable_vocabulary_parallel_loss(model)

    def _cut(self, model: nn.Module) -> None:
        """Have AutoTP cut the model, and set the parameters to the saved parts."""
        before = dict(model.named_parameters(remove_duplicate=False))
        self._apply_autotp(model)
        parts_by_name = {part.placement.name: part for parts in self._parts.values() for part in parts}
        self._parts = {}
        for name, parameter in model.named_parameters():
            # AutoTP may have replaced the parameter by a new one without these attributes.
            parameter.requires_grad_(before[name].requires_grad)
            parameter.is_base = is_base(before[name])  # type: ignore[attr-defined]
            part = parts_by_name.get(name)
            if part is not None and part.has_values:
                assert parameter.shape == part.values.shape, name
                assert not parameter._backward_hooks, name  # set_values would lose them
                set_values(parameter, part.values)
            assert not parameter.is_meta, name

    def _apply_autotp(self, model: nn.Module) -> None:
        """Cut the model by DeepSpeed's AutoTP, as the JSON's section `tensor_parallel` says."""
        for module in model.modules():
            weight = module._parameters["weight"] if isinstance(module, nn.Embedding) else None
            if weight is not None and weight.is_meta:
                allocate_values(weight)  # undefined values, since AutoTP may copy from the weight
        set_autotp_mode(training=True)
        engine = SimpleNamespace(local_rank=-1, autotp_size=lambda: self._split.tensor_parallel)
        section = get_tensor_parallel_config(self._config)
        DeepSpeedEngine._apply_autotp_partitioning(engine, model, section)

    def _fill_from_parts(self, parameter: nn.Parameter) -> None:
        """Copy this rank's parts into the whole parameter, with NaN (or 0) elsewhere."""
        parts = [part for part in self._parts[parameter] if part.has_values]
        if parts:
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else 0)
        for part in parts:
            part.copy_into(parameter)

    def _save_parts(self, parameter: nn.Parameter) -> None:
        """Copy this rank's parts out of the whole parameter, and drop the parameter's values."""
        for part in self._parts[parameter]:
            part.copy_from(parameter)
        free_values(parameter)


def _copy_without_values(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose parameters have no values."""
    empty: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, empty)
