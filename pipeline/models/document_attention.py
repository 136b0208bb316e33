"""Attention of each token to those before it in its document, without a (T, T) mask on any device.

One function for transformers' table. Shapes: B rows of T tokens, query (B, heads, T, width), key and value
(B, groups, T, width), bounds (N + 1,) int32: where documents begin in the B * T tokens, filled up with B * T.
"""

from __future__ import annotations

import inspect
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from pipeline.errors import ModelError
from pipeline.models.block_attention import Runs, Scores, attend_in_blocks, attend_on_cpu, is_served, runs_of

NAME = "documents"
BOUNDS = "cu_seq_lens_q"  # as transformers' models hand it on to attention
# torch 2.11's varlen_attn takes fewer key heads than query heads as it is; later releases want this flag.
HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
# cuDNN's kernels are the fastest ones on Hopper and Blackwell for rows without a mask.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# What a model may ask besides that nothing here computes; sinks are `s_aux`. The others want our own mask.
UNSERVED = ("position_bias",)
OF_SCORES = ("softcap", "s_aux")


def document_bounds(positions_BT: Tensor) -> Tensor:
    """The bounds of documents that positions tell: one begins wherever these do not go on counting.

    A host read where the positions are on a device. N depends on B and T alone while documents have 256
    tokens on average, and doubles otherwise: little is compiled again for another number of documents.
    """
    rows, length = positions_BT.shape
    begins = torch.ones_like(positions_BT, dtype=torch.bool)
    begins[:, 1:] = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    starts = begins.flatten().nonzero()[:, 0]
    places = max(rows * max(1, length // 256), 1 << (len(starts) - 1).bit_length())
    return F.pad(starts, (0, places + 1 - len(starts)), value=rows * length).to(torch.int32)


def no_bounds(device: torch.device) -> Tensor:
    """Stands for rows that are one document each, so that nobody looks at positions to find out."""
    return torch.empty(0, dtype=torch.int32, device=device)


def whole_row_bounds(rows: int, length: int, device: torch.device) -> Tensor:
    """Return the bounds (rows + 1,) of rows that are one document each."""
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)


class WholeRows:
    """Chooses the bounds of rows that are one document each.

    cuDNN builds a plan for each new (rows, length): about a second for forward and backward. So only the
    first shape of training and the first one of evaluation get `no_bounds`, with which cuDNN may compute.
    Rows of any other shape get their bounds: the variable-length kernels compute, which need no plan.
    """

    def __init__(self) -> None:
        self._first_shapes: dict[bool, torch.Size] = {}

    def bounds(self, like: Tensor) -> Tensor:
        """Return the bounds of the rows of `like` (B, T, ...), on its device."""
        shape = like.shape[:2]
        first = self._first_shapes.setdefault(torch.is_grad_enabled(), shape)
        if like.device.type != "cuda" or shape == first:
            return no_bounds(like.device)
        return whole_row_bounds(shape[0], shape[1], like.device)


class DocumentAttention:
    """See AttentionFunction. Holds what it found out of the last bounds: every layer is given the same."""

    def __init__(self) -> None:
        # Asked here and not in a call, which torch.compile reads.
        self._generation = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
        # AMD's cards are numbered so, too.
        self._prefers_cudnn = self._generation in (9, 10) and torch.version.hip is None
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
        """-> (output (B, T, heads, width), None).

        Bounds are looked for in `position_ids` where `cu_seq_lens_q` is missing; `sliding_window`, `softcap`
        and `s_aux` are what transformers' models hand on (see Scores and attend_in_blocks). With a mask, or
        keys of tokens before the first query, transformers' sdpa computes.

        Raises:
            ModelError: the model asks for more.
        """
        is_causal = rest.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_masked = attention_mask is not None or query.shape[2] != key.shape[2] or not is_causal
        unserved = UNSERVED + OF_SCORES if is_masked else UNSERVED
        if asked := [name for name in unserved if rest.get(name) is not None]:
            raise ModelError(
                f"model.attention: auto does not know {asked[0]}, which the model asks for; write "
                "model.attention=eager"
            )
        if is_masked:
            heads = (query, key, value)
            return _with_mask(module, *heads, attention_mask, dropout=dropout, scaling=scaling, **rest)
        bounds, positions = rest.get(BOUNDS), rest.get("position_ids")
        if bounds is not None and not bounds.numel():
            bounds = positions = None  # each row is one document
        window, length = rest.get("sliding_window"), query.shape[2]
        is_wide = window is None or window >= length
        scores = Scores(scaling, None if is_wide else window, rest.get("softcap"), dropout)
        attend = self._on_cpu if query.device.type == "cpu" else self._on_device
        return attend(query, key, value, bounds, positions, rest.get("s_aux"), scores), None

    def _on_device(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor | None,
        positions: Tensor | None,
        sinks: Tensor | None,
        scores: Scores,
    ) -> Tensor:
        rows, _, length, _ = query.shape
        if bounds is None and positions is not None:
            bounds = self._found(positions, query)
        if scores.softcap is not None or sinks is not None:
            return attend_in_blocks(query, key, value, bounds, sinks, scores)
        if bounds is None and scores.window is None:
            return self._whole_rows(query, key, value, scores)
        if bounds is None:
            bounds = whole_row_bounds(rows, length, query.device)
        return self._by_kernel(query, key, value, bounds, scores)

    def kernels(self, device: torch.device) -> str:
        """What computes there, in words."""
        if device.type != "cuda":
            return "a call a document"
        return "variable-length kernels" + (", cuDNN first" if self._prefers_cudnn else "")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _found(self, positions: Tensor, query: Tensor) -> Tensor:
        rows = query.shape[0]
        return self._of(positions, rows, lambda: document_bounds(positions.expand(rows, -1)))

    def _on_cpu(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor | None,
        positions: Tensor | None,
        sinks: Tensor | None,
        scores: Scores,
    ) -> Tensor:
        """Memory grows with T: where torch's kernel would make all scores of a document, in blocks."""
        if bounds is not None or positions is not None:
            return self._in_runs(query, key, value, bounds, positions, sinks, scores)
        if is_served(query, value, query.shape[2], sinks, scores):
            return attend_on_cpu(query, key, value, None, scores).transpose(1, 2).contiguous()
        return attend_in_blocks(query, key, value, None, sinks, scores)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _in_runs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor | None,
        positions: Tensor,
        sinks: Tensor | None,
        scores: Scores,
    ) -> Tensor:
        """On a CPU: a call a document, one for consecutive short ones."""
        rows, _, length, _ = query.shape

        def find() -> tuple[Tensor, Runs | None]:
            found = document_bounds(positions.expand(rows, -1)) if bounds is None else bounds
            return found, runs_of(found.tolist(), rows)

        found, runs = self._of(positions if bounds is None else bounds, rows, find)
        longest = length if runs is None else max(size for size, _ in runs)
        if not is_served(query, value, longest, sinks, scores):
            return attend_in_blocks(query, key, value, found, sinks, scores)
        if runs is None:
            return attend_on_cpu(query, key, value, None, scores).transpose(1, 2).contiguous()
        sizes = [size for size, _ in runs]
        parts = [t.transpose(1, 2).flatten(0, 1).split(sizes) for t in (query, key, value)]
        outputs = []
        for (_, mask), *of_run in zip(runs, *parts, strict=True):
            q, k, v = (t.transpose(0, 1)[None] for t in of_run)
            outputs.append(attend_on_cpu(q, k, v, mask, scores)[0].transpose(0, 1))
        return torch.cat(outputs).unflatten(0, (rows, length))

    def _whole_rows(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        is_grouped = query.shape[1] != key.shape[1]
        if is_grouped and not key.shape[-1] == value.shape[-1] <= 256:
            key, value = _repeated(query, key), _repeated(query, value)
            is_grouped = False  # no fused kernel takes groups so wide
        kernels: AbstractContextManager[None] = nullcontext()
        if self._prefers_cudnn:
            kernels = sdpa_kernel(CUDNN_FIRST, set_priority=True)
        with kernels:
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

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scores: Scores) -> Tensor:
        """On CUDA, without a look at the bounds: flash attention, or xFormers' kernel for what it refuses
        (fp32, dropout, cards before Ampere, widths that are no multiple of 8), or blocks where that has no
        window or cannot load widths of no multiple of 16 bytes.
        """
        rows, _, length, width = query.shape
        if torch.is_autocast_enabled("cuda"):  # which knows scaled_dot_product_attention alone
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        is_flash = (
            query.dtype in (torch.float16, torch.bfloat16)
            and scores.dropout == 0
            and width == value.shape[-1] <= 256
            and width % 8 == 0
            and self._generation >= 8
        )
        is_odd_width = any(t.shape[-1] * t.element_size() % 16 for t in (query, value))
        if not is_flash and (scores.window is not None or is_odd_width):
            return attend_in_blocks(query, key, value, bounds, None, scores)
        is_grouped = query.shape[1] != key.shape[1]
        if is_grouped and not is_flash:
            key, value = _repeated(query, key), _repeated(query, value)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        if is_flash:
            before = -1 if scores.window is None else scores.window - 1
            grouped: dict[str, Any] = {"enable_gqa": True} if is_grouped and HAS_GQA_FLAG else {}
            output: Any = varlen_attn(
                q,
                k,
                v,
                bounds,
                bounds,
                length,
                length,
                scale=scores.scaling,
                window_size=(before, 0),
                **grouped,
            )
        else:
            causal = 1
            output = torch.ops.aten._efficient_attention_forward(
                q[None],
                k[None],
                v[None],
                None,
                bounds,
                bounds,
                length,
                length,
                scores.dropout,
                causal,
                True,
                scale=scores.scaling,
            )[0][0]
        apart: Tensor = output.unflatten(0, (rows, length))
        return apart

    def _of(self, given: Tensor, form: Any, find: Any) -> Any:
        """What `find` finds of a tensor, once for all layers that are given it."""
        version = None if given.is_inference() else given._version
        if self._last is not None and self._last[0]() is given and self._last[1] == (version, form):
            return self._last[2]
        found = find()
        self._last = (weakref.ref(given), (version, form), found)
        return found


def keep_cudnn_from_masks() -> None:
    """Leave cuDNN out of torch's choice of attention kernels in this process.

    DocumentAttention still asks for it, for rows without a mask. With torch 2.11 and later on Hopper, cuDNN
    gives NaN gradients where a mask is passed and T % 128 == 64 (pytorch issue 196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _repeated(query: Tensor, heads: Tensor) -> Tensor:
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _with_mask(*given: Any, **rest: Any) -> tuple[Tensor, None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    output: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](*given, **rest)
    return output
