import numpy as np
import torch.nn.functional as F
from torch import nn


class Houses:
    def __init__(self, split):
        rng = np.random.default_rng(len(split))
        self.x = rng.normal(size=(16, 3))
        self.price = self.x.sum(axis=1) + 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], float(self.price[i])


def model():
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))


def loss(outputs, batch):
    return F.huber_loss(outputs, batch["targets"], reduction="sum")
