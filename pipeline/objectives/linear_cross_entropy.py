"""Cross entropy of a linear layer's outputs without the outputs: no tensor of (tokens, vocabulary).

torch's F.linear_cross_entropy adds losses up in bf16 (1 % off over 1,024 tokens) and takes 2.5 to 5 times as
long on a CPU; DeepSpeed's computes logits twice (twice as long) and has the host read labels of the device.
Where ranks hold a part of the words each, they exchange three numbers a token.

The loss of each token is for losses that are no sum over tokens, such as those of preferences. Their
gradients are known in the backward alone, where the chunks' logits are made a second time: four products in
place of three.

A model's output layer returns the loss in place of logits, inside its own forward. There its weight is whole
(ZeRO 3 gathers it for that long), and hooks of engines on its output and its parameters do what they always
do.

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
    pad_vocabulary,
)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added up in the total's dtype, fp32 or more."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.float16:  # a sum over tokens may be too large for it
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif total.device.type == "cpu" and len(total) > (size := max(256, CPU_GRADIENT_ELEMENTS // b.shape[1])):
        half, whole = (b.new_empty(size, b.shape[1], dtype=dtype) for dtype in (b.dtype, total.dtype))
        for part, rows in zip(total.split(size), a.split(size), strict=True):
            product = torch.mm(rows, b, out=half[: len(rows)])
            part.add_(whole[: len(rows)].copy_(product))  # the sum of two types would allocate the copy
    else:
        total += a @ b


# What gradients are multiplied by in fp16 until the incoming one is known: probabilities down to 2^-22 keep
# all their bits, and a hidden state's gradient, at most 512 times a weight, stays below the largest number.
FP16_SCALE = 256.0


@dataclass(frozen=True)
class LossComputation:
    """How a layer's outputs and their losses are computed."""

    dtype: torch.dtype
    """Data type of products: fp64, fp32, bf16 or fp16."""
    part: VocabularyPart | None = None
    """Words that weight and bias are of; `None`: all."""
    kernels: FusedKernels | None = None
    """Kernels for a chunk's losses and gradients, where all words are here; `None`: in blocks."""


def linear_cross_entropy_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    dtype: torch.dtype,
    part: VocabularyPart | None = None,
    kernels: FusedKernels | None = None,
) -> Tensor:
    """Sum over the labels that are not -100.

    Gradients are worked out in the forward, for an incoming gradient of 1: three products, as the layer
    and its backward take, in place of four. In fp16 they are FP16_SCALE times that, whatever the loss scale,
    and what the loss scale makes too large for fp16 is infinite in the backward, as it is for logits.

    Args:
        hidden_ND: What goes into the layer.
        labels_N: int64.
        dtype: What products are computed in: fp64, fp32, bf16 or fp16.
        part: Which words weight and bias are of; None: all. With one it is collective, and so is its
            backward: each of the ranks has the same hidden states, labels and result.
        kernels: Compute a chunk's losses and gradients, where all words are here; None: in blocks.

    Returns:
        0-dim, fp32 (fp64 in fp64), as `F.cross_entropy(F.linear(...).float(), labels, reduction="sum")`.
    """
    how = LossComputation(dtype=dtype, part=part, kernels=kernels)
    needs_gradients = torch.is_grad_enabled()  # inside of the forward it never is
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
        ctx.scale, ctx.part = sums.scale, how.part
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden_ND, weight_VD, bias_V)]
        return sums.losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Multiplied in fp32, into the sums themselves: a second backward is torch's error.
        grad = grad if ctx.scale == 1.0 else grad / ctx.scale
        found = [
            None if each is None else (each.mul_(grad) if each.dtype == grad.dtype else each * grad[None])
            for each in ctx.saved_tensors
        ]
        if ctx.part is not None and found[0] is not None:
            ctx.part.all_reduce_sum(found[0])
        gradients = [
            None if each is None else each.to(dtype) for each, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None)


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
    """Return losses and needed gradients of the tokens that count, and the rows of these; `None`: all.

    Args:
        needs: Which gradients of the first three arguments, which see linear_cross_entropy_sum.
        incoming_N: Gradient of each loss; None: FP16_SCALE in fp16, else 1.
    """
    rows = _counted(labels_N)
    x_ND = hidden_ND.to(how.dtype)
    if rows is not None:
        x_ND, labels_N = x_ND[rows], labels_N[rows]
        incoming_N = None if incoming_N is None else incoming_N[rows]
    sums = (ChunkedLoss if how.part is None else _SumsOverRanks)(
        x_ND,
        _filled_up(weight_VD.to(how.dtype)),
        None if bias_V is None else _filled_up(bias_V.to(how.dtype)),
        words=len(weight_VD),
        needs=needs,
        incoming_N=incoming_N,
        how=how,
    )
    sums.add(labels_N)
    return sums, rows


def scatter_rows(values_N: Tensor, rows: Tensor | None, tokens: int) -> Tensor:
    """Return values of the tokens that count at their places among all tokens; 0 elsewhere."""
    if rows is None:
        return values_N
    return values_N.new_zeros(tokens, *values_N.shape[1:]).index_copy_(0, rows, values_N)


def _counted(labels_N: Tensor) -> Tensor | None:
    """Return the rows that count if some do not. On a GPU all stay: the host would wait for the number."""
    if labels_N.device.type != "cpu":
        return None
    is_counted = labels_N != IGNORE_INDEX
    return None if bool(is_counted.all()) else is_counted.nonzero().squeeze(1)


def _filled_up(of_words: Tensor) -> Tensor:
    """Append rows of zeros up to a width that products are fast at; no label is one of them."""
    further = pad_vocabulary(len(of_words), of_words.device.type) - len(of_words)
    return F.pad(of_words, (0, 0) * (of_words.dim() - 1) + (0, further)) if further else of_words


class ChunkedLoss:
    """Losses, and their gradients added up chunk by chunk: fp32 where products are in half precision."""

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
        """Words: those that there are; rows behind them only fill up."""
        self._kernels = how.kernels
        self._words = words
        self._x_ND, self._weight_VD, self._bias_V = x_ND, weight_VD, bias_V
        self._dtype = torch.promote_types(x_ND.dtype, torch.float32)
        self._needs = any(needs)
        self.scale = FP16_SCALE if x_ND.dtype == torch.float16 else 1.0
        self._incoming_N1 = None if incoming_N is None else incoming_N.to(self._dtype)[:, None]
        self.losses_N = x_ND.new_zeros(len(x_ND), dtype=self._dtype)
        self.hidden_ND = torch.empty_like(x_ND) if needs[0] else None
        self.weight_VD = torch.zeros_like(weight_VD, dtype=self._dtype) if needs[1] else None
        self.bias_V = torch.zeros_like(weight_VD[:, 0], dtype=self._dtype) if needs[2] else None

    def add(self, labels_N: Tensor) -> None:
        tokens, words = len(labels_N), len(self._weight_VD)
        on_cpu = labels_N.device.type == "cpu"
        size = choose_chunk_tokens(tokens, self._most_words(), self._x_ND.element_size(), on_cpu)
        logits_CV = self._x_ND.new_empty(min(size, tokens), words)
        for start in range(0, tokens, size):
            chunk = slice(start, start + size)
            x_CD, labels_C = self._x_ND[chunk], labels_N[chunk]
            grad_CV = logits_CV[: len(labels_C)]
            if self._bias_V is None:
                torch.mm(x_CD, self._weight_VD.t(), out=grad_CV)
            else:
                torch.addmm(self._bias_V, x_CD, self._weight_VD.t(), out=grad_CV)
            if words > self._words:
                grad_CV[:, self._words :].fill_(-torch.inf)
            incoming_C1 = None if self._incoming_N1 is None else self._incoming_N1[chunk]
            self.losses_N[chunk] = self._loss_of(grad_CV, labels_C, incoming_C1)[:, 0]
            if self.hidden_ND is not None and self.hidden_ND.dtype == grad_CV.dtype:
                torch.mm(grad_CV, self._weight_VD, out=self.hidden_ND[chunk])
            elif self.hidden_ND is not None:
                add_product(self.hidden_ND[chunk], grad_CV, self._weight_VD)
            if self.weight_VD is not None:
                add_product(self.weight_VD, grad_CV.t(), x_CD)
            if self.bias_V is not None:
                self.bias_V += grad_CV.sum(0, dtype=self._dtype)

    def gradients(self, rows: Tensor | None, tokens: int) -> tuple[Tensor | None, ...]:
        """Return those of the hidden states (see spread), the weight and the bias; `None`: not needed."""
        hidden_ND = None if self.hidden_ND is None else scatter_rows(self.hidden_ND, rows, tokens)
        of_layer = (None if each is None else each[: self._words] for each in (self.weight_VD, self.bias_V))
        return hidden_ND, *of_layer

    def _most_words(self) -> int:
        return self._words

    def _loss_of(self, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None) -> Tensor:
        """Return the chunk's losses (C, 1). Logits become their gradients, if these are needed."""
        fused_C1 = (
            None if self._kernels is None else self._fused(self._kernels, logits_CV, labels_C, incoming_C1)
        )
        if fused_C1 is not None:
            return fused_C1
        on_cpu = labels_C.device.type == "cpu"
        size = min(len(labels_C), choose_block_rows(logits_CV.shape[1], on_cpu))
        is_counted_C1 = (labels_C != IGNORE_INDEX)[:, None]
        label_C1 = labels_C.clamp(min=0)[:, None]
        own_C1 = logits_CV.gather(1, label_C1).to(self._dtype)
        tops, largest, owns = [], [], []
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
        # The largest logit's probability is 1 / V or more, so its logarithm is exact.
        lost_C1 = torch.cat(tops) - torch.cat(largest).log() - own_C1
        if self._needs:
            # Not scatter_: of half precision it makes an fp32 copy of all logits, on a CPU.
            row_C1 = torch.arange(len(labels_C), device=labels_C.device)[:, None]
            logits_CV[row_C1, label_C1] = (torch.cat(owns) - factor).to(logits_CV.dtype)
            if not on_cpu:  # there all of them count
                logits_CV.mul_(is_counted_C1)
        return torch.where(is_counted_C1, lost_C1, 0.0)

    def _fused(
        self, kernels: FusedKernels, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None
    ) -> Tensor | None:
        """Do the same by compiled kernels: 8 bytes a logit move in bf16, where blocks move 32 on a GPU.

        Returns:
            The losses (C, 1); None: the kernels could not be compiled, and the logits are as they were.
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


class _SumsOverRanks(ChunkedLoss):
    """The loss over the words of all ranks; gradients of this rank's, and its share of the hidden states'."""

    def __init__(self, *layer: Any, how: LossComputation, **given: Any):
        super().__init__(*layer, how=how, **given)
        assert how.part is not None
        self._part = how.part
        if self.hidden_ND is not None:  # a sum over ranks, which is rounded once
            self.hidden_ND = torch.zeros_like(self.hidden_ND, dtype=self._dtype)

    def _most_words(self) -> int:
        return self._part.largest

    def _loss_of(self, logits_CV: Tensor, labels_C: Tensor, incoming_C1: Tensor | None) -> Tensor:
        own_C = labels_C - self._part.start
        is_own_C1 = ((own_C >= 0) & (own_C < self._words))[:, None]  # -100 is nobody's
        own_C1 = own_C.clamp(0, self._words - 1)[:, None]
        # A token's largest logit, the sum of exponentials over that, and its label's logit.
        found_C3 = logits_CV.new_empty(len(labels_C), 3, dtype=self._dtype)
        for block in iterate_blocks(logits_CV):
            z_RV = logits_CV[block].to(self._dtype)
            label_R1 = torch.where(is_own_C1[block], z_RV.gather(1, own_C1[block]), 0.0)
            top_R1 = z_RV.amax(1, keepdim=True)
            sum_R1 = (z_RV - top_R1).exp_().sum(1, keepdim=True)
            torch.cat((top_R1, sum_R1, label_R1), 1, out=found_C3[block])
        tops_PC1, sums_PC1, labels_PC1 = self._part.gather(found_C3).split(1, -1)
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
            if p_RV.device.type != "cpu":  # there all of them count
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
    """Return minus the log-probability of each token's label; 0 where that is -100.

    Args:
        hidden_ND, weight_VD, bias_V, labels_N, dtype, part, kernels: See linear_cross_entropy_sum. With a
            part both the forward and the backward are collective, and all ranks' incoming gradients are the
            same.

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
        found = sums.gradients(rows, len(labels_N))
        if ctx.how.part is not None and found[0] is not None:
            ctx.how.part.all_reduce_sum(found[0])
        gradients = [
            None if gradient is None else gradient.to(each.dtype)
            for gradient, each in zip(found, given, strict=True)
        ]
        return (*gradients, None, None)


class OutputHeads:
    """The output layers of the models that an objective is called with."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, nn.Linear | None] = WeakKeyDictionary()

    def of(self, model: Callable[..., Any]) -> nn.Linear | None:
        """Return a language model's output layer, if its logits are this layer's outputs as they are.

        None for any other model, for one that is compiled whole, and for replicas on several devices.
        """
        if not isinstance(model, nn.Module):
            return None
        if model not in self._known:
            own = unwrap_model(model)
            is_plain = not (isinstance(model, nn.DataParallel) or hasattr(model, "_orig_mod"))
            self._known[model] = _head(own) if is_plain else None
        return self._known[model]


class HeadOnlyModel(nn.Module):
    """An output layer in the place of the model, on a pipeline's last stage, where hidden states are there.

    Args:
        output: Makes of logits what the whole model returns.
    """

    def __init__(self, head: nn.Linear, output: Callable[[Tensor], Any]):
        super().__init__()
        self.head = head
        self._output = output
        self._hidden_BTD: Tensor | None = None

    @contextmanager
    def given(self, hidden_BTD: Tensor) -> Iterator[None]:
        """Inside, these are the hidden states of whatever it is called with."""
        self._hidden_BTD = hidden_BTD
        try:
            yield
        finally:
            self._hidden_BTD = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output(self.head(self._hidden_BTD))


class HeadLossState:
    """Whether the layer used the labels that it was handed."""

    is_taken = False
    """Whether the model's logits are the loss."""


@contextmanager
def compute_loss_in_head(
    head: nn.Linear | None,
    labels_BT: Tensor,
    of_tokens: bool = False,
    kernels: FusedKernels | None = None,
) -> Iterator[HeadLossState]:
    """Inside, the layer returns the loss sum, (1,), of hidden states that fit the labels, and else logits.

    Args:
        of_tokens: The losses of all tokens, (B, T), in place of their sum.
        kernels: See linear_cross_entropy_sum.
    """
    told = HeadLossState()
    if head is None:
        yield told
        return

    plain = head.forward  # ranks of a cut layer put their logits together

    def forward(input: Tensor) -> Tensor:  # as nn.Linear names it
        hidden_BTD = input
        weight_VD, kind = head.weight, hidden_BTD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
        if hidden_BTD.shape[:-1] != labels_BT.shape:
            return plain(hidden_BTD)
        told.is_taken = True
        hidden_ND = hidden_BTD.flatten(0, 1)
        labels_N, part = labels_BT.flatten(), get_vocabulary_part(head)
        given = (hidden_ND, weight_VD, head.bias, labels_N, dtype, part, kernels)
        if of_tokens:
            return linear_token_losses(*given).view(labels_BT.shape)
        return linear_cross_entropy_sum(*given)[None]

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield told
    finally:
        del head.forward


def _head(model: Any) -> nn.Linear | None:
    if isinstance(model, HeadOnlyModel):
        return model.head
    if not is_transformers_model(model) or model._compiled_call_impl is not None:
        return None
    head, decoder = model.get_output_embeddings(), getattr(model, model.base_model_prefix, None)
    names = {child: name for name, child in model.named_children()}
    is_linear = type(head) is nn.Linear or get_vocabulary_part(head) is not None
    if not is_linear or head not in names or decoder not in names or "forward" in vars(head):
        return None
    return head if _returns_outputs(model, head, names[head], names[decoder]) else None


@torch.no_grad()
def _returns_outputs(model: nn.Module, head: nn.Linear, head_name: str, decoder_name: str) -> bool:
    """Return whether the logits are the very tensor that the layer returns, tried with stand-ins."""
    weight = head.weight
    hidden_BTD = torch.empty(1, 2, head.in_features, dtype=weight.dtype, device=weight.device)
    stand_in = _StandIn(torch.empty(1, 2, 1, dtype=weight.dtype, device=weight.device), weight)
    parts = dict(model._modules)
    model._modules |= {head_name: stand_in, decoder_name: _StandIn(_Output(hidden_BTD))}
    try:
        output = model.forward(input_ids=torch.zeros(1, 2, dtype=torch.long, device=weight.device))
        is_whole = len(stand_in.given) == 1 and stand_in.given[0].shape == hidden_BTD.shape
        return is_whole and output.logits is stand_in.result
    except Exception:  # whatever a forward raises that looks for more than there is
        return False
    finally:
        model._modules |= parts


class _StandIn(nn.Module):
    """Returns one result, and keeps its first arguments."""

    def __init__(self, result: Any, weight: Tensor | None = None):
        super().__init__()
        self.result, self.weight = result, weight
        self.given: list[Any] = []

    def forward(self, *given: Any, **_: Any) -> Any:
        self.given += given[:1]
        return self.result


class _Output(tuple[Tensor]):
    """The hidden states, first and by name; there is nothing else."""

    def __new__(cls, hidden_BTD: Tensor) -> _Output:
        return super().__new__(cls, (hidden_BTD,))

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None
