"""Scores continuations of contexts, and generates texts, with the work divided over data-parallel ranks.

Every rank passes the same requests and gets all results. The requests are sorted by length and cut into
batches; the plan depends on nothing but the requests and the number of data-parallel ranks. Each of these
ranks gets the same number of batches, so that all ranks enter each forward together; a rank without requests
gets a filler. Scoring is an evaluation step with an objective that records log-probabilities, so it works
under every split and draws no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.engine.interface import Evaluator
from pipeline.errors import DataError
from pipeline.models.embeddings import get_vocabulary_size
from pipeline.models.generation import (
    GenerationSettings,
    TextGenerator,
    TokenCallback,
    check_ids,
    check_prompts,
    spread_settings,
)
from pipeline.objectives.continuations import ContinuationScorer, build_scoring_batch
from pipeline.objectives.model_call import ModelCall
from pipeline.objectives.preferences import get_sequence_group

MAX_LOGITS = 2**29
"""Largest number of logits of a batch, unless a single row has more. A run's own loss may need none."""
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
    last `max_tokens` of all tokens but the last one. Between two steps, scoring does not change a training.

    Args:
        engine: Engine with a causal language model.
        call: The call of the model.
        job: Ranks of the job.
        requests: Ids of contexts and continuations, none of them empty; the same on every rank.
        max_tokens: Largest number of tokens that the model reads in a row.
        tokens_per_batch: Largest number of tokens of a batch on one rank, padding included, if MAX_LOGITS
            allows as many. A batch has at least one row.
        on_progress: Called on every rank after each of its batches, with the number of requests that all
            ranks have scored and the number of all requests.

    Raises:
        DataError: A context or a continuation is empty, a continuation has more than `max_tokens`, or an id
            is outside of the vocabulary.
        ModelError: The model does not return logits of each token.
    """
    for index, (context, continuation) in enumerate(requests):  # on all ranks, so that none raises alone
        check_ids(f"the context of requests[{index}]", context, engine.module)
        check_ids(f"the continuation of requests[{index}]", continuation, engine.module)
        if len(continuation) > max_tokens:
            raise DataError(
                f"the continuation of requests[{index}] has {len(continuation):,} tokens, but the model "
                f"reads {max_tokens:,} at a time; shorten it"
            )
    if not requests:
        return []
    ends = list(accumulate(len(continuation) for _, continuation in requests))
    numbers = [range(end - len(each), end) for (_, each), end in zip(requests, ends, strict=True)]
    scorer = ContinuationScorer(call, ends[-1], engine.device)
    # Sequence parallelism divides rows into equal parts.
    multiple = get_sequence_group(engine.module).size
    lengths = [min(len(context) + len(continuation) - 1, max_tokens) for context, continuation in requests]
    lengths = [math.ceil(length / multiple) * multiple for length in lengths]
    tokens_per_batch = min(tokens_per_batch, MAX_LOGITS // (get_vocabulary_size(engine.module) or 1))
    num_done = 0
    for batches in plan_rounds(lengths, engine.dp_world_size, lambda length: tokens_per_batch // length):
        job.progress.start_activity("evaluation")
        indices = batches[engine.dp_rank]
        rows = [([*requests[i][0], *requests[i][1]][-(max_tokens + 1) :], numbers[i]) for i in indices]
        batch = build_scoring_batch(rows, lengths[indices[0]] if indices else multiple, max_tokens)
        with torch.compiler.set_stance("force_eager"):  # other shapes would be compiled again
            engine.eval_step(batch, scorer)
        num_done += sum(map(len, batches))
        if on_progress is not None:
            on_progress(num_done, len(requests))
    *sums, num_ranks = job.all_reduce_sum(scorer.scores)  # all ranks of a tensor group have scored a token
    logprobs, top_logprobs, top_ids = ((each / num_ranks).tolist() for each in sums)
    results = []
    for (_, continuation), columns in zip(requests, numbers, strict=True):
        part = slice(columns.start, columns.stop)
        ids = [int(each) for each in top_ids[part]]
        is_greedy = ids == list(continuation)
        results.append(ScoredTokens(logprobs[part], ids, top_logprobs[part], is_greedy))
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
    on_progress: Callable[[int, int], None] | None = None,
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
        on_progress: Called on every rank after each of its batches, with the number of texts that all ranks
            have generated and the number of all texts.

    Raises:
        DataError: See TextGenerator.generate.
        ModelError: See TextGenerator.generate.
    """
    if not prompts:
        return []
    settings = spread_settings(settings, len(prompts))
    check_prompts(engine.module, prompts, settings)  # here, so that no rank raises alone
    texts: dict[int, list[int]] = {}
    num_done = 0
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
        if on_progress is not None:
            num_done += sum(map(len, batches))
            on_progress(num_done, len(prompts))
    all_texts = {index: text for each in job.gather_object(texts) for index, text in each.items()}
    return [all_texts[index] for index in range(len(prompts))]
