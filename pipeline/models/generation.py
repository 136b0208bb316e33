"""Generation of token ids after prompts, by the `generate` of transformers.

The loop is transformers': key-value cache, padding on the left, and forwards that ranks enter together. This
module chooses each token, in a logits processor. It uses no generator of random numbers: a hash decides each
draw. So a text depends on its prompt and its settings only, and not on rank, batch, padding or split.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import DataError, ModelError
from pipeline.models.embeddings import get_vocabulary_size
from pipeline.models.transformers_facts import is_transformers_generator

LOWEST_TEMPERATURE = 1e-6
"""Lowest temperature above 0; fp32 logits divided by a smaller one could overflow."""
HIGHEST_TEMPERATURE = 1e6
"""Highest temperature."""
MODEL_SETTINGS = (
    "bos_token_id",
    "eos_token_id",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
)
"""Settings of a model's own generation_config that `generate` applies."""


@dataclass(frozen=True)
class GenerationSettings:
    """Length of the text generated after one prompt, and settings for the choice of each token.

    Raises:
        DataError: A value is out of its range.
    """

    max_new_tokens: int
    """Maximum number of tokens to generate after the prompt."""
    temperature: float = 0.0
    """Temperature of the draws; with 0 the likeliest token is chosen, and nothing is drawn."""
    top_k: int = 0
    """Number of likeliest tokens to draw from if `temperature` is above 0; 0: all tokens."""
    top_p: float = 1.0
    """Probability that the likeliest tokens have together, from which one is drawn; 1: all tokens."""
    min_p: float = 0.0
    """Lowest probability of a token that may be drawn, as a share of the likeliest token's; 0: all tokens."""
    seed: int = 0
    """Seed of the draws."""
    sample: int = 0
    """Number of this text among several after the same prompt with the same seed."""
    num_logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities TokenCallback gets, beside the chosen token's.

    `None`: it gets no log-probabilities.
    """
    gather: bool = True
    """Whether ZeRO 3 gathers all parameters once, if they fit into memory; equal for all prompts and ranks.

    Otherwise all ranks gather them layer by layer, once for every token.
    """

    def __post_init__(self) -> None:
        temperature = self.temperature
        is_drawable = LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE
        for name, is_allowed, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", temperature == 0 or is_drawable, "0, or a number from 0.000001 to 1000000"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, and 1 at most"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("sample", self.sample >= 0, "0 or more"),
            ("num_logprobs", self.num_logprobs is None or self.num_logprobs >= 0, "0 or more, or None"),
        ):
            if not is_allowed:
                raise DataError(f"{name} is {getattr(self, name)}; give {allowed}")


class GeneratedToken(NamedTuple):
    """A token that was generated, with natural logarithms of probabilities if the settings ask for them.

    The probabilities are the softmax of the model's logits, before temperature and all other settings.
    """

    id: int
    """Id of the token."""
    logprob: float | None
    """Log-probability of the token; `None` if `num_logprobs` is `None`."""
    top: tuple[tuple[int, float], ...]
    """Ids and log-probabilities of the `num_logprobs` likeliest tokens, the likeliest first."""


TokenCallback = Callable[[int, GeneratedToken], bool]
"""Function of a prompt's index and each token generated after it that returns whether its text ends here.

It is called for end tokens, too. Ranks with equal prompts call it with equal tokens, and it must decide alike
on all of them.
"""


class TextGenerator(Protocol):
    """Generates text. Collective: all ranks enter `generate` together."""

    @property
    def module(self) -> nn.Module:
        """The model; it can generate if it has a method `generate`."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | Sequence[GenerationSettings],
        on_token: TokenCallback | None = None,
    ) -> list[list[int]]:
        """Return the ids that the model generates after each prompt, up to and including the first end token.

        A text depends on its prompt and its settings, but not on the other prompts. The state of training
        does not change: training mode, gradients and random numbers.

        Of the model's own generation_config, only MODEL_SETTINGS are applied: its end tokens, and what it
        forbids or makes less likely. Its temperature, top_k and the like are ignored, as are beam search,
        lengths and forced tokens.

        Args:
            prompts: One or more prompts, each of one id or more. Ranks with equal `dp_rank` pass equal
                prompts.
            settings: Settings for all prompts, or one for each.
            on_token: Called with each token; it may end a text early. See TokenCallback.

        Raises:
            DataError: There is no prompt, an empty one, or an id outside of the model's vocabulary. Or the
                numbers of prompts and settings differ.
            ModelError: The model cannot generate, or a prompt and `max_new_tokens` exceed its positions.
        """
        ...


def spread_settings(
    settings: GenerationSettings | Sequence[GenerationSettings], num_prompts: int
) -> list[GenerationSettings]:
    """Return the settings of each prompt.

    Raises:
        DataError: The numbers of prompts and settings differ.
    """
    if isinstance(settings, GenerationSettings):
        return [settings] * num_prompts
    if len(settings) != num_prompts:
        raise DataError(
            f"there are {num_prompts} prompts and {len(settings)} settings; give one for each prompt"
        )
    return list(settings)


def number_samples(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return `GenerationSettings.sample` of each prompt: the number of equal prompts before it."""
    counts: Counter[tuple[int, ...]] = Counter()
    numbers = []
    for prompt in prompts:
        key = tuple(prompt)
        numbers.append(counts[key])
        counts[key] += 1
    return numbers


@tag_errors(Phase.GENERATION)
@torch.no_grad()
def generate(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings | Sequence[GenerationSettings],
    device: torch.device,
    on_token: TokenCallback | None = None,
    *,
    is_forward_collective: bool = False,
    unify_scores: Callable[[Tensor], Tensor] | None = None,
) -> list[list[int]]:
    """Return generated ids as TextGenerator.generate does, for a module with logits of the whole vocabulary.

    Args:
        module: The model. Its method `generate` takes the arguments of transformers' `generate`.
        prompts: See TextGenerator.generate.
        settings: See TextGenerator.generate.
        device: The device of the model.
        on_token: See TextGenerator.generate.
        is_forward_collective: Whether all ranks must enter each forward together. A rank that has finished
            then runs forwards until all have finished.
        unify_scores: Function of the scores (B, V) of the next token that returns equal scores on all ranks
            of a tensor-parallel group; `None`: not needed.

    Raises:
        DataError: See TextGenerator.generate.
        ModelError: See TextGenerator.generate.
    """
    if not hasattr(module, "generate"):
        raise ModelError(
            f"a {type(module).__name__} has no method `generate`; only causal language models generate text"
        )
    settings = spread_settings(settings, len(prompts))
    check_prompts(module, prompts, settings)
    ids_BT, mask_BT = _pad_left(prompts, device)
    prompt_length = ids_BT.shape[1]
    end_ids, pad_id = get_end_and_pad_ids(module)
    options: dict[str, Any] = {"max_new_tokens": max(s.max_new_tokens for s in settings), "do_sample": False}
    if is_transformers_generator(module):
        options["synced_gpus"] = is_forward_collective
    processors: list[Callable[[Tensor, Tensor], Tensor]] = []
    if unify_scores is not None:
        processors.append(lambda _, scores_BV: unify_scores(scores_BV))
    recorder = None
    if on_token is not None and any(s.num_logprobs is not None for s in settings):
        recorder = LogprobRecorder(processors, is_forward_collective)
        processors = []
        options["custom_generate"] = recorder.run_loop
    if any(s.temperature > 0 for s in settings):
        processors.append(TokenChooser(prompts, settings, device))
    if processors:
        options["logits_processor"] = processors
    watcher = TokenWatcher(
        settings, prompt_length, end_ids, on_token=on_token, recorder=recorder, device=device
    )
    if watcher.is_needed:
        options["stopping_criteria"] = [watcher]
    # torch.compile would compile again for every length of the text.
    with _prepare_module(module), torch.compiler.set_stance("force_eager"):
        output = module.generate(  # type: ignore[operator]
            input_ids=ids_BT, attention_mask=mask_BT, use_cache=True, pad_token_id=pad_id, **options
        )
    rows = output[:, prompt_length:].tolist()
    return [_cut_after_end(row[:length], end_ids) for row, length in zip(rows, watcher.lengths, strict=True)]


class TokenChooser:
    """Draws the next token of each row with a temperature, as a logits processor of transformers.

    The drawn token gets the only finite score of its row. Rows without a temperature do not change.

    Args:
        prompts: Prompts of the rows.
        settings: Settings of the rows.
        device: Device of the scores.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[GenerationSettings], device: torch.device
    ) -> None:
        rows = [row for row, of_row in enumerate(settings) if of_row.temperature > 0]
        of_rows = [settings[row] for row in rows]

        def make_column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        self._prompt_length = max(map(len, prompts))
        self._rows = torch.tensor(rows, device=device)
        self._temperature = make_column([s.temperature for s in of_rows], torch.float32)
        self._top_k = make_column([s.top_k for s in of_rows], torch.long)
        self._largest_top_k = max(s.top_k for s in of_rows)
        # A row that draws from all tokens loses none, not even those whose probability rounds to 0.
        self._cut_share = make_column([1 - s.top_p if s.top_p < 1 else -1.0 for s in of_rows], torch.float32)
        self._has_top_p = any(s.top_p < 1 for s in of_rows)
        self._min_p = make_column([s.min_p for s in of_rows], torch.float32)
        self._has_min_p = any(s.min_p > 0 for s in of_rows)
        length = max(s.max_new_tokens for s in of_rows)
        numbers = [compute_uniforms(prompts[row], settings[row], length) for row in rows]
        self._numbers = torch.tensor(np.array(numbers), dtype=torch.float64, device=device)

    def __call__(self, ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
        """Return the scores with the drawn tokens. Overwrites `scores_BV`."""
        last = self._numbers.shape[1] - 1  # behind it, every drawn row has ended
        position = min(ids_BT.shape[1] - self._prompt_length, last)
        drawn_ids = draw(self.limit(scores_BV[self._rows]), self._numbers[:, position, None])
        scores_BV[self._rows] = -math.inf
        scores_BV[self._rows, drawn_ids] = 0.0
        return scores_BV

    def limit(self, scores_RV: Tensor) -> Tensor:
        """Return the scores of the drawn rows divided by their temperatures, -inf for tokens not to draw.

        Does for all rows what transformers' warpers do for one, in their order: temperature, top_k, top_p,
        min_p.
        """
        scores_RV = scores_RV / self._temperature
        size = scores_RV.shape[1]
        if self._largest_top_k:
            likeliest = scores_RV.topk(min(self._largest_top_k, size)).values
            last = likeliest.gather(1, self._top_k.clamp(1, size) - 1)
            last = last.masked_fill(self._top_k == 0, -math.inf)
            scores_RV = scores_RV.masked_fill(scores_RV < last, -math.inf)
        if self._has_top_p:
            ascending, order = scores_RV.sort()
            is_cut = ascending.softmax(1).cumsum(1) <= self._cut_share
            is_cut[:, -1] = False
            scores_RV = scores_RV.masked_fill(is_cut.scatter(1, order, is_cut), -math.inf)
        if self._has_min_p:
            probabilities = scores_RV.softmax(1)
            lowest = self._min_p * probabilities.amax(1, keepdim=True)
            scores_RV = scores_RV.masked_fill(probabilities < lowest, -math.inf)
        return scores_RV


def draw(scores_RV: Tensor, numbers_R1: Tensor) -> Tensor:
    """Return the ids (R) of the tokens whose intervals contain the numbers.

    The interval of a token is as long as its probability. The intervals follow each other from 0 to 1, in the
    order of the vocabulary. They are computed in fp64.

    Args:
        scores_RV: Scores, whose softmax are the probabilities.
        numbers_R1: Numbers from 0 to below 1, fp64.
    """
    probabilities = scores_RV.double().softmax(1)
    ends = probabilities.cumsum(1)
    first_id = (ends <= numbers_R1).sum(1, keepdim=True)
    # By rounding, a number may be above the last end, and a token of probability 0 may have an interval.
    ids = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    is_possible = probabilities > 0
    next_possible = torch.where(is_possible & (ids >= first_id), ids, len(ids)).amin(1)
    last_possible = torch.where(is_possible, ids, 0).amax(1)
    return torch.minimum(next_possible, last_possible)


def compute_uniforms(prompt: Sequence[int], settings: GenerationSettings, length: int) -> list[float]:
    """Return the uniform numbers in [0, 1) that draw the first `length` tokens after a prompt."""
    prompt_hash = xxhash.xxh3_128_hexdigest(np.asarray(prompt, dtype=np.int64).tobytes())
    key = f"{settings.seed} {settings.sample} {prompt_hash}"
    hashes = [xxhash.xxh3_64_intdigest(f"{key} {position}".encode()) for position in range(length)]
    return [(value >> 11) * 2.0**-53 for value in hashes]  # a fp64 number has 53 bits


class LogprobRecorder:
    """Stores the log-probabilities of the next token, from the model's logits.

    transformers applies the model's own settings before any other logits processor. Therefore this object
    enters the loop through the argument `custom_generate`.

    Args:
        processors: Logits processors to apply first.
        is_forward_collective: See generate.
    """

    def __init__(
        self, processors: Sequence[Callable[[Tensor, Tensor], Tensor]], is_forward_collective: bool
    ) -> None:
        self.logprobs_BV = torch.empty(0)
        """Log-probabilities of the last step."""
        self._processors = processors
        self._is_forward_collective = is_forward_collective

    def run_loop(self, model: Any, input_ids: Tensor, logits_processor: Any, **options: Any) -> Tensor:
        """Run transformers' loop with this recorder before all other logits processors."""
        processors = type(logits_processor)([*self._processors, self._record, *logits_processor])
        options["synced_gpus"] = self._is_forward_collective  # transformers passes it to its own loops only
        ids: Tensor = type(model)._sample(model, input_ids, logits_processor=processors, **options)
        return ids

    def _record(self, ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
        self.logprobs_BV = scores_BV.log_softmax(1)
        return scores_BV


class TokenWatcher:
    """Ends rows at their length or where a callback says so, as a stopping criterion of transformers.

    Args:
        settings: Settings of the rows.
        prompt_length: Number of ids before the first generated one, with padding.
        end_ids: Ids that end a text.
        on_token: See TextGenerator.generate.
        recorder: Source of log-probabilities; `None` if no row wants any.
        device: Device of the ids.
    """

    def __init__(
        self,
        settings: Sequence[GenerationSettings],
        prompt_length: int,
        end_ids: Collection[int],
        on_token: TokenCallback | None,
        recorder: LogprobRecorder | None,
        device: torch.device,
    ) -> None:
        self.lengths = [s.max_new_tokens for s in settings]
        """Largest number of generated tokens of each row that belong to its text."""
        self._settings = settings
        self._prompt_length = prompt_length
        self._end_ids = end_ids
        self._on_token = on_token
        self._recorder = recorder
        self._has_ended = [False] * len(settings)
        self._lengths_B = torch.tensor(self.lengths, device=device)

    @property
    def is_needed(self) -> bool:
        """Return whether rows have different lengths or a callback."""
        return self._on_token is not None or len(set(self.lengths)) > 1

    def __call__(self, ids_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return which rows end with their last token (B)."""
        length = ids_BT.shape[1] - self._prompt_length
        if self._on_token is not None and self._report(ids_BT[:, -1:], length):
            self._lengths_B = torch.tensor(self.lengths, device=ids_BT.device)
        return self._lengths_B <= length

    def _report(self, ids_B1: Tensor, length: int) -> bool:
        """Call the callback with the last token of each row that has not ended.

        Returns:
            Whether the callback ended a row.
        """
        assert self._on_token is not None
        num_top = 0
        columns = [ids_B1.double()]  # one copy to the host for everything
        if self._recorder is not None:
            logprobs_BV = self._recorder.logprobs_BV
            num_top = min(max(s.num_logprobs or 0 for s in self._settings), logprobs_BV.shape[1])
            top = logprobs_BV.topk(num_top)
            columns += [logprobs_BV.gather(1, ids_B1).double(), top.indices.double(), top.values.double()]
        has_ended_one = False
        for row, (number, *values) in enumerate(torch.cat(columns, 1).tolist()):
            if self._has_ended[row]:
                continue
            token = GeneratedToken(int(number), None, ())
            num_logprobs = self._settings[row].num_logprobs
            if num_logprobs is not None:
                likeliest = zip(map(int, values[1 : 1 + num_top]), values[1 + num_top :], strict=True)
                token = token._replace(logprob=values[0], top=tuple(likeliest)[:num_logprobs])
            if self._on_token(row, token):
                self.lengths[row] = length
                has_ended_one = True
            self._has_ended[row] = length >= self.lengths[row] or token.id in self._end_ids
        return has_ended_one


@contextmanager
def _prepare_module(module: nn.Module) -> Iterator[None]:
    """Prepare a model to generate inside the context, and restore it afterwards.

    Rows and ranks that have ended take part in the others' forwards, and get positions that the model may not
    have; these are replaced by its last one.
    """
    was_training = module.training
    model_settings = getattr(module, "generation_config", None)
    num_positions = get_max_positions(module)

    def limit_positions(_: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = options.get("position_ids")
        if positions is not None and num_positions is not None:
            options = options | {"position_ids": positions.clamp(max=num_positions - 1)}
        return arguments, options

    hook = module.register_forward_pre_hook(limit_positions, with_kwargs=True)
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns if padding and text together exceed the model's positions
    if model_settings is not None:
        applied = {name: getattr(model_settings, name, None) for name in MODEL_SETTINGS}
        applied = {name: value for name, value in applied.items() if value is not None}
        module.generation_config = type(model_settings)(**applied)
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
        if model_settings is not None:
            module.generation_config = model_settings
        logger.setLevel(level)
        hook.remove()


def get_max_positions(module: nn.Module) -> int | None:
    """Return the largest number of tokens in a row, from the model's config; `None`: no limit is known."""
    positions: int | None = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return positions


def check_prompts(
    module: nn.Module, prompts: Sequence[Sequence[int]], settings: Sequence[GenerationSettings]
) -> None:
    """Check the prompts against the model's vocabulary and positions.

    Raises:
        DataError: See TextGenerator.generate.
        ModelError: A prompt and `max_new_tokens` exceed the model's positions.
    """
    if not prompts:
        raise DataError("prompts is empty; give every rank at least one prompt")
    for index, prompt in enumerate(prompts):
        check_ids(f"prompts[{index}]", prompt, module)
    positions = get_max_positions(module)
    for prompt, of_prompt in zip(prompts, settings, strict=True):
        if positions is not None and len(prompt) + of_prompt.max_new_tokens > positions:
            raise ModelError(
                f"a prompt has {len(prompt):,} tokens and max_new_tokens is {of_prompt.max_new_tokens:,}, "
                f"but the model has {positions:,} positions; shorten the prompt, or lower max_new_tokens"
            )


def check_ids(name: str, ids: Sequence[int], module: nn.Module) -> None:
    """Raise a DataError if there are no ids, or one that is outside of the model's vocabulary.

    Args:
        name: Words for the ids in the message.
        ids: Ids of a text.
        module: Model that reads them.
    """
    if not len(ids):
        raise DataError(f"{name} is empty; give it at least one token")
    vocabulary_size = get_vocabulary_size(module)
    if min(ids) < 0 or (vocabulary_size is not None and max(ids) >= vocabulary_size):
        expected = "0 or more" if vocabulary_size is None else f"0 to {vocabulary_size - 1}"
        raise DataError(
            f"{name} has ids from {min(ids)} to {max(ids)}, expected {expected}; encode it with the model's "
            "tokenizer"
        )


def _pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids and the attention mask (B, T) of prompts that are padded on the left, on the device."""
    rows = [torch.tensor(list(prompt), dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids.to(device), mask.to(device)


def get_end_and_pad_ids(module: nn.Module) -> tuple[set[int], int]:
    """Return the ids that end a text, and the id that fills a row after its end."""
    config = getattr(module, "generation_config", None)
    end_ids = getattr(config, "eos_token_id", None)
    if end_ids is None:
        end_ids = []
    elif isinstance(end_ids, int):
        end_ids = [end_ids]
    pad_id = end_ids[0] if end_ids else 0
    return set(end_ids), pad_id


def _cut_after_end(row: list[int], end_ids: set[int]) -> list[int]:
    """Return the row up to and including its first end token."""
    for index, token in enumerate(row):
        if token in end_ids:
            return row[: index + 1]
    return row
