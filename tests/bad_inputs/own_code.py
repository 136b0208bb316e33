"""Models, data and losses as a user would write them, most with a mistake; named by import path."""

from __future__ import annotations

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def sized(size):
    return nn.Linear(size, size)


def frozen():
    return model().requires_grad_(False)


def no_model():
    return "a model"


def data(split):
    return [{"inputs": torch.zeros(1, 8, 8), "labels": torch.tensor(1)}] * 100 if split == "train" else None


def nothing(split):
    return None


def empty(split):
    return []


def generator(split):
    return (number for number in range(3))


def badly_named(split):
    return data("train") if split == "train" else {"a/b": data("train")}


NUMBER = 3
