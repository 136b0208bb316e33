"""A model, an objective and data in which one sample causes a value that is not finite, at a chosen place."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from support import tiny
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline.data.bundle import DataBundle

FAULT = SimpleNamespace(case="", sample=-1)
"""Place of the fault (`case`) and index of the faulty sample; a test sets both on every rank."""


class Samples(Dataset[Any]):
    """64 samples of nested, named and unread entries; one is faulty if `FAULT` says so."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        is_faulty = index == FAULT.sample
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        faulty_inputs = {"input": math.nan, "overflow": 1e5, "minus infinity": -math.inf}
        if is_faulty and FAULT.case in faulty_inputs:
            x[1] = faulty_inputs[FAULT.case]
        speed = torch.tensor([math.inf if is_faulty and FAULT.case == "nested" else 0.5])
        target = torch.tensor(math.nan if is_faulty and FAULT.case == "target" else 1.0)
        unread = torch.tensor(math.nan if FAULT.case in ("layer", "loss", "unread") else 1.0)
        mask = torch.tensor([0.0, -math.inf])
        entries = {"x": x, "state": {"speed": speed}, "mark": torch.tensor([int(is_faulty)])}
        return entries | {"mask": mask, "targets": target, "unread": unread, "name": f"no {index}"}


class NanWhereMarked(nn.Module):
    """Replaces the values of the marked sample by NaN."""

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        return torch.where(mark > 0, math.nan, x)


class Model(nn.Module):
    """Small regression model with a module that can output NaN, BatchNorm and dropout."""

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
    """Return the sum of squared errors, after a check that names and marks belong to the same samples."""
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
    """Four held-out samples; all inputs are NaN in the case "held out"."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample | ({"x": sample["x"] * math.nan} if FAULT.case == "held out" else {})


def make_bundle(held_out: dict[str, Dataset[Any]] | None = None) -> DataBundle:
    """Return the data of a run that trains on `Samples`."""
    return tiny.make_bundle(Samples(), held_out or {}, None, "toy")
