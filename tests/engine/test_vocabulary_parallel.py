"""An output layer cut by words over two ranks: the loss and its gradients are the whole layer's."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity.splits import LLAMA, TENSOR_2, zero
from support.tiny import make_engine, recipe, token_bundle

from pipeline.distributed.process_group import Job
from pipeline.errors import DataError
from pipeline.objectives import CausalLM, VocabularyPart
from pipeline.objectives.interface import get_vocabulary_part
from pipeline.objectives.linear_cross_entropy import linear_cross_entropy_sum
from pipeline.planner import model as chunks

pytestmark = pytest.mark.slow

WORDS = 37
WIDTH = 12
TOKENS = 50
ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def inputs(dtype: torch.dtype, logit: float = 0.0):
    """Hidden states, weight, bias and labels, some of which do not count; `logit`: the last word's bias."""
    generator = torch.Generator().manual_seed(0)
    sizes = (TOKENS, WIDTH), (WORDS, WIDTH), (WORDS,)
    parts = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    if logit:
        parts[2][WORDS - 1] = logit
    labels = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    labels[::5] = -100
    return [*parts, labels]


def part_of(job: Job) -> VocabularyPart:
    """The first rank has three words more than the second."""

    def gather(tensor):
        gathered = tensor.new_empty(2, *tensor.shape)
        dist.all_gather(list(gathered.unbind()), tensor)
        return gathered

    return VocabularyPart(20 * job.ranks.rank, 20, gather, job.all_reduce_sum)


def cut(job: Job, cases):
    """(loss, gradients of the hidden states, of this rank's rows and of their biases) of each."""
    own = (slice(0, 20), slice(20, WORDS))[job.ranks.rank]
    found = []
    with (
        patch.object(chunks, "CPU_LOGITS_CHUNK", (16 * 20 * 2, 1)),
        patch.object(chunks, "CPU_SOFTMAX_ELEMENTS", 3 * 20),
        patch.dict(chunks.VOCABULARY_MULTIPLES, cpu=8),  # rows are filled up as on a GPU
    ):
        for case in cases:
            hidden, weight, bias, labels = inputs(*case)
            leaves = [each.clone().requires_grad_() for each in (hidden, weight[own], bias[own])]
            loss = linear_cross_entropy_sum(*leaves, labels, case[0], part_of(job))
            (loss * 0.5).backward()
            with torch.no_grad():
                alone = linear_cross_entropy_sum(*leaves, labels, case[0], part_of(job))
            assert torch.equal(alone, loss.detach()) or not loss.isfinite()
            found.append((loss.item(), [leaf.grad.double() for leaf in leaves]))
    return found


def whole(dtype: torch.dtype, logit: float = 0.0):
    *parts, labels = inputs(dtype, logit)
    leaves = [part.double().requires_grad_() for part in parts]
    loss = F.cross_entropy(F.linear(*leaves), labels, reduction="sum")
    (loss * 0.5).backward()
    return loss.item(), [leaf.grad for leaf in leaves]


def test_loss_and_gradients_are_the_whole_layers(ranks):
    cases = [(dtype, logit) for dtype in ROUNDING for logit in (0.0, 1e4)]
    for found in zip(cases, *ranks(2).run(cut, cases), strict=True):
        (dtype, logit), (loss, (hidden, *first)), (other_loss, (other_hidden, *second)) = found
        expected, (hidden_gradient, *gradients) = whole(dtype, logit)
        rounding = ROUNDING[dtype]
        assert loss == other_loss == pytest.approx(expected, rel=rounding)
        assert torch.equal(hidden, other_hidden)
        assert (hidden - hidden_gradient).norm() <= rounding * hidden_gradient.norm()
        for one, two, gradient in zip(first, second, gradients, strict=True):
            assert (torch.cat((one, two)) - gradient).norm() <= rounding * gradient.norm()


@pytest.mark.parametrize("logit", [math.nan, math.inf])
def test_a_logit_that_is_no_number_reaches_all_ranks(ranks, logit):
    for ((loss, (hidden, *_)),) in ranks(2).run(cut, [(torch.float32, logit)]):
        assert math.isnan(loss)
        assert not hidden.isfinite().any(dim=1)[1:5].any()


def held(job: Job, models):
    """Facts of each model: elements of its output layer, whether the embedding is tied, the loss's part."""
    found = []
    for model in models:
        engine = make_engine(job, recipe(model=model), zero(1) | TENSOR_2, token_bundle())
        head = engine.module.get_output_embeddings()
        words = engine.module.get_input_embeddings()
        part = get_vocabulary_part(head)
        logits = engine.module(input_ids=torch.arange(6)[None]).logits
        found.append((tuple(head.weight.shape), head.weight is words.weight, part.start, tuple(logits.shape)))
        engine.close()
    return found


def test_a_rank_holds_its_words_alone_and_a_tied_embedding_with_them(ranks):
    models = [LLAMA, LLAMA | {"extra": {"tie_word_embeddings": True}}]
    for rank, found in enumerate(ranks(2).run(held, models)):
        for is_tied, answer in enumerate(found):
            assert answer == ((129 - rank, 32), bool(is_tied), 129 * rank, (1, 6, 257))


def told_of(job: Job, model) -> str:
    engine = make_engine(job, recipe(model=model), zero(1) | TENSOR_2, token_bundle())
    batch = {key: value[None].repeat(2, 1) for key, value in token_bundle().train[0].items()}
    batch["input_ids"][1, 3] = 257
    with pytest.raises(DataError) as caught:
        engine.train_step([batch] * 4, CausalLM(), 1e-3, 0)
    engine.close()
    return str(caught.value)


def test_an_id_that_no_rank_has_is_told(ranks):
    for told in ranks(2).run(told_of, LLAMA | {"extra": {"tie_word_embeddings": True}}):
        assert told.startswith("'input_ids' has 257, but model.embed_tokens, VocabParallelEmbedding(")
        assert "has 257 rows: expected 0 to 256" in told
