"""On a CPU: which documents of a batch share a call of torch's attention, and what that kernel is left."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pipeline.models.block_attention import Scores
from pipeline.planning.chunks import QUERIES

BLOCK = 64  # tokens of short documents that share one small mask on a CPU

Runs = list[tuple[int, Tensor | None]]
"""Tokens of one call on a CPU, and the mask of its documents; None: it is one document."""


def is_served(query: Tensor, value: Tensor, longest: int, sinks: Tensor | None, scores: Scores) -> bool:
    """Whether torch's kernel on a CPU takes documents of up to `longest` tokens and makes no T x T scores."""
    if scores.softcap is not None or sinks is not None or longest > (scores.window or longest):
        return False
    return longest <= QUERIES or (scores.dropout == 0 and query.shape[-1] == value.shape[-1])


def runs_of(bounds: list[int], rows: int) -> Runs | None:
    """The calls that serve these documents; None: each row is one document."""
    sizes = [end - start for start, end in pairwise(bounds) if end > start]
    if len(sizes) == rows:
        return None
    runs: list[list[int]] = []
    filled = BLOCK
    for size in sizes:
        if filled + size > BLOCK:
            runs.append([])
            filled = 0
        runs[-1].append(size)
        filled += size
    return [(sum(run), _mask(run) if len(run) > 1 else None) for run in runs]


def _mask(sizes: list[int]) -> Tensor:
    """(n, n), 0 where one attends, else -inf: a boolean one would be made into that by every layer."""
    document = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    is_seen = (document[:, None] == document).tril_()
    return torch.zeros(is_seen.shape, dtype=torch.float32).masked_fill_(~is_seen, -torch.inf)
