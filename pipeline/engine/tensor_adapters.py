"""Adapters under tensor parallelism: one of an adapter's two matrices, A and B, is cut like its layer.

If AutoTP cuts a layer by outputs, B is cut by rows, A stays whole, and the gradient of A's output is summed
over the ranks. If AutoTP cuts a layer by inputs, A is cut by columns, B stays whole, and A's output is summed
over the ranks. Then DoRA's row lengths of the weight need a sum over the ranks too.
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
    """Remove the adapters inside the context, so that AutoTP can cut the layers below them.

    When the context ends, the adapters are inserted again and cut like their layers.
    """
    layers = list(find_adapter_layers(model))
    for name, layer in layers:
        model.set_submodule(name, layer.base_layer)
    yield
    for name, layer in layers:
        layer.base_layer = model.get_submodule(name)
        model.set_submodule(name, layer)
        _cut_adapter(layer)


@torch.no_grad()
def _cut_adapter(layer: Any) -> None:
    """Cut the adapter of a layer as AutoTP has cut the layer."""
    metadata = getattr(layer.base_layer.weight, DS_AUTOTP_UC_META, None)
    if metadata is None or metadata["replicated"] or metadata["partition_dim"] is None:
        return
    group = groups.get_tensor_model_parallel_group()
    lora_a = layer.lora_A[ADAPTER_NAME]
    lora_b = layer.lora_B[ADAPTER_NAME]
    outputs, inputs = metadata["original_shape"]
    view = metadata["logical_shape"]
    dim = metadata["partition_dim"]
    magnitude = dict(layer.lora_magnitude_vector).get(ADAPTER_NAME)  # only DoRA has one
    if dim == len(view) - 1:  # cut by inputs
        shape = (len(lora_a.weight), inputs)
        _cut_weight(lora_a, metadata | {"original_shape": shape, "logical_shape": shape, "partition_dim": 1})
        lora_a.register_forward_hook(lambda _, __, output: _SumOverRanks.apply(output, group, True))
        if magnitude is not None:
            magnitude.__class__ = _InputCutDora
    else:  # cut by outputs
        lora_rank = lora_b.weight.shape[1]
        _cut_weight(
            lora_b,
            metadata | {"original_shape": (outputs, lora_rank), "logical_shape": (*view[:-1], lora_rank)},
        )
        lora_a.register_forward_hook(lambda _, __, output: _SumOverRanks.apply(output, group, False))
        if magnitude is not None:
            _cut_weight(magnitude, metadata | {"original_shape": (outputs,), "logical_shape": view[:-1]})
    # The magnitude is NaN if peft computed it while this rank had only a part of the weights; see
    # TensorSharding.
    if magnitude is not None and magnitude.weight.isnan().any():
        weight = layer.base_layer.weight
        magnitude.weight.copy_(magnitude.get_weight_norm(weight, torch.zeros_like(weight), 0.0))


def _cut_weight(module: nn.Module, metadata: dict[str, Any]) -> None:
    """Replace a module's weight by this rank's part of it.

    Args:
        module: Module with a whole weight.
        metadata: Metadata with which AutoTP would cut that weight; see tensor_parallel.locate_part. The part
            gets it as an attribute.
    """
    whole: Any = module.weight
    rank = groups.get_tensor_model_parallel_rank()
    num_ranks = groups.get_tensor_model_parallel_world_size()
    widths = metadata["sub_param_shard_widths"] or [metadata["partition_sizes"]]
    own_width = sum(each[rank] for each in widths)
    view = metadata["logical_shape"]
    dim = metadata["partition_dim"]
    shape = list(whole.shape)
    # The view may split the matrix's first dimension into several.
    cut_dim = max(0, dim - (len(view) - len(shape)))
    shape[cut_dim] = shape[cut_dim] * own_width // sum(map(sum, widths))
    part = nn.Parameter(whole.new_empty(shape), whole.requires_grad)
    setattr(part, DS_AUTOTP_UC_META, metadata)
    part.tensor_model_parallel = True  # type: ignore[attr-defined]
    for part_box, whole_box in locate_part("", part, tuple(shape), rank, num_ranks).boxes:
        part[_to_slices(part_box)] = whole[_to_slices(whole_box)]
    module.weight = part
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape


def _to_slices(box: Box | None) -> tuple[slice, ...]:
    """Return a box as an index of a tensor; `None` is the whole tensor."""
    return tuple(slice(*bounds) for bounds in box or ())


class _SumOverRanks(torch.autograd.Function):
    """Sums values over a tensor group in forward, or gradients in backward; the other pass is the identity.

    Args:
        values: Values of this rank.
        group: Process group over which they are summed.
        in_forward: Whether forward sums; if not, backward does.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, in_forward: bool) -> Tensor:
        ctx.group = group
        ctx.in_forward = in_forward
        return _sum_over_ranks(values, group) if in_forward else values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.in_forward:
            gradient = _sum_over_ranks(gradient, ctx.group)
        return gradient, None, None


def _sum_over_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the group in a new tensor. Collective."""
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _InputCutDora(DoraLinearLayer):
    """Computes DoRA for a layer cut by inputs: a row's length includes the row's parts on all ranks."""

    def get_lora_weight(
        self, lora_A: nn.Module, lora_B: nn.Module, adapter_name: str | None = None
    ) -> Tensor:
        """Return this rank's columns of the adapter's weight B x A, (outputs, inputs of the rank)."""
        product: Tensor = lora_B.weight @ lora_A.weight  # type: ignore[operator]
        return product

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        """Return the lengths of the whole rows, (outputs,)."""
        squares = (weight + scaling * lora_weight).square().sum(1)
        return _sum_over_ranks(squares, groups.get_tensor_model_parallel_group()).sqrt()
