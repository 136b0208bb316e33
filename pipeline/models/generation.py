"""Generation of token ids after prompts, by the `generate` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import DataError, ModelError
from pipeline.models.transformers_facts import is_transformers_generator


@dataclass(frozen=True)
class GenerationSettings:
    """Length of the generated text, and settings for the choice of each token; equal on all ranks.

    Raises:
        DataError: `max_new_tokens` is below 1, or `temperature` or `top_k` below 0.
    """

    max_new_tokens: int
    """Maximum number of tokens to generate after each prompt."""
    temperature: float = 0.0
    """Temperature of the draws; with 0 the likeliest token is chosen, and nothing is drawn."""
    top_k: int = 50
    """Number of likeliest tokens to draw from if `temperature` is above 0; 0: all tokens."""
    seed: int = 0
    """Seed of the draws. They do not change the random numbers of training."""
    gather: bool = True
    """Whether ZeRO 3 gathers all parameters once, if they fit into memory.

    Otherwise all ranks gather them layer by layer, once for every token.
    """

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise DataError(f"max_new_tokens is {self.max_new_tokens}; give 1 or more")
        if self.temperature < 0 or self.top_k < 0:
            raise DataError(
                f"temperature is {self.temperature} and top_k is {self.top_k}; give 0 or more for both"
            )


class TextGenerator(Protocol):
    """Generates text. Collective: all ranks enter `generate` together."""

    @property
    def module(self) -> nn.Module:
        """The model; it can generate if it has a method `generate`."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> list[list[int]]:
        """Return the ids that the model generates after each prompt, up to and including the first end token.

        The state of training does not change: training mode, gradients and random numbers.

        Args:
            prompts: One or more prompts, each of one id or more. Ranks with equal `dp_rank` pass equal
                prompts.
            settings: Settings for the choice of each token.

        Raises:
            DataError: There is no prompt, an empty one, or an id outside of the model's vocabulary.
            ModelError: The model cannot generate, or a prompt and `max_new_tokens` exceed its positions.
        """
        ...


@tag_errors(Phase.GENERATION)
@torch.no_grad()
def generate(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    device: torch.device,
    *,
    is_forward_collective: bool = False,
    unify_scores: Callable[[Tensor], Tensor] | None = None,
) -> list[list[int]]:
    """Return generated ids as TextGenerator.generate does, for a module with logits of the whole vocabulary.

    Args:
        module: The model.
        prompts: See TextGenerator.generate.
        settings: Settings for the choice of each token.
        device: The device of the model.
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
    _check_prompts(module, prompts, settings)
    ids_BT, mask_BT = _pad_left(prompts, device)
    end_ids, pad_id = _get_end_and_pad_ids(module)
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": settings.temperature > 0,
    }
    if settings.temperature > 0:
        options |= {"temperature": settings.temperature, "top_k": settings.top_k}
    if is_transformers_generator(module):
        options["synced_gpus"] = is_forward_collective
    if unify_scores is not None:
        options["logits_processor"] = [lambda _, scores_BV: unify_scores(scores_BV)]
    was_training = module.training
    module.eval()
    try:
        # torch.compile would compile again for every length of the text.
        with _seed_generators(settings.seed, device), torch.compiler.set_stance("force_eager"):
            output = module.generate(  # type: ignore[operator]
                input_ids=ids_BT, attention_mask=mask_BT, use_cache=True, pad_token_id=pad_id, **options
            )
    finally:
        module.train(was_training)
    return [_cut_after_end(row, end_ids) for row in output[:, ids_BT.shape[1] :].tolist()]


def get_max_positions(module: nn.Module) -> int | None:
    """Return the largest number of tokens in a row, from the model's config; `None`: no limit is known."""
    positions: int | None = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return positions


def _check_prompts(module: nn.Module, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> None:
    """Check the prompts against the model's vocabulary and positions.

    Raises:
        DataError: See TextGenerator.generate.
        ModelError: A prompt and `max_new_tokens` exceed the model's positions.
    """
    if not prompts:
        raise DataError("prompts is empty; give every rank at least one prompt")
    vocabulary_size = getattr(getattr(module, "config", None), "vocab_size", None)
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"prompts[{index}] is empty; give it at least one token")
        is_too_large = vocabulary_size is not None and max(prompt) >= vocabulary_size
        if min(prompt) < 0 or is_too_large:
            expected = "0 or more" if vocabulary_size is None else f"0 to {vocabulary_size - 1}"
            raise DataError(
                f"prompts[{index}] has ids from {min(prompt)} to {max(prompt)}, expected {expected}; encode "
                "it with the model's tokenizer"
            )
    length = max(map(len, prompts))
    positions = get_max_positions(module)
    if positions is not None and length + settings.max_new_tokens > positions:
        raise ModelError(
            f"a prompt has {length:,} tokens and max_new_tokens is {settings.max_new_tokens:,}, but the "
            f"model has {positions:,} positions; shorten the prompt, or lower max_new_tokens"
        )


def _pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids and the attention mask (B, T) of prompts that are padded on the left, on the device."""
    rows = [torch.tensor(list(prompt), dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids.to(device), mask.to(device)


def _get_end_and_pad_ids(module: nn.Module) -> tuple[set[int], int]:
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


@contextmanager
def _seed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of this device inside the context, and restore them afterwards."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
