"""Adapters where AutoTP cuts the layers beneath: their narrow matrices are cut with them.

A layer that is cut by outputs cuts B by rows, and the gradient of what A gives it is summed over the ranks.
One that is cut by inputs cuts A by columns, and what A gives is summed. The other matrix is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.utils import groups
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from pipeline.checkpoint.shards import Box
from pipeline.engine.tensor_parallel import locate_part
from pipeline.models.adapters import ADAPTER_NAME, find_adapter_layers


@contextmanager
def detach_adapters(model: nn.Module) -> Iterator[None]:
    """Take the adapters out of the model inside it, so that its own layers can be cut; then cut and put them
    back.
    """
    layers = list(find_adapter_layers(model))
    for name, layer in layers:
        model.set_submodule(name, layer.base_layer)
    yield
    for name, layer in layers:
        layer.base_layer = model.get_submodule(name)
        model.set_submodule(name, layer)
        _cut(layer)


@torch.no_grad()
def _cut(layer: Any) -> None:
    told = getattr(layer.base_layer.weight, DS_AUTOTP_UC_META, None)
    if told is None or told["replicated"] or told["partition_dim"] is None:
        return
    group = groups.get_tensor_model_parallel_group()
    narrow, wide = layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]
    outputs, inputs = told["original_shape"]
    view, dim = told["logical_shape"], told["partition_dim"]
    magnitude = dict(layer.lora_magnitude_vector).get(ADAPTER_NAME)  # DoRA alone has one
    if dim == len(view) - 1:  # by inputs
        rank = len(narrow.weight)
        _keep_part(
            narrow,
            told | {"original_shape": (rank, inputs), "logical_shape": (rank, inputs), "partition_dim": 1},
        )
        narrow.register_forward_hook(lambda _, __, output: _Summed.apply(output, group, True))
        if magnitude is not None:
            magnitude.__class__ = _DividedByInputs
    else:
        rank = wide.weight.shape[1]
        _keep_part(wide, told | {"original_shape": (outputs, rank), "logical_shape": (*view[:-1], rank)})
        narrow.register_forward_hook(lambda _, __, output: _Summed.apply(output, group, False))
        if magnitude is not None:
            _keep_part(magnitude, told | {"original_shape": (outputs,), "logical_shape": view[:-1]})
    if magnitude is not None and magnitude.weight.isnan().any():  # worked out of a part of the weights
        weight = layer.base_layer.weight
        magnitude.weight.copy_(magnitude.get_weight_norm(weight, torch.zeros_like(weight), 0.0))


def _keep_part(module: nn.Module, told: dict[str, Any]) -> None:
    """Put the rank's part of a module's weight in place of the whole, with the note of which part it is."""
    whole: Any = module.weight
    rank, size = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
    widths = told["sub_param_shard_widths"] or [told["partition_sizes"]]
    taken = sum(each[rank] for each in widths)
    view, dim = told["logical_shape"], told["partition_dim"]
    # In the first dimension of the matrix a view may have several.
    shape = list(whole.shape)
    at = max(0, dim - (len(view) - len(shape)))
    shape[at] = shape[at] * taken // sum(map(sum, widths))
    part = nn.Parameter(whole.new_empty(shape), whole.requires_grad)
    setattr(part, DS_AUTOTP_UC_META, told)
    part.tensor_model_parallel = True  # type: ignore[attr-defined]
    for own, there in locate_part("", part, tuple(shape), rank, size).boxes:
        part[_slices(own)] = whole[_slices(there)]
    module.weight = part
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape


def _slices(box: Box | None) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in box or ())


class _Summed(torch.autograd.Function):
    """The sum over a tensor group in forward, or of the gradient in backward; the other way unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, in_forward: bool) -> Tensor:
        ctx.group, ctx.in_forward = group, in_forward
        return _sum(values, group) if in_forward else values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient if ctx.in_forward else _sum(gradient, ctx.group), None, None


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _DividedByInputs(DoraLinearLayer):
    """DoRA of a layer whose rows lie on several ranks: their lengths are of all parts together."""

    def get_lora_weight(
        self, lora_A: nn.Module, lora_B: nn.Module, adapter_name: str | None = None
    ) -> Tensor:
        """Return this rank's columns (outputs, inputs of the rank)."""
        product: Tensor = lora_B.weight @ lora_A.weight  # type: ignore[operator]
        return product

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        """Return the lengths of the whole rows (outputs,)."""
        squares = (weight + scaling * lora_weight).square().sum(1)
        return _sum(squares, groups.get_tensor_model_parallel_group()).sqrt()
