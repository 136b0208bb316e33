"""Batch normalization over the micro-batches of all data-parallel ranks, as one rank would compute it.

On a GPU torch.nn.SyncBatchNorm computes it. That class refuses CPU tensors, for which there is
CPUSyncBatchNorm.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

log = logging.getLogger(__name__)

# Exact types only: a subclass may compute something else.
BATCH_NORM_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def count_batch_norms(model: nn.Module) -> int:
    """Return the number of layers whose statistics depend on how a batch is divided over ranks."""
    return sum(type(layer) in BATCH_NORM_CLASSES for layer in model.modules())


def is_sync_batch_norm(layer: nn.Module) -> bool:
    """Return whether a layer normalizes over the samples of all ranks."""
    return isinstance(layer, (nn.SyncBatchNorm, CPUSyncBatchNorm))


def synchronize_batch_norm(
    model: nn.Module, process_group: dist.ProcessGroup | None, device: torch.device
) -> nn.Module:
    """Let every BatchNorm1d, 2d and 3d of the model count the samples of all ranks of the group.

    Layers are replaced. Their parameters stay the same objects, also where ZeRO-3 shards them, and their
    names in the state dict stay the same.

    Args:
        model: The model, changed in place unless it is itself a batch normalization layer.
        process_group: The data-parallel ranks; `None`: all ranks.
        device: The device that the model will compute on.

    Returns:
        The model, or the layer that replaces it.
    """
    converted: dict[nn.Module, nn.Module] = {}

    def convert(layer: nn.Module) -> nn.Module:
        if layer not in converted:
            if device.type == "cuda":
                converted[layer] = nn.SyncBatchNorm.convert_sync_batchnorm(layer, process_group)
            else:
                converted[layer] = CPUSyncBatchNorm(layer, process_group)
        return converted[layer]

    if type(model) in BATCH_NORM_CLASSES:
        model = convert(model)
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):  # named_children yields a shared layer only once
            if layer is not None and type(layer) in BATCH_NORM_CLASSES:
                setattr(parent, name, convert(layer))
    if converted:
        log.info(
            "batch normalization: %d layer%s count%s the samples of all %d data-parallel ranks",
            len(converted),
            "s" * (len(converted) > 1),
            "s" * (len(converted) == 1),
            dist.get_world_size(process_group),
        )
    return model


class CPUSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization over the samples of all ranks, which may have different numbers of samples.

    In training, forward and backward take two all-reduces each. The first sums values and counts them. The
    second sums squared distances from the mean, which is more accurate than the difference of mean squares.
    Statistics are computed in fp32, or in fp64 for fp64 inputs. In evaluation the layer computes as the one
    that it replaces.

    Args:
        layer: The layer to replace, whose parameters and buffers this one shares.
        process_group: The ranks to count samples over; `None`: all.
    """

    def __init__(self, layer: Any, process_group: dist.ProcessGroup | None):
        super().__init__(
            layer.num_features,
            layer.eps,
            layer.momentum,
            affine=False,
            track_running_stats=layer.track_running_stats,
        )
        self.affine = layer.affine
        self.weight = layer.weight
        self.bias = layer.bias
        self.running_mean = layer.running_mean
        self.running_var = layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.training = layer.training
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input (N, C, ...) of 2 or more dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input (N, C, ...). Collective in training."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input if input.dtype == torch.float64 else input.float()
        all_but_channels = [0, *range(2, x.dim())]
        channel_shape = [1, -1, *[1] * (x.dim() - 2)]  # broadcasts a value for each channel
        own_count = x.new_tensor([x.numel() // x.shape[1]])
        total = self._sum_over_ranks(torch.cat([x.sum(all_but_channels), own_count]))
        count = total[-1].detach()
        mean = total[:-1] / count
        centered = x - mean.view(channel_shape)
        variance = self._sum_over_ranks(centered.square().sum(all_but_channels)) / count
        self._update_statistics(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        y = centered * (variance + self.eps).rsqrt().view(channel_shape)
        if self.weight is not None:
            y = y * self.weight.view(channel_shape)
        if self.bias is not None:
            y = y + self.bias.view(channel_shape)
        return y.to(input.dtype)

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        total: Tensor = _AllReduceSum.apply(tensor, self.process_group)
        return total

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # Without a momentum, the running statistics are the mean over all batches so far.
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), momentum)


class _AllReduceSum(torch.autograd.Function):
    """Sums a tensor over ranks. Backward sums gradients too, since every rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
        ctx.process_group = process_group
        total = tensor.clone()
        dist.all_reduce(total, group=process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(grad_outputs[0].contiguous(), ctx.process_group), None
