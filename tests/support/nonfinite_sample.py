"""A model, an objective and data in which one sample is spoilt, each time in another place."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline.data.batches import collate_items
from pipeline.data.bundle import DataBundle

FAULT = SimpleNamespace(case="", sample=-1)
"""What is wrong, and with which sample. Ranks are processes of their own."""


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        is_spoilt = index == FAULT.sample
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        wrong = {"input": math.nan, "overflow": 1e5, "minus infinity": -math.inf}
        if is_spoilt and FAULT.case in wrong:
            x[1] = wrong[FAULT.case]
        speed = torch.tensor([math.inf if is_spoilt and FAULT.case == "nested" else 0.5])
        target = torch.tensor(math.nan if is_spoilt and FAULT.case == "target" else 1.0)
        unread = torch.tensor(math.nan if FAULT.case in ("layer", "loss", "unread") else 1.0)
        mask = torch.tensor([0.0, -math.inf])
        entries = {"x": x, "state": {"speed": speed}, "mark": torch.tensor([int(is_spoilt)])}
        return entries | {"mask": mask, "targets": target, "unread": unread, "name": f"no {index}"}


class NanWhereMarked(nn.Module):
    """NaN where it is marked."""

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        return torch.where(mark > 0, math.nan, x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.root = NanWhereMarked()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, state: dict[str, Tensor], mark: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x) + state["speed"] + mask.softmax(dim=1)[:, 1:]
        if FAULT.case == "layer":
            x = self.root(x, mark)
        if FAULT.case == "between":
            x = torch.where(mark > 0, math.nan, x)
        return self.head(self.drop(self.norm(x)))[:, 0]


def loss(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
    """The sum of squares."""
    assert len(batch["name"]) == len(outputs)
    pairs = zip(batch["name"], batch["mark"], strict=True)
    assert all(name == f"no {FAULT.sample}" for name, is_marked in pairs if is_marked)
    squares = (outputs - batch["targets"]).square()
    if FAULT.case == "loss":
        squares = torch.where(batch["mark"][:, 0] > 0, math.nan, squares)
    if FAULT.case == "gradient":
        squares = squares + torch.where(batch["mark"][:, 0] > 0, outputs * 0, 1.0).sqrt()
    return squares.sum()


class HeldOut(Samples):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample | ({"x": sample["x"] * math.nan} if FAULT.case == "held out" else {})


def make_bundle(held_out: dict[str, Dataset[Any]] | None = None) -> DataBundle:
    return DataBundle(Samples(), held_out or {}, collate_items, None, None, None, "toy")
