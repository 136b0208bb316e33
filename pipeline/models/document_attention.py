"""Causal attention within the documents of a row, without a (T, T) mask on any device.

DocumentAttention is one function in transformers' table of attention functions. For rows with several
documents, transformers itself makes a (B, T, T) mask, which costs several times as much as the attention, and
reads the positions from the device. Here each engine computes the bounds of documents on the host
(engine/interface.py), and passes them on as transformers' `cu_seq_lens_q`.

No fused kernel computes sliding windows on a CPU or in fp32, capped scores (Gemma 2) or sinks (gpt-oss).
Here they are computed in blocks of queries. On a CPU, blocks also replace torch's T x T scores for dropout,
and for values of another width than keys. Backward computes the scores of a block again, which takes less
time than storing them (dropout at T 4,096: half the time).

Shapes: B rows of T tokens, query (B, heads, T, width), key and value (B, groups, T, width), bounds (N + 1,)
int32: the index of each document's first token among the B * T tokens, padded with B * T. A group is a key
head that several query heads share.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from pipeline.errors import ModelError
from pipeline.planner.model import QUERIES_PER_BLOCK

log = logging.getLogger(__name__)

ATTENTION_NAME = "documents"
"""The `attn_implementation` under which DocumentAttention is registered."""
BOUNDS_KEY = "cu_seq_lens_q"
"""Keyword argument of a forward with which transformers' models pass bounds on to their attention."""
CAUSAL_FROM_TOP_LEFT = 1  # torch's number of this mask, in CustomMaskType of its xFormers kernels
TOKENS_PER_DOCUMENT = 256  # average length from which on the number of bounds is the same for every batch
# torch 2.11's varlen_attn takes fewer key heads than query heads; later releases need this flag for it.
HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
# cuDNN's kernels are the fastest on Hopper and Blackwell for rows without a mask.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Arguments that a model may pass to its attention, but that are not supported here.
UNSUPPORTED_ARGUMENTS = ("position_bias",)
# Arguments that change scores; `s_aux` are sinks. They are unsupported for batches with a mask, since
# transformers' sdpa, which computes such batches, ignores them.
SCORE_ARGUMENTS = ("softcap", "s_aux")

_cpu_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""Query, key and value of a layer."""


@dataclass(frozen=True)
class ScoreOptions:
    """A layer's options for its attention scores."""

    scaling: float | None = None
    """Factor on scores; `None`: 1 / sqrt(width)."""
    window: int | None = None
    """Number of tokens that each token attends to, itself included; `None`: all before it, and itself."""
    softcap: float | None = None
    """Cap c of scores, as c * tanh(scores / c); `None`: no cap."""
    dropout: float = 0.0
    """Probability with which each weight after the softmax is set to 0."""
    sinks: Tensor | None = None
    """Scores (heads,) of an additional key with value 0, for every query (gpt-oss); `None`: no such key."""

    @property
    def has_cap_or_sinks(self) -> bool:
        """Return whether scores are capped or have sinks, which no kernel of torch supports."""
        return self.softcap is not None or self.sinks is not None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_in_blocks(qkv: QueryKeyValue, bounds: Tensor | None, scores: ScoreOptions) -> Tensor:
    """Return attention (B, T, heads, width of value), computed in blocks of queries.

    A token attends to itself and to the tokens before it in its document and window. Only on a CPU does the
    host read the bounds, to leave out keys that no query of a block attends to.

    Args:
        qkv: Query, key and value.
        bounds: The bounds of documents; `None`: each row is one document.
        scores: The layer's options for its scores.
    """
    query, key, value = _autocast(qkv)
    rows, _, length, _ = query.shape
    first_keys = _find_first_keys(bounds, rows, length, scores.window, query.device)
    starts = range(0, length, QUERIES_PER_BLOCK)
    if query.device.type == "cpu":
        key_starts = first_keys[:, ::QUERIES_PER_BLOCK].amin(0).tolist()
    elif scores.window is None:
        key_starts = [0] * len(starts)
    else:
        key_starts = [max(0, start - scores.window + 1) for start in starts]
    blocks = [
        _QueryBlock(start, min(start + QUERIES_PER_BLOCK, length), key_start)
        for start, key_start in zip(starts, key_starts, strict=True)
    ]
    # Sinks are an argument of their own, so that autograd gives them a gradient.
    without_sinks = replace(scores, sinks=None)
    output: Tensor = _BlockwiseAttention.apply(
        query, key, value, scores.sinks, first_keys, without_sinks, blocks
    )
    return output


def _autocast(qkv: QueryKeyValue) -> QueryKeyValue:
    """Cast as autocast would for scaled_dot_product_attention: it casts for no other attention function."""
    kind = _get_autocast_type(qkv[0])
    if not torch.is_autocast_enabled(kind):
        return qkv
    dtype = torch.get_autocast_dtype(kind)
    query, key, value = qkv
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _find_first_keys(
    bounds: Tensor | None, rows: int, length: int, window: int | None, device: torch.device
) -> Tensor:
    """Return for each token the first token that it attends to, as an index in the row, (B or 1, T)."""
    tokens = torch.arange(length, device=device)
    first_keys = torch.zeros_like(tokens)[None]
    if bounds is not None:
        indices = torch.arange(rows * length, device=device, dtype=bounds.dtype)
        document_starts = bounds[torch.searchsorted(bounds, indices, right=True) - 1].view(rows, length)
        row_starts = torch.arange(0, rows * length, length, device=device)[:, None]
        first_keys = document_starts - row_starts
    return first_keys if window is None else torch.maximum(first_keys, tokens - window + 1)


@dataclass(frozen=True)
class _QueryBlock:
    """The tokens of a block, by their indices in every row: queries, and the keys that they may attend to."""

    query_start: int
    query_end: int
    """End of the queries and, since attention is causal, of the keys; exclusive."""
    key_start: int
    """First key that any query of the block attends to."""

    def cut(self, query: Tensor, key: Tensor, value: Tensor) -> QueryKeyValue:
        """Return the block's queries, and the keys and values of the tokens that they may attend to."""
        keys = slice(self.key_start, self.query_end)
        return query[:, :, self.query_start : self.query_end], key[:, :, keys], value[:, :, keys]

    def build_mask(self, first_keys: Tensor) -> Tensor:
        """Return a mask (B or 1, 1, Q, K), `True` for the keys that each query attends to."""
        keys = torch.arange(self.key_start, self.query_end, device=first_keys.device)
        queries = torch.arange(self.query_start, self.query_end, device=first_keys.device)[:, None]
        return ((keys >= first_keys[:, self.query_start : self.query_end, None]) & (keys <= queries))[:, None]


class _BlockwiseAttention(torch.autograd.Function):
    """Computes attention block by block, and the scores of a block again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        first_keys: Tensor,
        scores: ScoreOptions,
        blocks: list[_QueryBlock],
    ) -> Tensor:
        rows, heads, length, _ = query.shape
        ctx.save_for_backward(query, key, value, sinks, first_keys)
        ctx.scores = scores
        ctx.blocks = blocks
        if scores.dropout:
            ctx.random = _read_random_states(query.device)
        output = query.new_empty(rows, length, heads, value.shape[-1])
        for block in blocks:
            attended = _attend_block(
                block.cut(query, key, value), sinks=sinks, mask=block.build_mask(first_keys), scores=scores
            )
            output[:, block.query_start : block.query_end] = attended.transpose(1, 2)
        return output

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, first_keys = ctx.saved_tensors
        scores: ScoreOptions = ctx.scores
        query_grad = torch.empty_like(query)
        # Several blocks add to the gradient of one key. The sums are in fp32, as in a fused kernel.
        key_grad, value_grad = (torch.zeros_like(t, dtype=_widen(t.dtype)) for t in (key, value))
        sinks_grad = None if sinks is None else torch.zeros_like(sinks, dtype=_widen(sinks.dtype))
        devices = [query.device] if query.is_cuda else []
        with torch.random.fork_rng(devices, enabled=scores.dropout > 0):
            if scores.dropout:
                _set_random_states(query.device, ctx.random)
            for block in ctx.blocks:
                q, k, v = (t.detach().requires_grad_() for t in block.cut(query, key, value))
                own_sinks = None if sinks is None else sinks.detach().requires_grad_()
                with torch.enable_grad():
                    attended = _attend_block(
                        (q, k, v), sinks=own_sinks, mask=block.build_mask(first_keys), scores=scores
                    )
                inputs = [q, k, v] if own_sinks is None else [q, k, v, own_sinks]
                attended_grad = output_grad[:, block.query_start : block.query_end].transpose(1, 2)
                gradients = torch.autograd.grad(attended, inputs, attended_grad)
                query_grad[:, :, block.query_start : block.query_end] = gradients[0]
                key_grad[:, :, block.key_start : block.query_end] += gradients[1]
                value_grad[:, :, block.key_start : block.query_end] += gradients[2]
                if sinks_grad is not None:
                    sinks_grad += gradients[3]
        if sinks_grad is not None:
            sinks_grad = sinks_grad.to(sinks.dtype)
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), sinks_grad, None, None, None


def _attend_block(qkv: QueryKeyValue, *, sinks: Tensor | None, mask: Tensor, scores: ScoreOptions) -> Tensor:
    """Return the attention of a block (B, heads, Q, width of value)."""
    query, key, value = qkv
    heads = query.shape[1]
    groups = key.shape[1]
    scaling = scores.scaling
    dtype = query.dtype
    if dtype == torch.bfloat16 and not query.is_cuda:  # faster, see _Fp32Attention
        query, key, value = (t.to(_widen(dtype)) for t in (query, key, value))
    with torch.autocast(_get_autocast_type(query), enabled=False):  # so that backward computes as forward did
        if not scores.has_cap_or_sinks and sinks is None and not scores.dropout:
            if query.is_cuda and heads != groups:  # the kernel that takes a mask does not take groups
                key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
            return F.scaled_dot_product_attention(
                query, key, value, mask, scale=scaling, enable_gqa=key.shape[1] != heads
            ).to(dtype)
        # The heads of a group become further queries of one head, so keys are not repeated.
        products = query.unflatten(1, (groups, -1)).flatten(2, 3) @ key.mT
        logits = products.to(_widen(products.dtype)).unflatten(2, (heads // groups, -1))
        logits = logits * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if scores.softcap is not None:
            logits = (logits / scores.softcap).tanh() * scores.softcap
        logits = logits.masked_fill(~mask[:, :, None], -torch.inf)
        if sinks is not None:
            column = sinks.to(logits.dtype).view(groups, -1, 1, 1).expand(*logits.shape[:-1], 1)
            weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        del logits  # as large as the weights, of which dropout makes another copy
        weights = F.dropout(weights.to(value.dtype), scores.dropout)
        return (weights.flatten(2, 3) @ value).unflatten(2, (heads // groups, -1)).flatten(1, 2).to(dtype)


def _get_autocast_type(tensor: Tensor) -> str:
    """Return the device type under which autocast is set for a tensor's device."""
    return "cpu" if tensor.device.type == "cpu" else "cuda"


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _read_random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _set_random_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def fits_cpu_kernel(qkv: QueryKeyValue, longest: int, scores: ScoreOptions) -> bool:
    """Return whether torch's attention on a CPU can be used for documents of up to `longest` tokens.

    It supports no capped scores, sinks, or windows shorter than a document. It needs little memory if it is
    fused, so that no T x T scores are made, or if no document is longer than a block.
    """
    query, _, value = qkv
    if scores.has_cap_or_sinks or longest > (scores.window or longest):
        return False
    return longest <= QUERIES_PER_BLOCK or _is_fused_on_cpu(query, value, scores)


def _is_fused_on_cpu(query: Tensor, value: Tensor, scores: ScoreOptions) -> bool:
    """Return whether torch's scaled_dot_product_attention is a fused kernel for this input on a CPU."""
    return scores.dropout == 0 and query.shape[-1] == value.shape[-1]


class _Fp32Attention(torch.autograd.Function):
    """Computes bf16 attention in fp32 on a CPU. Backward casts again, so that only bf16 tensors are saved.

    torch's kernel is 1.6 to 2.2 times as fast in fp32 as in bf16, and its backward gains the most. This also
    holds for CPUs with instructions for bf16 (AVX-512).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        wide, logsumexp = _cpu_flash_forward(
            query.float(), key.float(), value.float(), 0.0, True, scale=scaling
        )
        output: Tensor = wide.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        wide = [t.float() for t in (output_grad, query, key, value, output)]
        gradients = _cpu_flash_backward(*wide, logsumexp, 0.0, True, scale=ctx.scaling)
        return *(t.to(query.dtype) for t in gradients), None


def find_document_bounds(positions_BT: Tensor) -> Tensor:
    """Return the bounds of documents, which begin wherever positions do not continue by one.

    Reading the positions synchronizes with the device that they are on.

    Bounds are padded, so that N takes few values, and compiled functions are seldom compiled again. N depends
    on B and T alone where documents have TOKENS_PER_DOCUMENT tokens or more on average. With shorter
    documents, N is the number of documents, rounded up to a power of two.

    Args:
        positions_BT: The index of each token in its document.

    Returns:
        The bounds (N + 1,), int32, on the device of the positions.
    """
    rows, length = positions_BT.shape
    is_first_BT = torch.ones_like(positions_BT, dtype=torch.bool)
    is_first_BT[:, 1:] = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    starts = is_first_BT.flatten().nonzero()[:, 0]
    next_power_of_two = 1 << (len(starts) - 1).bit_length()
    padded_number = max(rows * max(1, length // TOKENS_PER_DOCUMENT), next_power_of_two)
    return F.pad(starts, (0, padded_number + 1 - len(starts)), value=rows * length).to(torch.int32)


def build_empty_bounds(device: torch.device) -> Tensor:
    """Return empty bounds. They tell attention that each row is one document, so it reads no positions."""
    return torch.empty(0, dtype=torch.int32, device=device)


def build_whole_row_bounds(rows: int, length: int, device: torch.device) -> Tensor:
    """Return the bounds (rows + 1,) of rows that are one document each."""
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)


class WholeRowBoundsChooser:
    """Chooses between empty and explicit bounds for rows that are one document each.

    With empty bounds, attention may be computed by cuDNN. cuDNN builds a plan for each new (rows, length),
    which takes about a second for forward and backward. Therefore only the first shape of training and the
    first of evaluation get empty bounds. Rows of other shapes get explicit bounds: a variable-length kernel
    computes their attention, and needs no plan.
    """

    def __init__(self) -> None:
        self._first_shapes: dict[bool, torch.Size] = {}  # (B, T) by whether gradients are computed

    def choose(self, like: Tensor) -> Tensor:
        """Return the bounds of the rows of `like` (B, T, ...), on its device.

        They are empty on every device but CUDA, and for the first shape, which is remembered.
        """
        shape = like.shape[:2]
        first = self._first_shapes.setdefault(torch.is_grad_enabled(), shape)
        if like.device.type != "cuda" or shape == first:
            return build_empty_bounds(like.device)
        return build_whole_row_bounds(shape[0], shape[1], like.device)


class DocumentAttention:
    """The AttentionFunction that transformers calls for each layer.

    It caches what it has computed from the last bounds or positions, since all layers get the same ones.
    """

    def __init__(self) -> None:
        # Major number of the compute capability. Read here and not in a call, which torch.compile traces.
        self._generation = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
        # AMD's GPUs report the same numbers, but have no cuDNN.
        self._prefers_cudnn = self._generation in (9, 10) and torch.version.hip is None
        # The cached tensor, the key and the result; see _cache_for_layers.
        self._last: tuple[weakref.ref[Tensor], Any, Any] | None = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """Return the output (B, T, heads, width) and `None`.

        Without `cu_seq_lens_q`, bounds are computed from `position_ids`. transformers' models also pass
        `sliding_window`, `softcap` and `s_aux`; see ScoreOptions. transformers' sdpa computes instead if
        there is a mask, if attention is not causal, or if there are keys of tokens before the first query.

        Raises:
            ModelError: The model passes an argument that is not supported.
        """
        is_causal = rest.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        has_earlier_keys = query.shape[2] != key.shape[2]
        needs_sdpa = attention_mask is not None or has_earlier_keys or not is_causal
        unsupported = UNSUPPORTED_ARGUMENTS + SCORE_ARGUMENTS if needs_sdpa else UNSUPPORTED_ARGUMENTS
        if refused := [name for name in unsupported if rest.get(name) is not None]:
            raise ModelError(
                f"model.attention: auto does not support {refused[0]}, which the model passes to its "
                "attention; set model.attention=eager"
            )
        qkv = (query, key, value)
        if needs_sdpa:
            return _attend_by_sdpa(module, *qkv, attention_mask, dropout=dropout, scaling=scaling, **rest)
        bounds = rest.get(BOUNDS_KEY)
        positions = rest.get("position_ids")
        if bounds is not None and not bounds.numel():
            bounds = None  # each row is one document
            positions = None
        window = rest.get("sliding_window")
        if window is not None and window >= query.shape[2]:
            window = None  # the window leaves out no token of a row
        scores = ScoreOptions(
            scaling=scaling,
            window=window,
            softcap=rest.get("softcap"),
            dropout=dropout,
            sinks=rest.get("s_aux"),
        )
        attend = self._attend_on_cpu if query.device.type == "cpu" else self._attend_on_device
        return attend(qkv, bounds, positions, scores), None

    def _attend_on_device(
        self, qkv: QueryKeyValue, bounds: Tensor | None, positions: Tensor | None, scores: ScoreOptions
    ) -> Tensor:
        """Return attention on a device other than the CPU, by the fastest kernel that takes the options."""
        query = qkv[0]
        if bounds is None and positions is not None:
            bounds = self._find_bounds(positions, query)
        if scores.has_cap_or_sinks:
            return attend_in_blocks(qkv, bounds, scores)
        if bounds is None and scores.window is None:
            return self._attend_to_whole_rows(*qkv, scores)
        if bounds is None:
            bounds = build_whole_row_bounds(query.shape[0], query.shape[2], query.device)
        return self._attend_by_kernel(qkv, bounds, scores)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _find_bounds(self, positions: Tensor, query: Tensor) -> Tensor:
        rows = query.shape[0]
        return self._cache_for_layers(
            positions, rows, lambda: find_document_bounds(positions.expand(rows, -1))
        )

    def _attend_on_cpu(
        self, qkv: QueryKeyValue, bounds: Tensor | None, positions: Tensor | None, scores: ScoreOptions
    ) -> Tensor:
        """Return attention on a CPU, in memory that grows with T and not with its square.

        It is computed in blocks where torch would make T x T scores.
        """
        if bounds is not None or positions is not None:
            return self._attend_by_document(qkv, bounds, positions, scores)
        if fits_cpu_kernel(qkv, qkv[0].shape[2], scores):
            return self._attend_to_whole_rows(*qkv, scores)
        return attend_in_blocks(qkv, None, scores)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_by_document(
        self, qkv: QueryKeyValue, bounds: Tensor | None, positions: Any, scores: ScoreOptions
    ) -> Tensor:
        """Return attention on a CPU, one document after the other or in blocks of all rows.

        At least one of `bounds` and `positions` is given. The host reads them once for all layers.
        """
        rows, _, length, _ = qkv[0].shape

        def find_bounds_and_lengths() -> tuple[Tensor, list[int]]:
            found = find_document_bounds(positions.expand(rows, -1)) if bounds is None else bounds
            return found, [end - start for start, end in pairwise(found.tolist()) if end > start]

        source = positions if bounds is None else bounds
        document_bounds, lengths = self._cache_for_layers(source, rows, find_bounds_and_lengths)
        if not fits_cpu_kernel(qkv, max(lengths), scores):
            return attend_in_blocks(qkv, document_bounds, scores)
        if len(lengths) == rows:
            return self._attend_to_whole_rows(*qkv, scores)
        split_qkv = [t.transpose(1, 2).flatten(0, 1).split(lengths) for t in qkv]
        outputs = []
        for document in zip(*split_qkv, strict=True):
            query, key, value = (t.transpose(0, 1)[None] for t in document)
            outputs.append(self._attend_to_whole_rows(query, key, value, scores)[0])
        return torch.cat(outputs).unflatten(0, (rows, length))

    def _attend_to_whole_rows(
        self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreOptions
    ) -> Tensor:
        """Return attention in rows of one document each, by a kernel of torch."""
        output: Tensor
        if query.device.type == "cpu":
            query, key, value = _autocast((query, key, value))
            if query.dtype == torch.bfloat16 and _is_fused_on_cpu(query, value, scores):
                output = _Fp32Attention.apply(query, key, value, scores.scaling)
                return output.transpose(1, 2).contiguous()
        is_grouped = query.shape[1] != key.shape[1]
        takes_groups = key.shape[-1] == value.shape[-1] <= 256  # widths of the fused kernels for groups
        if is_grouped and not takes_groups:
            key = _repeat_heads(query, key)
            value = _repeat_heads(query, value)
            is_grouped = False
        kernel_order: AbstractContextManager[None] = nullcontext()
        if self._prefers_cudnn:
            kernel_order = sdpa_kernel(CUDNN_FIRST, set_priority=True)
        with kernel_order:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=scores.dropout,
                is_causal=True,
                scale=scores.scaling,
                enable_gqa=is_grouped,
            )
        return output.transpose(1, 2).contiguous()

    def _attend_by_kernel(self, qkv: QueryKeyValue, bounds: Tensor, scores: ScoreOptions) -> Tensor:
        """Return attention on CUDA by a variable-length kernel; the host does not read the bounds.

        Flash attention computes if it can. xFormers' kernel computes what flash attention refuses: fp32,
        dropout, GPUs before Ampere, and widths that are no multiple of 8. xFormers' kernel in turn refuses
        windows, and widths that are no multiple of 16 bytes; these are computed in blocks.
        """
        query, key, value = _autocast(qkv)
        rows, _, length, width = query.shape
        is_flash = (
            query.dtype in (torch.float16, torch.bfloat16)
            and scores.dropout == 0
            and width == value.shape[-1] <= 256
            and width % 8 == 0
            and self._generation >= 8
        )
        is_odd_width = any(t.shape[-1] * t.element_size() % 16 for t in (query, value))
        if not is_flash and (scores.window is not None or is_odd_width):
            return attend_in_blocks((query, key, value), bounds, scores)
        is_grouped = query.shape[1] != key.shape[1]
        if is_grouped and not is_flash:
            key = _repeat_heads(query, key)
            value = _repeat_heads(query, value)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        documents = (bounds, bounds, length, length)  # bounds and largest length, for queries and for keys
        if is_flash:
            tokens_before = -1 if scores.window is None else scores.window - 1
            grouped: dict[str, Any] = {"enable_gqa": True} if is_grouped and HAS_GQA_FLAG else {}
            output: Any = varlen_attn(
                q, k, v, *documents, scale=scores.scaling, window_size=(tokens_before, 0), **grouped
            )
        else:
            batch = (q[None], k[None], v[None])
            options = (scores.dropout, CAUSAL_FROM_TOP_LEFT, True)  # True: the backward needs the logsumexp
            output = torch.ops.aten._efficient_attention_forward(
                *batch, None, *documents, *options, scale=scores.scaling
            )[0][0]
        result: Tensor = output.unflatten(0, (rows, length))
        return result

    def _cache_for_layers(self, source: Tensor, rows: int, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, called once for all layers that get the same `source`.

        Args:
            source: The bounds or positions that the result depends on.
            rows: The number of rows, which the result also depends on.
            compute: The function.
        """
        version = None if source.is_inference() else source._version
        key = (version, rows)
        if self._last is not None and self._last[0]() is source and self._last[1] == key:
            return self._last[2]
        result = compute()
        self._last = (weakref.ref(source), key, result)
        return result


def disable_cudnn_attention() -> None:
    """Exclude cuDNN from torch's choice of attention kernels in this process.

    DocumentAttention still uses cuDNN for rows without a mask. With torch 2.11 and later on Hopper, cuDNN
    gives NaN gradients if a mask is passed and T % 128 == 64 (pytorch issue 196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _repeat_heads(query: Tensor, heads: Tensor) -> Tensor:
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _attend_by_sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Return the output of transformers' own sdpa attention, and `None`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    output: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    return output


def build_bounds_arguments(
    name: str, bounds: Tensor | None, whole_rows: WholeRowBoundsChooser | None, like: Tensor
) -> dict[str, Any]:
    """Return the keyword arguments, besides positions, that a model's attention needs to separate documents.

    Args:
        name: The name of the attention function (`attn_implementation`).
        bounds: The bounds of documents; `None`: unknown.
        whole_rows: Chooses the bounds of rows that are one document each; `None`: the batch has positions,
            from which its documents are found.
        like: A tensor (B, T, ...) on the device of the rows.
    """
    if name == ATTENTION_NAME and bounds is None and whole_rows is not None:
        return {BOUNDS_KEY: whole_rows.choose(like)}
    if bounds is None:
        return {}
    if "flash" in name:  # without bounds, it separates documents only in batches of one row
        length = like.shape[1]
        return {
            BOUNDS_KEY: bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": length,
            "max_length_k": length,
        }
    return {BOUNDS_KEY: bounds}


class BoundsHook:
    """Hooks around a model's forward that pass bounds of documents on, or switch to transformers' attention.

    A batch with an attention_mask, or with a cache of keys as in `generate`, is computed by the attention
    that transformers would choose. In training the switch is permanent, since the recomputation in backward
    must use the attention of the forward.

    Args:
        fallback: The name of the attention that transformers chose for this model.
    """

    def __init__(self, fallback: str) -> None:
        self._fallback = fallback
        self._is_switched = False  # whether `after` must switch back at the end of this forward
        self._whole_rows = WholeRowBoundsChooser()

    def before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the forward's arguments with those for attention; a forward pre-hook."""
        name = model.config.get_text_config()._attn_implementation
        has_mask = any(kwargs.get(key) is not None for key in ("attention_mask", "past_key_values"))
        if name == ATTENTION_NAME and (has_mask or kwargs.get("use_cache")):
            self._is_switched = not torch.is_grad_enabled()
            model.config._attn_implementation = self._fallback
            if not self._is_switched:
                log.info(
                    "attention: transformers' %s from here on, since batches have an attention_mask",
                    self._fallback,
                )
            return args, kwargs
        like = kwargs.get("input_ids", args[0] if args else None)
        if like is None:
            return args, kwargs
        bounds = kwargs.pop(BOUNDS_KEY, None)
        whole_rows = self._whole_rows if kwargs.get("position_ids") is None else None
        return args, kwargs | build_bounds_arguments(name, bounds, whole_rows, like)

    def after(self, model: Any, *_: Any) -> None:
        """Switch back to DocumentAttention if `before` has switched for this forward; a forward hook."""
        if self._is_switched:
            model.config._attn_implementation = ATTENTION_NAME
            self._is_switched = False
