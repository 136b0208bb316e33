"""Batch normalisation over the micro-batches of all data-parallel ranks, as one rank would compute it.

torch.nn.SyncBatchNorm does it on a GPU and refuses CPU tensors; there a small module of our own does.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

log = logging.getLogger(__name__)

# Exactly these: a subclass may compute something else.
KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def count_batch_norms(model: nn.Module) -> int:
    """Return the number of layers whose statistics depend on how the batch is divided."""
    return sum(type(layer) in KINDS for layer in model.modules())


def is_sync_batch_norm(layer: nn.Module) -> bool:
    """Return whether a layer's running statistics count the samples of all ranks."""
    return isinstance(layer, (nn.SyncBatchNorm, CPUSyncBatchNorm))


def synchronise_batch_norm(
    model: nn.Module, process_group: dist.ProcessGroup | None, device: torch.device
) -> nn.Module:
    """Let every BatchNorm1d, 2d and 3d of the model count the samples of all ranks of the group.

    Parameters stay the same objects (also sharded by ZeRO-3), and names in the state dict stay.

    Args:
        process_group: The data-parallel ranks; None: all ranks.
        device: What the model will compute on.
    """
    made: dict[nn.Module, nn.Module] = {}

    def synchronised(layer: nn.Module) -> nn.Module:
        if layer not in made:
            if device.type == "cuda":
                made[layer] = nn.SyncBatchNorm.convert_sync_batchnorm(layer, process_group)
            else:
                made[layer] = CPUSyncBatchNorm(layer, process_group)
        return made[layer]

    if type(model) in KINDS:
        model = synchronised(model)
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):  # named_children gives a shared layer once
            if layer is not None and type(layer) in KINDS:
                setattr(parent, name, synchronised(layer))
    if made:
        log.info(
            "batch normalisation: %d layer%s count%s the samples of all %d data-parallel ranks",
            len(made),
            "s" * (len(made) > 1),
            "s" * (len(made) == 1),
            dist.get_world_size(process_group),
        )
    return model


class CPUSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch normalisation layer's training over all ranks' samples, however many each one has.

    Two all-reduces forward (sum and count; squares around the mean, which do not cancel) and two backward.
    Statistics are computed in fp32. In evaluation it is what it was made of.
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
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.training = layer.training
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of (N, C, ...), given {input.dim()} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input (N, C, ...)."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input if input.dtype == torch.float64 else input.float()
        others = [0, *range(2, x.dim())]
        per_channel = [1, -1, *[1] * (x.dim() - 2)]
        count = x.new_tensor([x.numel() // x.shape[1]])
        total = self._over_ranks(torch.cat([x.sum(others), count]))
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = x - mean.view(per_channel)
        variance = self._over_ranks(centred.square().sum(others)) / count
        self._remember(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        y = centred * (variance + self.eps).rsqrt().view(per_channel)
        if self.weight is not None:
            y = y * self.weight.view(per_channel)
        if self.bias is not None:
            y = y + self.bias.view(per_channel)
        return y.to(input.dtype)

    def _over_ranks(self, tensor: Tensor) -> Tensor:
        total: Tensor = _AllReduceSum.apply(tensor, self.process_group)
        return total

    @torch.no_grad()
    def _remember(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # No momentum: the mean over all batches so far.
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), share)


class _AllReduceSum(torch.autograd.Function):
    """Every rank's loss depends on the sum, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
        ctx.process_group = process_group
        total = tensor.clone()
        dist.all_reduce(total, group=process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(grad_outputs[0].contiguous(), ctx.process_group), None
