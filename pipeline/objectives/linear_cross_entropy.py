"""The cross entropy of a linear layer's outputs without a tensor of (tokens, vocabulary).

For one call, the forward of a model's output layer is replaced: it reads labels, and returns the loss in
place of logits. Engines see one module with one output and one gradient for its weight. So ZeRO 3 gathers the
weight for as long as before, and autograd sums the gradients of a tied weight. The loss is computed in chunks
of tokens. Each chunk takes the matrix product for its logits, a softmax in blocks that fit a cache, and the
two products for the gradients of hidden states and weight.

The loss sum computes its gradients in the forward, for an incoming gradient of 1, and multiplies them by the
real one in the backward. That takes three products; recomputation in the backward would take four. With a
vocabulary of 8k words this takes 0.8 of the time of logits_cross_entropy.py on a CPU, with 50k words 0.88,
with 1k words the same. torch's F.linear_cross_entropy adds losses up in bf16 (1 % off over 1,024
tokens) and takes 2.5 to 5 times as long on a CPU. DeepSpeed's computes logits twice, takes twice as long, and
synchronizes with the device to read labels.

Under tensor parallelism a rank computes the logits of its own words only. For each token, the ranks exchange
three numbers (largest logit, sum of exponentials, the label's logit), with one collective for each chunk.

Losses that are no sum over tokens, such as those of preferences, need the loss of each token. Its incoming
gradient is known only in the backward, where the logits of a chunk are computed a second time: four products.

Shapes: N tokens, D width of the hidden states, V words (of this rank), C tokens of a chunk, R tokens of a
block, P ranks of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.data.batches import IGNORE_INDEX
from pipeline.models.transformers_facts import is_transformers_model
from pipeline.objectives.interface import VocabularyPart, get_vocabulary_part
from pipeline.objectives.logits_cross_entropy import FusedKernels, iterate_blocks
from pipeline.objectives.model_call import unwrap_model
from pipeline.planner.model import (
    CPU_GRADIENT_ELEMENTS,
    choose_block_rows,
    choose_chunk_tokens,
    compute_padded_vocabulary,
)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product a @ b to `total` in place, in the dtype of `total`, fp32 or fp64."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
        return
    if total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    if a.dtype == torch.float16:  # a sum over tokens may be too large for fp16
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
        return
    num_columns = b.shape[1]
    max_rows = max(256, CPU_GRADIENT_ELEMENTS // num_columns)
    if total.device.type != "cpu" or len(total) <= max_rows:
        total += a @ b
        return
    # In parts of at most max_rows rows, since the product of all would be a tensor as large as `total`.
    product_buffer = b.new_empty(max_rows, num_columns)
    wide_buffer = b.new_empty(max_rows, num_columns, dtype=total.dtype)
    for total_part, a_part in zip(total.split(max_rows), a.split(max_rows), strict=True):
        product = torch.mm(a_part, b, out=product_buffer[: len(a_part)])
        # To add `product` directly, torch would allocate such a copy of another dtype each time.
        total_part.add_(wide_buffer[: len(a_part)].copy_(product))


# Factor on gradients in fp16 until the incoming gradient is known. Probabilities down to 2^-22 keep all their
# bits, and the gradient of a hidden state, at most 512 times a weight, stays below fp16's largest number. The
# gradients are those of a sum over tokens, so neither the loss scale nor the count is needed here.
FP16_SCALE = 256.0


@dataclass(frozen=True)
class LossSettings:
    """The dtype, the part of the vocabulary and the kernels with which a loss is computed."""

    dtype: torch.dtype
    """Dtype of products: fp64, fp32, bf16 or fp16."""
    part: VocabularyPart | None = None
    """Part of the vocabulary that weight and bias have on this rank; `None`: all words."""
    kernels: FusedKernels | None = None
    """Compiled kernels for a chunk's losses and gradients; `None`: they are computed in blocks.

    Not used with a `part`.
    """


def linear_cross_entropy_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    dtype: torch.dtype,
    part: VocabularyPart | None = None,
    kernels: FusedKernels | None = None,
) -> Tensor:
    """Return the loss summed over the labels that are not -100.

    In fp16 the gradients computed in the forward are FP16_SCALE times as large, whatever the loss scale. A
    gradient that the loss scale makes too large for fp16 is infinite in the backward, as it is with logits.

    Args:
        hidden_ND: The inputs of the layer.
        weight_VD: The weight of the layer.
        bias_V: The bias of the layer, or `None`.
        labels_N: The labels, int64.
        dtype: The dtype of products: fp64, fp32, bf16 or fp16.
        part: See LossSettings.part. With a part, forward and backward are collective over the ranks of the
            tensor-parallel group, and all ranks have the same hidden states, labels and result.
        kernels: See LossSettings.kernels.

    Returns:
        0-dim, fp32 (fp64 in fp64), as `F.cross_entropy(F.linear(...).float(), labels, reduction="sum")`.
    """
    settings = LossSettings(dtype=dtype, part=part, kernels=kernels)
    is_grad_enabled = torch.is_grad_enabled()  # read here, since it is always off inside of the forward
    total: Tensor = _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, bias_V, labels_N, settings, is_grad_enabled
    )
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        settings: LossSettings,
        is_grad_enabled: bool,
    ) -> Tensor:
        needs_grad = [is_grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        chunked, rows = compute_chunked_loss(
            hidden_ND, weight_VD, bias_V, labels_N, settings=settings, needs_grad=needs_grad
        )
        ctx.save_for_backward(*chunked.get_gradients(rows, len(hidden_ND)))
        ctx.scale = chunked.scale
        ctx.part = settings.part
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden_ND, weight_VD, bias_V)]
        return chunked.losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In fp32, and in place: torch refuses a second backward, so the saved gradients are used once.
        grad = grad if ctx.scale == 1.0 else grad / ctx.scale
        scaled: list[Tensor | None] = []
        for saved in ctx.saved_tensors:
            if saved is None:
                scaled.append(None)
            elif saved.dtype == grad.dtype:
                scaled.append(saved.mul_(grad))
            else:
                scaled.append(saved * grad[None])  # a 0-dim tensor would not widen the dtype of the result
        if ctx.part is not None and scaled[0] is not None:
            ctx.part.all_reduce_sum(scaled[0])
        gradients = [
            None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None)


def compute_chunked_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    settings: LossSettings,
    needs_grad: list[bool],
    incoming_N: Tensor | None = None,
) -> tuple[ChunkedLoss, Tensor | None]:
    """Compute the losses of the tokens that count, and the gradients that are needed.

    Args:
        hidden_ND: The inputs of the layer.
        weight_VD: The weight of the layer.
        bias_V: The bias of the layer, or `None`.
        labels_N: The labels, int64.
        settings: The settings of the computation.
        needs_grad: Whether the gradient of each of the first three arguments is needed.
        incoming_N: The incoming gradient of each loss; `None`: FP16_SCALE in fp16, else 1.

    Returns:
        The losses and gradients, and the rows of `hidden_ND` that they belong to; `None`: all rows.
    """
    rows = _find_counted_rows(labels_N)
    x_ND = hidden_ND.to(settings.dtype)
    if rows is not None:
        x_ND = x_ND[rows]
        labels_N = labels_N[rows]
        incoming_N = None if incoming_N is None else incoming_N[rows]
    loss_class = ChunkedLoss if settings.part is None else _DividedLoss
    chunked = loss_class(
        x_ND,
        _pad_rows(weight_VD.to(settings.dtype)),
        None if bias_V is None else _pad_rows(bias_V.to(settings.dtype)),
        words=len(weight_VD),
        needs_grad=needs_grad,
        incoming_N=incoming_N,
        settings=settings,
    )
    chunked.compute(labels_N)
    return chunked, rows


def scatter_rows(values_N: Tensor, rows: Tensor | None, num_tokens: int) -> Tensor:
    """Return the values of counted tokens in their rows among all tokens, with 0 in the other rows.

    Args:
        values_N: Values of the counted tokens, one row for each.
        rows: Rows of the counted tokens; `None`: all tokens count.
        num_tokens: Number of all tokens.
    """
    if rows is None:
        return values_N
    return values_N.new_zeros(num_tokens, *values_N.shape[1:]).index_copy_(0, rows, values_N)


def _find_counted_rows(labels_N: Tensor) -> Tensor | None:
    """Return the indices of the rows that count; `None`: all rows are to be computed.

    On a GPU all rows are computed, since reading the number of counted rows synchronizes with the device.
    """
    if labels_N.device.type != "cpu":
        return None
    is_counted = labels_N != IGNORE_INDEX
    return None if bool(is_counted.all()) else is_counted.nonzero().squeeze(1)


def _pad_rows(values: Tensor) -> Tensor:
    """Append rows of zeros up to a number at which products are fast on a GPU: a multiple of 64.

    The logits of these rows are set to -inf, so they change no loss. The vocabulary is padded inside the loss
    only, so the model, its checkpoints and its exports have the tokenizer's words, on every device.
    """
    num_padding_rows = compute_padded_vocabulary(len(values), values.device.type) - len(values)
    if not num_padding_rows:
        return values
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, num_padding_rows))


class ChunkedLoss:
    """Computes losses, and adds gradients up chunk by chunk, in fp32 if products are in half precision.

    Args:
        x_ND: The inputs of the layer in the dtype of products.
        weight_VD: The weight, with padding rows.
        bias_V: The bias, with padding, or `None`.
        words: Number of words without padding.
        needs_grad: Whether the gradients of inputs, weight and bias are needed.
        incoming_N: The incoming gradient of each loss; `None`: `scale`.
        settings: The settings of the computation.

    Attributes:
        scale: Factor on all gradients, if there is no `incoming_N`.
        losses_N: Loss of each token; 0 until `compute`.
        x_grad_ND: Gradient of the inputs; `None` if not needed.
        weight_grad_VD: Gradient of the weight, with padding rows; `None` if not needed.
        bias_grad_V: Gradient of the bias, with padding; `None` if not needed.
    """

    def __init__(
        self,
        x_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        *,
        words: int,
        needs_grad: list[bool],
        incoming_N: Tensor | None,
        settings: LossSettings,
    ):
        self._kernels = settings.kernels
        self._words = words
        self._x_ND = x_ND
        self._weight_VD = weight_VD
        self._bias_V = bias_V
        self._dtype = torch.promote_types(x_ND.dtype, torch.float32)
        self._needs_any_grad = any(needs_grad)
        self.scale = FP16_SCALE if x_ND.dtype == torch.float16 else 1.0
        self._incoming_N1 = None if incoming_N is None else incoming_N.to(self._dtype)[:, None]
        self.losses_N = x_ND.new_zeros(len(x_ND), dtype=self._dtype)
        self.x_grad_ND = torch.empty_like(x_ND) if needs_grad[0] else None
        self.weight_grad_VD = torch.zeros_like(weight_VD, dtype=self._dtype) if needs_grad[1] else None
        self.bias_grad_V = torch.zeros_like(weight_VD[:, 0], dtype=self._dtype) if needs_grad[2] else None

    def compute(self, labels_N: Tensor) -> None:
        """Compute the losses of all tokens, and add their gradients up. Collective with a vocabulary part."""
        num_tokens = len(labels_N)
        padded_words = len(self._weight_VD)
        on_cpu = labels_N.device.type == "cpu"
        size = choose_chunk_tokens(num_tokens, self._get_max_words(), self._x_ND.element_size(), on_cpu)
        chunk_buffer = self._x_ND.new_empty(min(size, num_tokens), padded_words)
        for start in range(0, num_tokens, size):
            chunk = slice(start, start + size)
            x_CD = self._x_ND[chunk]
            labels_C = labels_N[chunk]
            logits_CV = chunk_buffer[: len(labels_C)]
            if self._bias_V is None:
                torch.mm(x_CD, self._weight_VD.t(), out=logits_CV)
            else:
                torch.addmm(self._bias_V, x_CD, self._weight_VD.t(), out=logits_CV)
            if padded_words > self._words:
                logits_CV[:, self._words :].fill_(-torch.inf)
            incoming_C1 = None if self._incoming_N1 is None else self._incoming_N1[chunk]
            self.losses_N[chunk] = self._compute_loss(logits_CV, labels_C, incoming_C1)[:, 0]
            self._add_gradients(logits_CV, chunk)

    def _add_gradients(self, grad_CV: Tensor, chunk: slice) -> None:
        """Add a chunk's contribution to the gradients that are needed.

        Args:
            grad_CV: Gradient of the chunk's logits.
            chunk: Rows of the chunk.
        """
        x_CD = self._x_ND[chunk]
        if self.x_grad_ND is not None:
            if self.x_grad_ND.dtype == grad_CV.dtype:
                torch.mm(grad_CV, self._weight_VD, out=self.x_grad_ND[chunk])
            else:
                add_product(self.x_grad_ND[chunk], grad_CV, self._weight_VD)
        if self.weight_grad_VD is not None:
            add_product(self.weight_grad_VD, grad_CV.t(), x_CD)
        if self.bias_grad_V is not None:
            self.bias_grad_V += grad_CV.sum(0, dtype=self._dtype)

    def get_gradients(self, rows: Tensor | None, num_tokens: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states, the weight and the bias, without padding.

        Args:
            rows: Rows of the hidden states that the loss was computed for; `None`: all.
            num_tokens: Number of rows of the hidden states.

        Returns:
            Three gradients; `None` for one that is not needed.
        """
        x_grad_ND = self.x_grad_ND
        hidden_grad_ND = None if x_grad_ND is None else scatter_rows(x_grad_ND, rows, num_tokens)
        weight_grad_VD = None if self.weight_grad_VD is None else self.weight_grad_VD[: self._words]
        bias_grad_V = None if self.bias_grad_V is None else self.bias_grad_V[: self._words]
        return hidden_grad_ND, weight_grad_VD, bias_grad_V

    def _get_max_words(self) -> int:
        """Return the number of words on the rank with the most, from which the chunk size is computed."""
        return self._words

    def _compute_loss(self, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None) -> Tensor:
        """Return the chunk's losses (C, 1), and overwrite logits with their gradients if these are needed."""
        if self._kernels is not None:
            fused_C1 = self._compute_by_kernels(self._kernels, logits_CV, labels_C, incoming_C1)
            if fused_C1 is not None:
                return fused_C1
        on_cpu = labels_C.device.type == "cpu"
        size = min(len(labels_C), choose_block_rows(logits_CV.shape[1], on_cpu))
        is_counted_C1 = (labels_C != IGNORE_INDEX)[:, None]
        label_C1 = labels_C.clamp(min=0)[:, None]
        label_logit_C1 = logits_CV.gather(1, label_C1).to(self._dtype)
        top_logits = []
        top_probabilities = []
        label_gradients = []
        z_buffer = logits_CV.new_empty(size, logits_CV.shape[1], dtype=self._dtype)
        p_buffer = torch.empty_like(z_buffer)
        factor: Tensor | float = self.scale if incoming_C1 is None else incoming_C1
        factors = repeat(factor) if incoming_C1 is None else incoming_C1.split(size)
        blocks = zip(logits_CV.split(size), label_C1.split(size), factors, strict=False)
        for block_RV, label_R1, block_factor in blocks:
            z_RV = z_buffer[: len(block_RV)]
            p_RV = p_buffer[: len(block_RV)]
            torch.softmax(z_RV.copy_(block_RV), 1, out=p_RV)
            top_logits.append(z_RV.amax(1, keepdim=True))
            top_probabilities.append(p_RV.amax(1, keepdim=True))
            if self._needs_any_grad:
                if isinstance(block_factor, Tensor) or block_factor != 1.0:
                    p_RV.mul_(block_factor)
                label_gradients.append(p_RV.gather(1, label_R1))
                block_RV.copy_(p_RV)
        # The probability of the largest logit is 1 / V or more, so its logarithm is accurate.
        losses_C1 = torch.cat(top_logits) - torch.cat(top_probabilities).log() - label_logit_C1
        if self._needs_any_grad:
            # Not scatter_, which makes an fp32 copy of all half-precision logits on a CPU.
            row_C1 = torch.arange(len(labels_C), device=labels_C.device)[:, None]
            logits_CV[row_C1, label_C1] = (torch.cat(label_gradients) - factor).to(logits_CV.dtype)
            if not on_cpu:  # on a CPU, all tokens of a chunk count: see _find_counted_rows
                logits_CV.mul_(is_counted_C1)
        return torch.where(is_counted_C1, losses_C1, 0.0)

    def _compute_by_kernels(
        self, kernels: FusedKernels, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None
    ) -> Tensor | None:
        """Compute losses and gradients by compiled kernels. For a logit in bf16 they move 8 bytes, blocks 32.

        Returns:
            The losses (C, 1); `None` if the kernels cannot be compiled, with the logits unchanged.
        """
        fused = kernels.compute_loss(logits_CV, labels_C)
        if not fused:
            return None
        losses_C, top_C, sum_C = fused
        if self._needs_any_grad:
            if incoming_C1 is None:
                incoming_C = losses_C.new_full(losses_C.shape, self.scale)
            else:
                incoming_C = incoming_C1[:, 0].contiguous()
            if not kernels.replace_by_gradient(logits_CV, labels_C, top_C, sum_C, incoming_C):
                return None
        return losses_C[:, None]


class _DividedLoss(ChunkedLoss):
    """Computes the loss over all ranks' words, and the gradients of this rank's words.

    The gradient of the hidden states has only the contribution of this rank's words. The caller sums it over
    the ranks.
    """

    def __init__(self, *tensors: Tensor | None, settings: LossSettings, **options: Any):
        super().__init__(*tensors, settings=settings, **options)  # type: ignore[arg-type]
        assert settings.part is not None
        self._part = settings.part
        if self.x_grad_ND is not None:  # in fp32, so that the sum over ranks is rounded once
            self.x_grad_ND = torch.zeros_like(self.x_grad_ND, dtype=self._dtype)

    def _get_max_words(self) -> int:
        return self._part.max_rows

    def _compute_loss(self, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None) -> Tensor:
        """Return the chunk's losses (C, 1), equal on all ranks; see ChunkedLoss. Collective."""
        column_C = labels_C - self._part.start
        is_local_C1 = ((column_C >= 0) & (column_C < self._words))[:, None]  # -100 is on no rank
        column_C1 = column_C.clamp(0, self._words - 1)[:, None]
        # Each token's largest logit, the sum of exponentials of the differences from it, its label's logit.
        statistics_C3 = logits_CV.new_empty(len(labels_C), 3, dtype=self._dtype)
        for block in iterate_blocks(logits_CV):
            z_RV = logits_CV[block].to(self._dtype)
            label_R1 = torch.where(is_local_C1[block], z_RV.gather(1, column_C1[block]), 0.0)
            top_R1 = z_RV.amax(1, keepdim=True)
            sum_R1 = (z_RV - top_R1).exp_().sum(1, keepdim=True)
            torch.cat((top_R1, sum_R1, label_R1), 1, out=statistics_C3[block])
        tops_PC1, sums_PC1, labels_PC1 = self._part.gather(statistics_C3).split(1, -1)
        top_C1 = tops_PC1.amax(0)
        sum_C1 = ((tops_PC1 - top_C1).exp() * sums_PC1).sum(0)
        is_counted_C1 = (labels_C != IGNORE_INDEX)[:, None]
        losses_C1 = torch.where(is_counted_C1, top_C1 + sum_C1.log() - labels_PC1.sum(0), 0.0)
        if not self._needs_any_grad:
            return losses_C1
        minus_one_C1 = is_local_C1.to(self._dtype).neg_()
        for block in iterate_blocks(logits_CV):
            p_RV = logits_CV[block].to(self._dtype).sub_(top_C1[block]).exp_().div_(sum_C1[block])
            p_RV.scatter_add_(1, column_C1[block], minus_one_C1[block])
            if p_RV.device.type != "cpu":  # on a CPU, all tokens of a chunk count: see _find_counted_rows
                p_RV.mul_(is_counted_C1[block])
            if incoming_C1 is not None:
                p_RV.mul_(incoming_C1[block])
            elif self.scale != 1.0:
                p_RV.mul_(self.scale)
            logits_CV[block].copy_(p_RV)
        return losses_C1


def linear_token_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    dtype: torch.dtype,
    part: VocabularyPart | None = None,
    kernels: FusedKernels | None = None,
) -> Tensor:
    """Return minus the log-probability of each token's label; 0 where the label is -100.

    The arguments are those of linear_cross_entropy_sum. With a part, forward and backward are collective, and
    all ranks have equal incoming gradients.

    Returns:
        (N,), fp32 (fp64 in fp64), as `F.cross_entropy(F.linear(...).float(), labels, reduction="none")`.
    """
    settings = LossSettings(dtype=dtype, part=part, kernels=kernels)
    losses_N: Tensor = _LinearTokenLosses.apply(hidden_ND, weight_VD, bias_V, labels_N, settings)
    return losses_N


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        settings: LossSettings,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N)
        ctx.settings = settings
        chunked, rows = compute_chunked_loss(
            hidden_ND, weight_VD, bias_V, labels_N, settings=settings, needs_grad=[False] * 3
        )
        return scatter_rows(chunked.losses_N, rows, len(labels_N))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, labels_N = ctx.saved_tensors
        inputs = (hidden_ND, weight_VD, bias_V)
        chunked, rows = compute_chunked_loss(
            *inputs,
            labels_N,
            settings=ctx.settings,
            needs_grad=list(ctx.needs_input_grad[:3]),
            incoming_N=grad_N,
        )
        wide_gradients = chunked.get_gradients(rows, len(labels_N))
        if ctx.settings.part is not None and wide_gradients[0] is not None:
            ctx.settings.part.all_reduce_sum(wide_gradients[0])
        gradients = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(wide_gradients, inputs, strict=True)
        ]
        return (*gradients, None, None)


class OutputHeads:
    """Finds the output layer of each model that an objective is called with, once for each model."""

    def __init__(self) -> None:
        self._by_model: WeakKeyDictionary[nn.Module, nn.Linear | None] = WeakKeyDictionary()

    def find(self, model: Callable[..., Any]) -> nn.Linear | None:
        """Return a language model's output layer if the logits are its unchanged outputs, else `None`.

        The result is also `None` for a model that is compiled as one graph, and for nn.DataParallel.
        """
        if not isinstance(model, nn.Module):
            return None
        if model not in self._by_model:
            is_replicated = isinstance(model, nn.DataParallel)
            is_one_graph = hasattr(model, "_orig_mod")
            self._by_model[model] = None if is_replicated or is_one_graph else _find_head(unwrap_model(model))
        return self._by_model[model]


class HeadOnlyModel(nn.Module):
    """Stands in for the model on the last pipeline stage: an output layer over given hidden states.

    Args:
        head: The output layer.
        output: Wraps logits as the whole model's output.
    """

    def __init__(self, head: nn.Linear, output: Callable[[Tensor], Any]):
        super().__init__()
        self.head = head
        self._output = output
        self._hidden_BTD: Tensor | None = None

    @contextmanager
    def use_hidden_states(self, hidden_BTD: Tensor) -> Iterator[None]:
        """Use these hidden states for all calls inside the context."""
        self._hidden_BTD = hidden_BTD
        try:
            yield
        finally:
            self._hidden_BTD = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the model's output of the given hidden states, whatever the arguments."""
        return self._output(self.head(self._hidden_BTD))


class HeadLossState:
    """Records whether an output layer returned the loss in place of logits."""

    has_computed_loss = False
    """Whether the layer returned the loss, so that the logits in the model's output are the loss."""


@contextmanager
def compute_loss_in_head(
    head: nn.Linear | None,
    labels_BT: Tensor,
    per_token: bool = False,
    kernels: FusedKernels | None = None,
) -> Iterator[HeadLossState]:
    """Make the output layer return the loss sum (1,) in place of logits inside the context.

    If the hidden states have another shape than the labels, the layer returns logits as before.

    Args:
        head: The output layer, whose forward is replaced inside the context; `None`: nothing changes.
        labels_BT: The labels, aligned with the outputs.
        per_token: Whether to return the losses of all tokens (B, T) in place of their sum.
        kernels: See linear_cross_entropy_sum.

    Yields:
        A record of whether the layer computed the loss, valid after a call of the model.
    """
    state = HeadLossState()
    if head is None:
        yield state
        return

    compute_logits = head.forward  # under tensor parallelism, gathers the logits of all ranks

    def forward(input: Tensor) -> Tensor:  # a model may pass nn.Linear's argument by its name
        hidden_BTD = input
        weight_VD = head.weight
        device_type = hidden_BTD.device.type
        dtype = weight_VD.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        if hidden_BTD.shape[:-1] != labels_BT.shape:
            return compute_logits(hidden_BTD)
        state.has_computed_loss = True
        hidden_ND = hidden_BTD.flatten(0, 1)
        labels_N = labels_BT.flatten()
        part = get_vocabulary_part(head)
        arguments = (hidden_ND, weight_VD, head.bias, labels_N, dtype, part, kernels)
        if per_token:
            return linear_token_losses(*arguments).view(labels_BT.shape)
        return linear_cross_entropy_sum(*arguments)[None]

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield state
    finally:
        del head.forward


def _find_head(model: Any) -> nn.Linear | None:
    """Return the output layer of an unwrapped model if its outputs are the logits, else `None`."""
    if isinstance(model, HeadOnlyModel):
        return model.head
    if not is_transformers_model(model) or model._compiled_call_impl is not None:
        return None
    head = model.get_output_embeddings()
    decoder = getattr(model, model.base_model_prefix, None)
    names = {child: name for name, child in model.named_children()}
    is_linear = type(head) is nn.Linear or get_vocabulary_part(head) is not None
    are_children = head in names and decoder in names
    if not is_linear or not are_children or "forward" in vars(head):  # replaced, such as by compilation
        return None
    return head if _returns_outputs(model, head, names[head], names[decoder]) else None


@torch.no_grad()
def _returns_outputs(model: nn.Module, head: nn.Linear, head_name: str, decoder_name: str) -> bool:
    """Return whether the logits are the very tensor that the layer returns.

    The model's forward is tried with stubs for the layer and the decoder. A model that scales or caps its
    logits returns another tensor. The layer must be called once, with the hidden states of all tokens.
    """
    weight = head.weight
    hidden_BTD = torch.empty(1, 2, head.in_features, dtype=weight.dtype, device=weight.device)
    head_stub = _Stub(torch.empty(1, 2, 1, dtype=weight.dtype, device=weight.device), weight)
    modules = dict(model._modules)
    model._modules |= {head_name: head_stub, decoder_name: _Stub(_StubOutput(hidden_BTD))}
    try:
        output = model.forward(input_ids=torch.zeros(1, 2, dtype=torch.long, device=weight.device))
        calls = head_stub.first_arguments
        has_all_tokens = len(calls) == 1 and calls[0].shape == hidden_BTD.shape
        return has_all_tokens and output.logits is head_stub.result
    except Exception:  # a forward may raise anything if it reads more than the stubs return
        return False
    finally:
        model._modules |= modules


class _Stub(nn.Module):
    """Returns a fixed result, and records the first positional argument of each call."""

    def __init__(self, result: Any, weight: Tensor | None = None):
        super().__init__()
        self.result = result
        self.weight = weight
        self.first_arguments: list[Any] = []

    def forward(self, *args: Any, **_: Any) -> Any:
        self.first_arguments += args[:1]
        return self.result


class _StubOutput(tuple[Tensor]):
    """A decoder's output with nothing but hidden states, as the first element and as `last_hidden_state`."""

    def __new__(cls, hidden_BTD: Tensor) -> _StubOutput:
        return super().__new__(cls, (hidden_BTD,))

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None
