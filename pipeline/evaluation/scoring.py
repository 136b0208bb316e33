"""Scores continuations of contexts, and generates texts, with the work divided over data-parallel ranks.

Every rank passes the same requests and gets all results. The requests are sorted by length and cut into
batches; the plan depends on nothing but the requests and the number of data-parallel ranks. Each of these
ranks gets the same number of batches, so that all ranks enter each forward together; a rank without requests
gets a filler. Scoring is an evaluation step with an objective that records log-probabilities, so it works
under every split and draws no random numbers.

Shapes: B rows, T tokens, N = B * T tokens, V vocabulary, C tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.data.batches import IGNORE_INDEX
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.engine.interface import Evaluator
from pipeline.errors import DataError, ModelError
from pipeline.models.embeddings import get_vocabulary_size
from pipeline.models.generation import (
    GenerationSettings,
    TextGenerator,
    TokenCallback,
    check_prompts,
    spread_settings,
)
from pipeline.objectives.interface import Batch, LossSum
from pipeline.objectives.model_call import BaseObjective, ModelCall, get_logits
from pipeline.objectives.preferences import get_sequence_group
from pipeline.planner.model import choose_block_rows

Request = tuple[Sequence[int], Sequence[int]]
"""The ids of a context and of its continuation."""


class EvaluatorAndGenerator(Evaluator, TextGenerator, Protocol):
    """Evaluates and generates: the engine of a training or of a trained model."""


class ScoredTokens(NamedTuple):
    """The scores of a continuation's tokens: natural logarithms of an fp32 softmax over the vocabulary."""

    logprobs: list[float]
    """Log-probability of each token."""
    top_ids: list[int]
    """Likeliest token at each position."""
    top_logprobs: list[float]
    """Log-probability of the likeliest token at each position."""
    is_greedy: bool
    """Whether each token of the continuation is the likeliest one."""

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation."""
        return math.fsum(self.logprobs)


class ContinuationScorer(BaseObjective):
    """Records the scores of labelled tokens. The loss that it returns is 0.

    A batch has `input_ids`, `shift_labels` and `targets`, each (B, T): the number under which the score of a
    label is recorded.

    Args:
        call: The call of the model.
        num_tokens: Number of all labels.
        device: Device of the scores.
    """

    unit = "tokens"

    def __init__(self, call: ModelCall, num_tokens: int, device: torch.device):
        super().__init__(call)
        self.scores = torch.zeros(3, num_tokens, dtype=torch.float64, device=device)
        """Log-probabilities of the labels that this rank has scored, those of the likeliest tokens instead,
        and these tokens' ids; 0 elsewhere."""
        self.has_logits = False
        """Whether this rank has got logits from the model; only the last pipeline stage does."""

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        return (batch["shift_labels"] != IGNORE_INDEX).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """Record the scores of the batch's labels.

        Raises:
            ModelError: The model returned other logits than (B, T, V).
        """
        labels_BT = batch["shift_labels"]
        logits_BTV = get_logits(self._call(model, batch))
        if logits_BTV.shape[:-1] != labels_BT.shape:
            raise ModelError(
                f"the model returned logits {tuple(logits_BTV.shape)} for tokens {tuple(labels_BT.shape)}; "
                "log-probabilities need a language model, with logits (samples, tokens, vocabulary)"
            )
        self.has_logits = True
        logits_NV = logits_BTV.flatten(0, 1)
        labels_N = labels_BT.flatten()
        numbers_N = batch["targets"].flatten()
        is_on_cpu = logits_NV.device.type == "cpu"
        labelled = (labels_N != IGNORE_INDEX).nonzero()[:, 0]
        for block in labelled.split(choose_block_rows(logits_NV.shape[-1], is_on_cpu)):
            logps_CV = logits_NV[block].float().log_softmax(-1)
            top_C1 = logps_CV.argmax(-1, keepdim=True)
            label_logps_C = logps_CV.gather(-1, labels_N[block, None])[:, 0]
            top_logps_C = logps_CV.gather(-1, top_C1)[:, 0]
            values = [label_logps_C, top_logps_C, top_C1[:, 0]]
            self.scores[:, numbers_N[block]] = torch.stack([each.double() for each in values])
        zero = torch.zeros((), device=logits_NV.device)
        return LossSum(zero, zero)


@tag_errors(Phase.EVALUATION)
def score_continuations(
    engine: Evaluator,
    call: ModelCall,
    job: Job,
    requests: Sequence[Request],
    *,
    max_tokens: int,
    tokens_per_batch: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[ScoredTokens]:
    """Return the scores of each request's continuation after its context, in order. Collective.

    A request that is too long loses the beginning of its context, as in lm-eval's HFLM: the model reads the
    last `max_tokens` of all tokens but the last one. Between steps of a training it changes nothing.

    Args:
        engine: Engine with a causal language model.
        call: The call of the model.
        job: Ranks of the job.
        requests: Ids of contexts and continuations, none of them empty; the same on every rank.
        max_tokens: Largest number of tokens that the model reads in a row.
        tokens_per_batch: Largest number of tokens of a batch on one rank, padding included. A batch has at
            least one row.
        on_progress: Called on every rank after each of its batches, with the number of requests that all
            ranks have scored and the number of all requests.

    Raises:
        DataError: A context or a continuation is empty, a continuation has more than `max_tokens`, or an id
            is outside of the vocabulary.
        ModelError: The model does not return logits of each token.
    """
    _check_requests(requests, max_tokens, get_vocabulary_size(engine.module))
    if not requests:
        return []
    ends = list(accumulate(len(continuation) for _, continuation in requests))
    numbers = [range(end - len(each), end) for (_, each), end in zip(requests, ends, strict=True)]
    scorer = ContinuationScorer(call, ends[-1], engine.device)
    # Sequence parallelism divides rows into equal parts.
    multiple = get_sequence_group(engine.module).size
    lengths = [min(len(context) + len(continuation) - 1, max_tokens) for context, continuation in requests]
    lengths = [math.ceil(length / multiple) * multiple for length in lengths]
    num_done = 0
    for batches in plan_rounds(lengths, engine.dp_world_size, lambda length: tokens_per_batch // length):
        job.progress.start_activity("evaluation")
        indices = batches[engine.dp_rank]
        rows = [([*requests[i][0], *requests[i][1]][-(max_tokens + 1) :], numbers[i]) for i in indices]
        batch = _build_batch(rows, lengths[indices[0]] if indices else multiple)
        with torch.compiler.set_stance("force_eager"):  # it would compile again for other shapes
            engine.eval_step(batch, scorer)
        if on_progress is not None:
            num_done += sum(map(len, batches))
            on_progress(num_done, len(requests))
    values = _sum_over_ranks(scorer, engine, job).tolist()
    results = []
    for (_, continuation), own in zip(requests, numbers, strict=True):
        logprobs, top_logprobs, top_ids = (each[own.start : own.stop] for each in values)
        ids = list(map(int, top_ids))
        results.append(ScoredTokens(logprobs, ids, top_logprobs, is_greedy=ids == list(continuation)))
    return results


def plan_rounds(
    lengths: Sequence[int], num_ranks: int, max_rows: Callable[[int], int]
) -> Iterator[list[list[int]]]:
    """Yield rounds of one batch for each of the ranks; a batch is a list of indices, and may be empty.

    The longest rows come first, so memory runs out at once or not at all. If there are too few rows for full
    batches on all ranks, each rank gets smaller ones.

    Args:
        lengths: Length of each row.
        num_ranks: Number of data-parallel ranks.
        max_rows: Function of a batch's greatest length that returns the largest number of its rows.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    share = math.ceil(len(order) / num_ranks)
    start = 0
    while start < len(order):
        batches = []
        for _ in range(num_ranks):
            length = lengths[order[min(start, len(order) - 1)]]
            batches.append(order[start : start + max(1, min(share, max_rows(length)))])
            start += len(batches[-1])
        yield batches


@tag_errors(Phase.GENERATION)
def generate_over_ranks(
    engine: EvaluatorAndGenerator,
    job: Job,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings | Sequence[GenerationSettings],
    *,
    rows_per_batch: int,
    make_callback: Callable[[Sequence[int]], TokenCallback] | None = None,
) -> list[list[int]]:
    """Return the ids that the model generates after each prompt, in order. Collective.

    Every rank passes the same arguments and gets all texts.

    Args:
        engine: Engine with a model that generates.
        job: Ranks of the job.
        prompts: Ids of the prompts, none of them empty.
        settings: Settings for all prompts, or for each one.
        rows_per_batch: Largest number of prompts that a rank continues together.
        make_callback: Function that returns the callback of a batch (see TextGenerator.generate), given the
            index in `prompts` of each of its rows.

    Raises:
        DataError: See TextGenerator.generate.
        ModelError: See TextGenerator.generate.
    """
    if not prompts:
        return []
    settings = spread_settings(settings, len(prompts))
    check_prompts(engine.module, prompts, settings)  # here, so that no rank raises alone
    texts: dict[int, list[int]] = {}
    for batches in plan_rounds(list(map(len, prompts)), engine.dp_world_size, lambda _: rows_per_batch):
        job.progress.start_activity("generation")
        indices = batches[engine.dp_rank]
        if indices:
            on_token = None if make_callback is None else make_callback(indices)
            own_prompts = [prompts[i] for i in indices]
            own_texts = engine.generate(own_prompts, [settings[i] for i in indices], on_token)
            texts |= zip(indices, own_texts, strict=True)
        else:  # other ranks may need this one's forwards
            engine.generate([[0]], replace(settings[0], max_new_tokens=1))
    found = {index: text for each in job.gather_object(texts) for index, text in each.items()}
    return [found[index] for index in range(len(prompts))]


def _check_requests(requests: Sequence[Request], max_tokens: int, vocabulary_size: int | None) -> None:
    """Check the requests, so that all ranks raise the same error and none waits for another.

    Raises:
        DataError: See score_continuations.
    """
    for index, (context, continuation) in enumerate(requests):
        for name, ids in (("context", context), ("continuation", continuation)):
            if not len(ids):
                raise DataError(f"requests[{index}] has an empty {name}; give it at least one token")
            if min(ids) < 0 or (vocabulary_size is not None and max(ids) >= vocabulary_size):
                expected = "0 or more" if vocabulary_size is None else f"0 to {vocabulary_size - 1}"
                raise DataError(
                    f"requests[{index}] has ids from {min(ids)} to {max(ids)} in its {name}, expected "
                    f"{expected}; encode it with the model's tokenizer"
                )
        if len(continuation) > max_tokens:
            raise DataError(
                f"requests[{index}] has a continuation of {len(continuation):,} tokens, but the model reads "
                f"{max_tokens:,} at a time; shorten it"
            )


def _build_batch(rows: Sequence[tuple[list[int], range]], length: int) -> dict[str, Tensor]:
    """Return a batch for ContinuationScorer, padded on the right; a row of padding if there are no rows.

    Args:
        rows: The tokens of each row, and the numbers of its labels, which are its last tokens.
        length: Number of columns.
    """
    ids_BT = torch.zeros(max(1, len(rows)), length, dtype=torch.int64)
    labels_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    numbers_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    for row, (tokens, numbers) in enumerate(rows):
        last = len(tokens) - 1  # the last token is only a label
        first = last - len(numbers)
        ids_BT[row, :last] = torch.tensor(tokens[:-1])
        labels_BT[row, first:last] = torch.tensor(tokens[first + 1 :])
        numbers_BT[row, first:last] = torch.tensor(numbers)
    return {"input_ids": ids_BT, "shift_labels": labels_BT, "targets": numbers_BT}


def _sum_over_ranks(scorer: ContinuationScorer, engine: Evaluator, job: Job) -> Tensor:
    """Return the scores of all tokens, each taken from one rank. Collective.

    Ranks of a sequence group have scored different tokens. All others with the same `dp_rank`, those of a
    tensor group, have equal scores, and only the first of them counts.
    """
    scoring_ranks = job.gather_object(engine.dp_rank if scorer.has_logits else None)
    is_copy = engine.dp_rank in scoring_ranks[: job.ranks.rank]
    if is_copy and get_sequence_group(engine.module).size == 1:
        scorer.scores.zero_()
    return job.all_reduce_sum(scorer.scores)
