"""A model with a chosen time per forward pass, which stops in a training step while a file exists."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor, nn


class Paced(nn.Module):
    """Linear classifier that sleeps `seconds` in each forward pass, and on while the file `asleep` exists."""

    def __init__(self, seconds: float, folder: str):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seconds = seconds
        self.asleep = Path(folder) / "asleep"

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        while self.training and self.asleep.exists():
            time.sleep(0.1)
        logits: Tensor = self.linear(inputs)
        return logits


def paced(seconds: float, folder: str) -> nn.Module:
    """Return the model of `model.kind: multinode.paced:paced`."""
    return Paced(seconds, folder)
