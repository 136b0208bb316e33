"""Cross entropy of a linear layer's outputs without the outputs: no tensor of (tokens, vocabulary).

torch's F.linear_cross_entropy adds losses up in bf16 (1 % off over 1,024 tokens) and takes 2.5 to 5 times as
long on a CPU; DeepSpeed's computes logits twice (twice as long) and has the host read labels of the device.

Where ranks hold a part of the words each, they exchange three numbers a token.

Shapes: N tokens, D width of the hidden states, V words (of this rank), C tokens of a chunk, R of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.data.batches import IGNORE_INDEX
from pipeline.objectives.vocabulary_part import VocabularyPart

# Bytes of a chunk's logits, and tokens where these are more: products are fast from a few hundred tokens on,
# and adding up the weight's gradient costs a pass over it a chunk. 5,300 tokens on a GPU in bf16 with 50k
# words; on a CPU less than the 32 MiB from which on glibc maps a block anew in each step.
CPU_CHUNK = (30 << 20, 512)
GPU_CHUNK = (1 << 29, 1)
# fp32 elements that are worked on at once: 1 MiB stays in a core's cache; a GPU wants few, large kernels.
CPU_BLOCK = 1 << 18
GPU_BLOCK = 1 << 26
# What gradients are multiplied by in fp16 until the incoming one is known: probabilities down to 2^-22 keep
# all their bits, and a hidden state's gradient, at most 512 times a weight, stays below the largest number.
FP16_SCALE = 256.0
# By kind of device, what a layer's words are filled up to a multiple of: tensor cores take rows of logits of
# an odd length, such as 50,257 words', at a fraction of their rate.
MULTIPLE = {"cuda": 64}
# Elements of the weight's gradient that are added up at once on a CPU, 256 words or more: the product is
# still cached, and neither it nor its fp32 copy is as large as the weight.
CPU_PART = 1 << 19


def linear_cross_entropy_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    dtype: torch.dtype,
    part: VocabularyPart | None = None,
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

    Returns:
        0-dim, fp32 (fp64 in fp64), as `F.cross_entropy(F.linear(...).float(), labels, reduction="sum")`.
    """
    total: Tensor = _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, bias_V, labels_N, dtype, torch.is_grad_enabled(), part
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
        dtype: torch.dtype,
        with_gradients: bool,
        part: VocabularyPart | None,
    ) -> Tensor:
        needs = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        rows = _counted(labels_N)
        x_ND, own_N = hidden_ND.to(dtype), labels_N
        if rows is not None:
            x_ND, own_N = x_ND[rows], labels_N[rows]
        kind = _Sums if part is None else partial(_SumsOverRanks, part)
        words = len(weight_VD)
        layer = _filled_up(weight_VD.to(dtype)), None if bias_V is None else _filled_up(bias_V.to(dtype))
        sums = kind(x_ND, *layer, words, needs)
        sums.add(own_N)
        grad_ND = sums.hidden_ND
        if rows is not None and grad_ND is not None:
            grad_ND = torch.zeros_like(hidden_ND, dtype=grad_ND.dtype).index_copy_(0, rows, grad_ND)
        of_layer = (None if each is None else each[:words] for each in (sums.weight_VD, sums.bias_V))
        ctx.save_for_backward(grad_ND, *of_layer)
        ctx.scale, ctx.part = sums.scale, part
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden_ND, weight_VD, bias_V)]
        return sums.loss

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
        return (*gradients, None, None, None, None)


def _counted(labels_N: Tensor) -> Tensor | None:
    """The rows that count, where some do not. On a GPU the host would wait to know how many: all stay."""
    if labels_N.device.type != "cpu":
        return None
    is_counted = labels_N != IGNORE_INDEX
    return None if bool(is_counted.all()) else is_counted.nonzero().squeeze(1)


def _filled_up(of_words: Tensor) -> Tensor:
    """With rows of zeros for words that there are not, whose logits are nobody's; see MULTIPLE."""
    further = -len(of_words) % MULTIPLE.get(of_words.device.type, 1)
    return F.pad(of_words, (0, 0) * (of_words.dim() - 1) + (0, further)) if further else of_words


class _Sums:
    """The loss and its gradients, added up chunk by chunk: fp32 where products are in half precision."""

    def __init__(self, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, words: int, needs: list[bool]):
        """Words: those that there are; rows behind them only fill up."""
        self._words = words
        self._x_ND, self._weight_VD, self._bias_V = x_ND, weight_VD, bias_V
        self._dtype = torch.promote_types(x_ND.dtype, torch.float32)
        self._needs = any(needs)
        self.scale = FP16_SCALE if x_ND.dtype == torch.float16 else 1.0
        self.loss = x_ND.new_zeros((), dtype=self._dtype)
        self.hidden_ND = torch.empty_like(x_ND) if needs[0] else None
        self.weight_VD = torch.zeros_like(weight_VD, dtype=self._dtype) if needs[1] else None
        self.bias_V = torch.zeros_like(weight_VD[:, 0], dtype=self._dtype) if needs[2] else None

    def add(self, labels_N: Tensor) -> None:
        tokens, words = len(labels_N), len(self._weight_VD)
        most, least = CPU_CHUNK if labels_N.device.type == "cpu" else GPU_CHUNK
        chunks = math.ceil(tokens / max(least, most // (self._most_words() * self._x_ND.element_size())))
        size = max(1, math.ceil(tokens / max(1, chunks)))  # alike: a remnant would cost as many passes
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
            self._loss_of(grad_CV, labels_C)
            if self.hidden_ND is not None and self.hidden_ND.dtype == grad_CV.dtype:
                torch.mm(grad_CV, self._weight_VD, out=self.hidden_ND[chunk])
            elif self.hidden_ND is not None:
                _add_product(self.hidden_ND[chunk], grad_CV, self._weight_VD)
            if self.weight_VD is not None:
                _add_product(self.weight_VD, grad_CV.t(), x_CD)
            if self.bias_V is not None:
                self.bias_V += grad_CV.sum(0, dtype=self._dtype)

    def _most_words(self) -> int:
        return self._words

    def _loss_of(self, logits_CV: Tensor, labels_C: Tensor) -> None:
        """Adds the chunk's loss. Logits become gradients of it, where these are needed."""
        on_cpu = labels_C.device.type == "cpu"
        size = min(len(labels_C), max(1, (CPU_BLOCK if on_cpu else GPU_BLOCK) // logits_CV.shape[1]))
        is_counted_C1 = (labels_C != IGNORE_INDEX)[:, None]
        label_C1 = labels_C.clamp(min=0)[:, None]
        own_C1 = logits_CV.gather(1, label_C1).to(self._dtype)
        tops, largest, owns = [], [], []
        works = [logits_CV.new_empty(size, logits_CV.shape[1], dtype=self._dtype) for _ in range(2)]
        for block_RV, label_R1 in zip(logits_CV.split(size), label_C1.split(size), strict=True):
            z_RV, p_RV = (work[: len(block_RV)] for work in works)
            torch.softmax(z_RV.copy_(block_RV), 1, out=p_RV)
            tops.append(z_RV.amax(1, keepdim=True))
            largest.append(p_RV.amax(1, keepdim=True))
            if self._needs:
                if self.scale != 1.0:
                    p_RV.mul_(self.scale)
                owns.append(p_RV.gather(1, label_R1))
                block_RV.copy_(p_RV)
        # The largest logit's probability is 1 / V or more, so its logarithm is exact.
        lost_C1 = torch.cat(tops) - torch.cat(largest).log() - own_C1
        self.loss += torch.where(is_counted_C1, lost_C1, 0.0).sum()
        if self._needs:
            # Not scatter_: of half precision it makes an fp32 copy of all logits, on a CPU.
            row_C1 = torch.arange(len(labels_C), device=labels_C.device)[:, None]
            logits_CV[row_C1, label_C1] = (torch.cat(owns) - self.scale).to(logits_CV.dtype)
            if not on_cpu:  # there all of them count
                logits_CV.mul_(is_counted_C1)

    def _keep(self, gradient_RV: Tensor, block_RV: Tensor, is_counted_R1: Tensor) -> None:
        if block_RV.device.type != "cpu":  # there all of them count
            gradient_RV.mul_(is_counted_R1)
        if self.scale != 1.0:
            gradient_RV.mul_(self.scale)
        block_RV.copy_(gradient_RV)


class _SumsOverRanks(_Sums):
    """The loss over the words of all ranks; gradients of this rank's, and its share of the hidden states'."""

    def __init__(self, part: VocabularyPart, *arguments: Any):
        super().__init__(*arguments)
        self._part = part
        if self.hidden_ND is not None:  # a sum over ranks, which is rounded once
            self.hidden_ND = torch.zeros_like(self.hidden_ND, dtype=self._dtype)

    def _most_words(self) -> int:
        return self._part.largest

    def _loss_of(self, logits_CV: Tensor, labels_C: Tensor) -> None:
        own_C = labels_C - self._part.start
        is_own_C1 = ((own_C >= 0) & (own_C < self._words))[:, None]  # -100 is nobody's
        own_C1 = own_C.clamp(0, self._words - 1)[:, None]
        # A token's largest logit, the sum of exponentials over that, and its label's logit.
        found_C3 = logits_CV.new_empty(len(labels_C), 3, dtype=self._dtype)
        for block in blocks_of(logits_CV):
            z_RV = logits_CV[block].to(self._dtype)
            label_R1 = torch.where(is_own_C1[block], z_RV.gather(1, own_C1[block]), 0.0)
            top_R1 = z_RV.amax(1, keepdim=True)
            sum_R1 = (z_RV - top_R1).exp_().sum(1, keepdim=True)
            torch.cat((top_R1, sum_R1, label_R1), 1, out=found_C3[block])
        tops_PC1, sums_PC1, labels_PC1 = self._part.gather(found_C3).split(1, -1)
        top_C1 = tops_PC1.amax(0)
        sum_C1 = ((tops_PC1 - top_C1).exp() * sums_PC1).sum(0)
        is_counted_C1 = (labels_C != IGNORE_INDEX)[:, None]
        self.loss += torch.where(is_counted_C1, top_C1 + sum_C1.log() - labels_PC1.sum(0), 0.0).sum()
        if not self._needs:
            return
        minus_one_C1 = is_own_C1.to(self._dtype).neg_()
        for block in blocks_of(logits_CV):
            p_RV = logits_CV[block].to(self._dtype).sub_(top_C1[block]).exp_().div_(sum_C1[block])
            p_RV.scatter_add_(1, own_C1[block], minus_one_C1[block])
            self._keep(p_RV, logits_CV[block], is_counted_C1[block])


def blocks_of(logits_NV: Tensor) -> Iterator[slice]:
    """Rows that are worked on in fp32 at once."""
    elements = CPU_BLOCK if logits_NV.device.type == "cpu" else GPU_BLOCK
    rows = max(1, elements // logits_NV.shape[1])
    for start in range(0, logits_NV.shape[0], rows):
        yield slice(start, start + rows)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added up in the total's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.float16:  # a sum over tokens may be too large for it
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif total.device.type == "cpu" and len(total) > (size := max(256, CPU_PART // b.shape[1])):
        half, whole = (b.new_empty(size, b.shape[1], dtype=dtype) for dtype in (b.dtype, total.dtype))
        for part, rows in zip(total.split(size), a.split(size), strict=True):
            product = torch.mm(rows, b, out=half[: len(rows)])
            part.add_(whole[: len(rows)].copy_(product))  # the sum of two types would allocate the copy
    else:
        total += a @ b
