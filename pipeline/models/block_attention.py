"""Causal attention where no fused kernel of torch's computes it, and what its kernel on a CPU is given.

In blocks of queries, on any device, scores are those of one block at a time and made again in backward, so
memory grows with T and not with T^2. Shapes as in document_attention, and Q: queries of a block, K: keys
that one of them may attend to.

On a CPU torch's kernel computes in fp32 also where bf16 comes and goes: in bf16 it multiplies small blocks
by a general product of half precision, and forward and backward together take 1.6 to 2.2 times as long as
in fp32, copies included.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.planner.chunks import QUERIES


@dataclass(frozen=True)
class Scores:
    """What a layer asks of its scores."""

    scaling: float | None = None
    """None: 1 / sqrt(width)."""
    window: int | None = None
    """Tokens that one attends to, itself included."""
    softcap: float | None = None
    """c of c * tanh(scores / c)."""
    dropout: float = 0.0

    def asks(self, sinks: Tensor | None) -> bool:
        """Whether it is more than a mask."""
        return self.softcap is not None or sinks is not None or self.dropout > 0


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, sinks: Tensor | None, scores: Scores
) -> Tensor:
    """-> (B, T, heads, width of value): a token attends to those before it in its document and its window.

    The host looks at bounds on a CPU alone, where it leaves out keys that a block has no use for.

    Args:
        bounds: Of the documents; None: each row is one.
        sinks: (heads,): scores of one more key, whose value is 0, for every query (gpt-oss); None: no such.
    """
    if torch.is_autocast_enabled(kind := _kind(query)):  # which knows scaled_dot_product_attention alone
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows, _, length, _ = query.shape
    first = _first_keys(bounds, rows, length, scores.window, query.device)
    starts = range(0, length, QUERIES)
    if query.device.type == "cpu":
        begins = first[:, ::QUERIES].amin(0).tolist()
    else:
        begins = [0 if scores.window is None else max(0, start - scores.window + 1) for start in starts]
    blocks = [
        _Block(start, min(start + QUERIES, length), begin)
        for start, begin in zip(starts, begins, strict=True)
    ]
    output: Tensor = _InBlocks.apply(query, key, value, sinks, first, scores, blocks)
    return output


def _first_keys(
    bounds: Tensor | None, rows: int, length: int, window: int | None, device: torch.device
) -> Tensor:
    """(B or 1, T): the first token of its row that each token attends to."""
    tokens = torch.arange(length, device=device)
    first = torch.zeros_like(tokens)[None]
    if bounds is not None:
        places = torch.arange(rows * length, device=device, dtype=bounds.dtype)
        begins = bounds[torch.searchsorted(bounds, places, right=True) - 1].view(rows, length)
        first = begins - torch.arange(0, rows * length, length, device=device)[:, None]
    return first if window is None else torch.maximum(first, tokens - window + 1)


@dataclass(frozen=True)
class _Block:
    """Queries start to end of all rows, and their keys: from begin to end."""

    start: int
    end: int
    begin: int

    def cut(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = slice(self.begin, self.end)
        return query[:, :, self.start : self.end], key[:, :, keys], value[:, :, keys]

    def is_seen(self, first: Tensor) -> Tensor:
        """(B or 1, 1, Q, K)"""
        keys = torch.arange(self.begin, self.end, device=first.device)
        queries = torch.arange(self.start, self.end, device=first.device)[:, None]
        return ((keys >= first[:, self.start : self.end, None]) & (keys <= queries))[:, None]


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        first: Tensor,
        scores: Scores,
        blocks: list[_Block],
    ) -> Tensor:
        rows, heads, length, _ = query.shape
        ctx.save_for_backward(query, key, value, sinks, first)
        ctx.scores, ctx.blocks = scores, blocks
        if scores.dropout:
            ctx.random = _random_states(query.device)
        output = query.new_empty(rows, length, heads, value.shape[-1])
        for block in blocks:
            found = _attend(*block.cut(query, key, value), sinks, block.is_seen(first), scores)
            output[:, block.start : block.end] = found.transpose(1, 2)
        return output

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, first = ctx.saved_tensors
        scores: Scores = ctx.scores
        # Blocks add to the gradients of a key: in fp32, as a kernel does.
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(t, dtype=_wide(t.dtype)) for t in (key, value))
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=_wide(sinks.dtype))
        devices = [query.device] if query.is_cuda else []
        with torch.random.fork_rng(devices, enabled=scores.dropout > 0):
            if scores.dropout:
                _set_random_states(query.device, ctx.random)
            for block in ctx.blocks:
                q, k, v = given = [t.detach().requires_grad_() for t in block.cut(query, key, value)]
                sink = [] if sinks is None else [sinks.detach().requires_grad_()]
                with torch.enable_grad():
                    found = _attend(q, k, v, sink[0] if sink else None, block.is_seen(first), scores)
                of_found = of_output[:, block.start : block.end].transpose(1, 2)
                mine = torch.autograd.grad(found, [*given, *sink], of_found)
                of_query[:, :, block.start : block.end] = mine[0]
                of_key[:, :, block.begin : block.end] += mine[1]
                of_value[:, :, block.begin : block.end] += mine[2]
                if of_sinks is not None:
                    of_sinks += mine[3]
        narrow = None if of_sinks is None else of_sinks.to(sinks.dtype)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), narrow, None, None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, is_seen: Tensor, scores: Scores
) -> Tensor:
    """(B, heads, Q, width of value)"""
    heads, groups, scaling, dtype = query.shape[1], key.shape[1], scores.scaling, query.dtype
    if dtype == torch.bfloat16 and not query.is_cuda:  # see cpu_attention
        query, key, value = (t.to(_wide(dtype)) for t in (query, key, value))
    with torch.autocast(_kind(query), enabled=False):  # backward computes as forward did
        if not scores.asks(sinks):
            if query.is_cuda and heads != groups:  # its kernel that takes a mask knows no groups
                key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
            return F.scaled_dot_product_attention(
                query, key, value, is_seen, scale=scaling, enable_gqa=key.shape[1] != heads
            ).to(dtype)
        # The heads of a group are more queries of it: keys are not repeated.
        together = query.unflatten(1, (groups, -1)).flatten(2, 3) @ key.mT
        found = together.to(_wide(together.dtype)).unflatten(2, (heads // groups, -1))
        found = found * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if scores.softcap is not None:
            found = (found / scores.softcap).tanh() * scores.softcap
        found = found.masked_fill(~is_seen[:, :, None], -torch.inf)
        if sinks is not None:
            column = sinks.to(found.dtype).view(groups, -1, 1, 1).expand(*found.shape[:-1], 1)
            found = torch.cat([found, column], -1).softmax(-1)[..., :-1]
        else:
            found = found.softmax(-1)
        found = F.dropout(found.to(value.dtype), scores.dropout)
        return (found.flatten(2, 3) @ value).unflatten(2, (heads // groups, -1)).flatten(1, 2).to(dtype)


def _kind(of: Tensor) -> str:
    return "cpu" if of.device.type == "cpu" else "cuda"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _set_random_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


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


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """-> (B, heads, T, width). Causal, or as the mask says.

    Args:
        mask: (T, T), fp32: what is added to the scores.
        scores: Scaling and dropout count.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.dtype == torch.bfloat16 and scores.dropout == 0 and query.shape[-1] == value.shape[-1]:
        output: Tensor = _InFp32.apply(query, key, value, mask, scores.scaling)
        return output
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else mask.to(query.dtype),
        dropout_p=scores.dropout,
        is_causal=mask is None,
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class _InFp32(torch.autograd.Function):
    """Keeps what came, and no copy of it: these are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        wide, of_rows = _forward(
            query.float(), key.float(), value.float(), 0.0, mask is None, attn_mask=mask, scale=scaling
        )
        output: Tensor = wide.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, of_rows)
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, of_rows = ctx.saved_tensors
        wide = [t.float() for t in (of_output, query, key, value, output)]
        found = _backward(*wide, of_rows, 0.0, mask is None, attn_mask=mask, scale=ctx.scaling)
        return *(t.to(query.dtype) for t in found), None, None
