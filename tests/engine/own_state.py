"""A small model of which ranks may hold what the others do not, and still have the same weights."""

from __future__ import annotations

import os

import torch
from support.tiny import VOCABULARY
from torch import Tensor, nn

WIDTH = 7  # odd: flat buffers of ZeRO have padding behind it


class OwnState(nn.Module):
    """Args: case: One of CASES."""

    def __init__(self, case: str = "nothing"):
        super().__init__()
        self.case, self.calls, self.rank = case, 0, int(os.environ.get("RANK", "0"))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.norm = nn.BatchNorm1d(WIDTH) if case == "batch norm" else nn.Identity()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3 if "expert" in case else 0)])
        if case == "tied weights":
            self.head.weight = self.embed.weight
        if case == "frozen":
            self.embed.weight.requires_grad_(False)
        if case == "own buffer":
            self.register_buffer("own", torch.zeros(WIDTH), persistent=False)
        if case == "negative zeros":
            self.nothing = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(self.embed(input_ids).flatten(0, 1)).view(*input_ids.shape, WIDTH)
        if self.case == "dropout":
            x = nn.functional.dropout(x, 0.5, self.training)
        if self.case == "own buffer":
            self.own += self.rank
            x = x + self.own
        if self.case == "negative zeros":  # +0.0 on one rank, -0.0 on another
            x = x + self.nothing * (0.0 if self.rank else -0.0)
        if self.case == "an expert without tokens":
            chosen = input_ids % (2 + self.rank)  # the third has some on rank 1 alone
            x = x + sum((chosen == k)[..., None] * each(x) for k, each in enumerate(self.experts))
        if self.case == "an expert that one rank uses":
            x = x + sum(each(x) for each in self.experts[: 2 + self.rank])
        if self.case == "NaN" and self.rank and self.calls == 4:
            x = x * float("nan")
        return self.head(x)


CASES = (
    *("nothing", "batch norm", "dropout", "own buffer", "tied weights", "frozen", "negative zeros", "NaN"),
    *("an expert without tokens", "an expert that one rank uses"),
)
