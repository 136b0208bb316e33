"""A model, a data set and a loss of your own: see docs/how-to/extending.md."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def waves(split: str, num_samples: int = 512) -> TensorDataset:
    """y = sin(3x) with noise: samples (x, y). Called with "train" and with "eval"."""
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    x = torch.rand(num_samples, 1, generator=generator) * 4 - 2
    return TensorDataset(x, torch.sin(3 * x) + 0.05 * torch.randn(num_samples, 1, generator=generator))


def mlp(width: int = 64) -> nn.Module:
    """Any nn.Module."""
    hidden = [nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


def squared_error(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the SUM over the micro-batch; the mean over the global batch is taken for you."""
    return (outputs - batch["targets"]).square().sum()
