"""The cross entropy of a linear layer's outputs without a tensor of (tokens, vocabulary).

Labels are given to a model's output layer for one call, and its forward returns the loss in place of logits.
Engines see one module with one output and one gradient for its weight: ZeRO 3 gathers the weight for as long
as before, and autograd sums the gradients of a tied weight. The loss is computed in chunks of tokens, each a
product, its softmax in blocks that fit a cache, and the two products of the gradients.

Gradients are computed in the forward, for an incoming gradient of 1 that scales them later: three products in
place of the four of recomputation. With 8k words this takes 0.8 of the blockwise loss's processor time on a
CPU, with 50k words 0.88, with 1k words the same. torch's F.linear_cross_entropy adds losses up in bf16 (1 %
off over 1,024 tokens) and takes 2.5 to 5 times as long on a CPU. DeepSpeed's computes logits twice, takes
twice as long, and has the host read labels from the device.

Under tensor parallelism a rank computes the logits of its own words only. The ranks exchange three numbers a
token (largest logit, sum of exponentials, the label's logit) with one collective a chunk.

The loss of each token serves losses that are no sum over tokens, such as those of preferences. Their
gradients are known only in the backward, where the logits of a chunk are computed a second time: four
products.

Shapes: N tokens, D width of the hidden states, V words (of this rank), C tokens of a chunk, R of a block.
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
    """Add the product a @ b to `total`, in the dtype of `total`, fp32 or fp64."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.float16:  # a sum over tokens may be too large for fp16
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif total.device.type == "cpu" and len(total) > (size := max(256, CPU_GRADIENT_ELEMENTS // b.shape[1])):
        half, whole = (b.new_empty(size, b.shape[1], dtype=dtype) for dtype in (b.dtype, total.dtype))
        for part, rows in zip(total.split(size), a.split(size), strict=True):
            product = torch.mm(rows, b, out=half[: len(rows)])
            part.add_(whole[: len(rows)].copy_(product))  # a sum of two dtypes would allocate the copy
    else:
        total += a @ b


# Factor on gradients in fp16 until the incoming gradient is known. Probabilities down to 2^-22 keep all their
# bits, and the gradient of a hidden state, at most 512 times a weight, stays below fp16's largest number. The
# gradients are those of a sum over tokens, so neither the loss scale nor the count is needed here.
FP16_SCALE = 256.0


@dataclass(frozen=True)
class LossComputation:
    """The dtype, the part of the vocabulary and the kernels of a loss computation."""

    dtype: torch.dtype
    """Dtype of products: fp64, fp32, bf16 or fp16."""
    part: VocabularyPart | None = None
    """Part of the vocabulary that weight and bias hold; `None`: all words."""
    kernels: FusedKernels | None = None
    """Compiled kernels for a chunk's losses and gradients if all words are on this rank; `None`: blocks."""


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
        part: The part of the vocabulary that weight and bias hold; `None`: all words. With a part, forward
            and backward are collective, and all ranks have the same hidden states, labels and result.
        kernels: Compiled kernels for a chunk's losses and gradients if all words are here; `None`: blocks.

    Returns:
        0-dim, fp32 (fp64 in fp64), as `F.cross_entropy(F.linear(...).float(), labels, reduction="sum")`.
    """
    how = LossComputation(dtype=dtype, part=part, kernels=kernels)
    needs_gradients = torch.is_grad_enabled()  # read here, since it is always off inside of the forward
    total: Tensor = _LinearCrossEntropy.apply(hidden_ND, weight_VD, bias_V, labels_N, how, needs_gradients)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        how: LossComputation,
        needs_gradients: bool,
    ) -> Tensor:
        needs = [needs_gradients and needed for needed in ctx.needs_input_grad[:3]]
        sums, rows = compute_chunked_loss(hidden_ND, weight_VD, bias_V, labels_N, how=how, needs=needs)
        ctx.save_for_backward(*sums.gradients(rows, len(hidden_ND)))
        ctx.scale = sums.scale
        ctx.part = how.part
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden_ND, weight_VD, bias_V)]
        return sums.losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Multiplied in fp32 and in place, which is safe: torch refuses a second backward.
        grad = grad if ctx.scale == 1.0 else grad / ctx.scale
        scaled = [None if each is None else _multiply(each, grad) for each in ctx.saved_tensors]
        if ctx.part is not None and scaled[0] is not None:
            ctx.part.all_reduce_sum(scaled[0])
        gradients = [
            None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None)


def _multiply(gradient: Tensor, incoming: Tensor) -> Tensor:
    """Return the gradient times the 0-dim incoming gradient: in place, or in the wider dtype of both."""
    if gradient.dtype == incoming.dtype:
        return gradient.mul_(incoming)
    return gradient * incoming[None]  # with one dimension, its dtype takes part in the result's


def compute_chunked_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    how: LossComputation,
    needs: list[bool],
    incoming_N: Tensor | None = None,
) -> tuple[ChunkedLoss, Tensor | None]:
    """Return the losses and needed gradients of the tokens that count, and their rows (`None`: all rows).

    Args:
        hidden_ND: The inputs of the layer.
        weight_VD: The weight of the layer.
        bias_V: The bias of the layer, or `None`.
        labels_N: The labels, int64.
        how: The settings of the computation.
        needs: Whether the gradient of each of the first three arguments is needed.
        incoming_N: The incoming gradient of each loss; `None`: FP16_SCALE in fp16, else 1.
    """
    rows = _find_counted_rows(labels_N)
    x_ND = hidden_ND.to(how.dtype)
    if rows is not None:
        x_ND = x_ND[rows]
        labels_N = labels_N[rows]
        incoming_N = None if incoming_N is None else incoming_N[rows]
    sums = (ChunkedLoss if how.part is None else _DividedLoss)(
        x_ND,
        _pad_rows(weight_VD.to(how.dtype)),
        None if bias_V is None else _pad_rows(bias_V.to(how.dtype)),
        words=len(weight_VD),
        needs=needs,
        incoming_N=incoming_N,
        how=how,
    )
    sums.add(labels_N)
    return sums, rows


def scatter_rows(values_N: Tensor, rows: Tensor | None, tokens: int) -> Tensor:
    """Return the values of counted tokens, placed in their rows among all tokens, with 0 elsewhere."""
    if rows is None:
        return values_N
    return values_N.new_zeros(tokens, *values_N.shape[1:]).index_copy_(0, rows, values_N)


def _find_counted_rows(labels_N: Tensor) -> Tensor | None:
    """Return the rows that count if some do not, else `None`.

    On a GPU all rows are computed: the host would have to wait for their number.
    """
    if labels_N.device.type != "cpu":
        return None
    is_counted = labels_N != IGNORE_INDEX
    return None if bool(is_counted.all()) else is_counted.nonzero().squeeze(1)


def _pad_rows(values: Tensor) -> Tensor:
    """Append rows of zeros up to a width at which products are fast on a GPU: a multiple of 64.

    No label is one of these rows. The vocabulary is padded inside the loss only, so the model, its
    checkpoints and its exports have the tokenizer's words, and one loss curve holds on every device.
    """
    further = compute_padded_vocabulary(len(values), values.device.type) - len(values)
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, further)) if further else values


class ChunkedLoss:
    """Computes losses, and adds gradients up chunk by chunk, in fp32 if products are in half precision.

    Args:
        x_ND: The inputs of the layer in the dtype of products.
        weight_VD: The weight, with padding rows.
        bias_V: The bias, with padding, or `None`.
        words: The number of words without padding.
        needs: Whether the gradients of inputs, weight and bias are needed.
        incoming_N: The incoming gradient of each loss, or `None`.
        how: The settings of the computation.
    """

    def __init__(
        self,
        x_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        *,
        words: int,
        needs: list[bool],
        incoming_N: Tensor | None,
        how: LossComputation,
    ):
        self._kernels = how.kernels
        self._words = words
        self._x_ND = x_ND
        self._weight_VD = weight_VD
        self._bias_V = bias_V
        self._dtype = torch.promote_types(x_ND.dtype, torch.float32)
        self._needs = any(needs)
        self.scale = FP16_SCALE if x_ND.dtype == torch.float16 else 1.0
        self._incoming_N1 = None if incoming_N is None else incoming_N.to(self._dtype)[:, None]
        self.losses_N = x_ND.new_zeros(len(x_ND), dtype=self._dtype)
        self.hidden_ND = torch.empty_like(x_ND) if needs[0] else None
        self.weight_VD = torch.zeros_like(weight_VD, dtype=self._dtype) if needs[1] else None
        self.bias_V = torch.zeros_like(weight_VD[:, 0], dtype=self._dtype) if needs[2] else None

    def add(self, labels_N: Tensor) -> None:
        """Compute the losses of all tokens, and add their gradients up."""
        tokens = len(labels_N)
        words = len(self._weight_VD)
        on_cpu = labels_N.device.type == "cpu"
        size = choose_chunk_tokens(tokens, self._get_most_words(), self._x_ND.element_size(), on_cpu)
        logits_CV = self._x_ND.new_empty(min(size, tokens), words)
        for start in range(0, tokens, size):
            chunk = slice(start, start + size)
            x_CD = self._x_ND[chunk]
            labels_C = labels_N[chunk]
            grad_CV = logits_CV[: len(labels_C)]
            if self._bias_V is None:
                torch.mm(x_CD, self._weight_VD.t(), out=grad_CV)
            else:
                torch.addmm(self._bias_V, x_CD, self._weight_VD.t(), out=grad_CV)
            if words > self._words:
                grad_CV[:, self._words :].fill_(-torch.inf)
            incoming_C1 = None if self._incoming_N1 is None else self._incoming_N1[chunk]
            self.losses_N[chunk] = self._compute_loss(grad_CV, labels_C, incoming_C1)[:, 0]
            if self.hidden_ND is not None and self.hidden_ND.dtype == grad_CV.dtype:
                torch.mm(grad_CV, self._weight_VD, out=self.hidden_ND[chunk])
            elif self.hidden_ND is not None:
                add_product(self.hidden_ND[chunk], grad_CV, self._weight_VD)
            if self.weight_VD is not None:
                add_product(self.weight_VD, grad_CV.t(), x_CD)
            if self.bias_V is not None:
                self.bias_V += grad_CV.sum(0, dtype=self._dtype)

    def gradients(self, rows: Tensor | None, tokens: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states, the weight and the bias; `None`: not needed."""
        hidden_ND = None if self.hidden_ND is None else scatter_rows(self.hidden_ND, rows, tokens)
        of_layer = (None if each is None else each[: self._words] for each in (self.weight_VD, self.bias_V))
        return hidden_ND, *of_layer

    def _get_most_words(self) -> int:
        return self._words

    def _compute_loss(self, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None) -> Tensor:
        """Return the chunk's losses (C, 1), and overwrite logits with their gradients if these are needed."""
        fused_C1 = (
            None
            if self._kernels is None
            else self._compute_by_kernels(self._kernels, logits_CV, labels_C, incoming_C1)
        )
        if fused_C1 is not None:
            return fused_C1
        on_cpu = labels_C.device.type == "cpu"
        size = min(len(labels_C), choose_block_rows(logits_CV.shape[1], on_cpu))
        is_counted_C1 = (labels_C != IGNORE_INDEX)[:, None]
        label_C1 = labels_C.clamp(min=0)[:, None]
        own_C1 = logits_CV.gather(1, label_C1).to(self._dtype)
        tops = []
        largest = []
        owns = []
        works = [logits_CV.new_empty(size, logits_CV.shape[1], dtype=self._dtype) for _ in range(2)]
        factor: Tensor | float = self.scale if incoming_C1 is None else incoming_C1
        factors = repeat(factor) if incoming_C1 is None else incoming_C1.split(size)
        for block_RV, label_R1, by in zip(logits_CV.split(size), label_C1.split(size), factors, strict=False):
            z_RV, p_RV = (work[: len(block_RV)] for work in works)
            torch.softmax(z_RV.copy_(block_RV), 1, out=p_RV)
            tops.append(z_RV.amax(1, keepdim=True))
            largest.append(p_RV.amax(1, keepdim=True))
            if self._needs:
                if isinstance(by, Tensor) or by != 1.0:
                    p_RV.mul_(by)
                owns.append(p_RV.gather(1, label_R1))
                block_RV.copy_(p_RV)
        # The probability of the largest logit is 1 / V or more, so its logarithm is accurate.
        lost_C1 = torch.cat(tops) - torch.cat(largest).log() - own_C1
        if self._needs:
            # Not scatter_, which makes an fp32 copy of all half-precision logits on a CPU.
            row_C1 = torch.arange(len(labels_C), device=labels_C.device)[:, None]
            logits_CV[row_C1, label_C1] = (torch.cat(owns) - factor).to(logits_CV.dtype)
            if not on_cpu:  # on a CPU all given tokens count
                logits_CV.mul_(is_counted_C1)
        return torch.where(is_counted_C1, lost_C1, 0.0)

    def _compute_by_kernels(
        self, kernels: FusedKernels, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None
    ) -> Tensor | None:
        """Compute losses and gradients by compiled kernels: they move 8 bytes a logit in bf16, blocks 32.

        Returns:
            The losses (C, 1); `None` if the kernels cannot be compiled, with the logits unchanged.
        """
        of_rows = kernels.loss(logits_CV, labels_C)
        if not of_rows:
            return None
        lost_C, *top_and_sum = of_rows
        if self._needs:
            if incoming_C1 is None:
                incoming_C = lost_C.new_full(lost_C.shape, self.scale)
            else:
                incoming_C = incoming_C1[:, 0].contiguous()
            if not kernels.replace_by_gradient(logits_CV, labels_C, *top_and_sum, incoming_C):
                return None
        return lost_C[:, None]


class _DividedLoss(ChunkedLoss):
    """Computes the loss over all ranks' words, with gradients of this rank's words.

    The gradient of the hidden states is this rank's share, to be summed over the ranks.
    """

    def __init__(self, *layer: Any, how: LossComputation, **given: Any):
        super().__init__(*layer, how=how, **given)
        assert how.part is not None
        self._part = how.part
        if self.hidden_ND is not None:  # in fp32, so that the sum over ranks is rounded once
            self.hidden_ND = torch.zeros_like(self.hidden_ND, dtype=self._dtype)

    def _get_most_words(self) -> int:
        return self._part.largest

    def _compute_loss(self, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None) -> Tensor:
        own_C = labels_C - self._part.start
        is_own_C1 = ((own_C >= 0) & (own_C < self._words))[:, None]  # -100 belongs to no rank
        own_C1 = own_C.clamp(0, self._words - 1)[:, None]
        # A token's largest logit, the sum of exponentials over that, and its label's logit.
        parts_C3 = logits_CV.new_empty(len(labels_C), 3, dtype=self._dtype)
        for block in iterate_blocks(logits_CV):
            z_RV = logits_CV[block].to(self._dtype)
            label_R1 = torch.where(is_own_C1[block], z_RV.gather(1, own_C1[block]), 0.0)
            top_R1 = z_RV.amax(1, keepdim=True)
            sum_R1 = (z_RV - top_R1).exp_().sum(1, keepdim=True)
            torch.cat((top_R1, sum_R1, label_R1), 1, out=parts_C3[block])
        tops_PC1, sums_PC1, labels_PC1 = self._part.gather(parts_C3).split(1, -1)
        top_C1 = tops_PC1.amax(0)
        sum_C1 = ((tops_PC1 - top_C1).exp() * sums_PC1).sum(0)
        is_counted_C1 = (labels_C != IGNORE_INDEX)[:, None]
        lost_C1 = torch.where(is_counted_C1, top_C1 + sum_C1.log() - labels_PC1.sum(0), 0.0)
        if not self._needs:
            return lost_C1
        minus_one_C1 = is_own_C1.to(self._dtype).neg_()
        for block in iterate_blocks(logits_CV):
            p_RV = logits_CV[block].to(self._dtype).sub_(top_C1[block]).exp_().div_(sum_C1[block])
            p_RV.scatter_add_(1, own_C1[block], minus_one_C1[block])
            if p_RV.device.type != "cpu":  # on a CPU all given tokens count
                p_RV.mul_(is_counted_C1[block])
            if incoming_C1 is not None or self.scale != 1.0:
                p_RV.mul_(self.scale if incoming_C1 is None else incoming_C1[block])
            logits_CV[block].copy_(p_RV)
        return lost_C1


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
    how = LossComputation(dtype=dtype, part=part, kernels=kernels)
    losses_N: Tensor = _LinearTokenLosses.apply(hidden_ND, weight_VD, bias_V, labels_N, how)
    return losses_N


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        how: LossComputation,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N)
        ctx.how = how
        sums, rows = compute_chunked_loss(hidden_ND, weight_VD, bias_V, labels_N, how=how, needs=[False] * 3)
        return scatter_rows(sums.losses_N, rows, len(labels_N))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, labels_N = ctx.saved_tensors
        given = (hidden_ND, weight_VD, bias_V)
        needs = list(ctx.needs_input_grad[:3])
        sums, rows = compute_chunked_loss(*given, labels_N, how=ctx.how, needs=needs, incoming_N=grad_N)
        wide_gradients = sums.gradients(rows, len(labels_N))
        if ctx.how.part is not None and wide_gradients[0] is not None:
            ctx.how.part.all_reduce_sum(wide_gradients[0])
        gradients = [
            None if gradient is None else gradient.to(each.dtype)
            for gradient, each in zip(wide_gradients, given, strict=True)
        ]
        return (*gradients, None, None)


class OutputHeads:
    """Finds the output layer of each model that an objective is called with, once."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, nn.Linear | None] = WeakKeyDictionary()

    def of(self, model: Callable[..., Any]) -> nn.Linear | None:
        """Return a language model's output layer if the logits are its unchanged outputs, else `None`.

        The result is also `None` for a model that is compiled whole, and for replicas on several devices.
        """
        if not isinstance(model, nn.Module):
            return None
        if model not in self._known:
            own = unwrap_model(model)
            is_plain = not (isinstance(model, nn.DataParallel) or hasattr(model, "_orig_mod"))
            self._known[model] = _find_head(own) if is_plain else None
        return self._known[model]


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
    def given(self, hidden_BTD: Tensor) -> Iterator[None]:
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
    """Tells whether an output layer computed the loss of the labels that it was given."""

    is_taken = False
    """Whether the model's logits are the loss."""


@contextmanager
def compute_loss_in_head(
    head: nn.Linear | None,
    labels_BT: Tensor,
    of_tokens: bool = False,
    kernels: FusedKernels | None = None,
) -> Iterator[HeadLossState]:
    """Let the output layer return the loss sum (1,) inside the context, if hidden states fit the labels.

    Hidden states of another shape give logits as before.

    Args:
        head: The output layer; `None`: nothing changes.
        labels_BT: The labels, aligned with the outputs.
        of_tokens: Whether to return the losses of all tokens (B, T) in place of their sum.
        kernels: See linear_cross_entropy_sum.

    Yields:
        Whether the layer computed the loss, once the model has been called.
    """
    state = HeadLossState()
    if head is None:
        yield state
        return

    plain = head.forward  # under tensor parallelism, gathers the logits of all ranks

    def forward(input: Tensor) -> Tensor:  # as nn.Linear names it
        hidden_BTD = input
        weight_VD = head.weight
        kind = hidden_BTD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
        if hidden_BTD.shape[:-1] != labels_BT.shape:
            return plain(hidden_BTD)
        state.is_taken = True
        hidden_ND = hidden_BTD.flatten(0, 1)
        labels_N = labels_BT.flatten()
        part = get_vocabulary_part(head)
        given = (hidden_ND, weight_VD, head.bias, labels_N, dtype, part, kernels)
        if of_tokens:
            return linear_token_losses(*given).view(labels_BT.shape)
        return linear_cross_entropy_sum(*given)[None]

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield state
    finally:
        del head.forward


def _find_head(model: Any) -> nn.Linear | None:
    if isinstance(model, HeadOnlyModel):
        return model.head
    if not is_transformers_model(model) or model._compiled_call_impl is not None:
        return None
    head = model.get_output_embeddings()
    decoder = getattr(model, model.base_model_prefix, None)
    names = {child: name for name, child in model.named_children()}
    is_linear = type(head) is nn.Linear or get_vocabulary_part(head) is not None
    if not is_linear or head not in names or decoder not in names or "forward" in vars(head):
        return None
    return head if _returns_outputs(model, head, names[head], names[decoder]) else None


@torch.no_grad()
def _returns_outputs(model: nn.Module, head: nn.Linear, head_name: str, decoder_name: str) -> bool:
    """Return whether the logits are the very tensor that the layer returns.

    The model's forward is tried with stand-ins for the layer and the decoder. A scale or a cap on the logits
    makes another tensor.
    """
    weight = head.weight
    hidden_BTD = torch.empty(1, 2, head.in_features, dtype=weight.dtype, device=weight.device)
    stand_in = _StandIn(torch.empty(1, 2, 1, dtype=weight.dtype, device=weight.device), weight)
    parts = dict(model._modules)
    model._modules |= {head_name: stand_in, decoder_name: _StandIn(_Output(hidden_BTD))}
    try:
        output = model.forward(input_ids=torch.zeros(1, 2, dtype=torch.long, device=weight.device))
        is_whole = len(stand_in.given) == 1 and stand_in.given[0].shape == hidden_BTD.shape
        return is_whole and output.logits is stand_in.result
    except Exception:  # a forward may raise anything if it reads more than the stand-ins return
        return False
    finally:
        model._modules |= parts


class _StandIn(nn.Module):
    """Returns a fixed result, and records its first arguments."""

    def __init__(self, result: Any, weight: Tensor | None = None):
        super().__init__()
        self.result = result
        self.weight = weight
        self.given: list[Any] = []

    def forward(self, *given: Any, **_: Any) -> Any:
        self.given += given[:1]
        return self.result


class _Output(tuple[Tensor]):
    """A decoder's output with nothing but hidden states, as the first element and as `last_hidden_state`."""

    def __new__(cls, hidden_BTD: Tensor) -> _Output:
        return super().__new__(cls, (hidden_BTD,))

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None
