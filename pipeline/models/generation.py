"""Generation of token ids after prompts, by transformers' own `generate`."""

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
    """Settings for the choice of each next token; equal on all ranks.

    Raises:
        DataError: `max_new_tokens` is below 1, or `temperature` or `top_k` below 0.
    """

    max_new_tokens: int
    temperature: float = 0.0
    """Temperature of the draws; 0 always takes the likeliest token."""
    top_k: int = 50
    """Number of likeliest tokens to draw from if there is a temperature; 0: all tokens."""
    seed: int = 0
    """Seed of the draws, which leave the random numbers of training as they are."""
    gather: bool = True
    """Whether ZeRO 3 gathers all parameters once, where memory allows it.

    Otherwise all ranks gather them layer by layer, for every token again.
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
        """Return the ids that the model generates after each prompt, up to and including its end token.

        The state of training does not change: mode, gradients and random numbers.

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
    in_step: bool = False,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> list[list[int]]:
    """Return generated ids as TextGenerator.generate does, for a module with whole logits on this rank.

    Args:
        module: The model.
        prompts: See TextGenerator.generate.
        settings: Settings for the choice of each token.
        device: The device of the model.
        in_step: Whether a forward is collective: a rank that has finished continues until all have.
        agree: Returns equal scores (B, V) on all ranks that compute parts of one model; `None`: not needed.

    Raises:
        DataError: See TextGenerator.generate.
        ModelError: See TextGenerator.generate.
    """
    if not hasattr(module, "generate"):
        raise ModelError(
            f"a {type(module).__name__} has no method `generate`; only causal language models generate text"
        )
    _refuse_misfit(module, prompts, settings)
    ids_BT, mask_BT = _pad_left(prompts, device)
    ends, pad = _get_end_ids(module)
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": settings.temperature > 0,
    }
    if settings.temperature > 0:
        options |= {"temperature": settings.temperature, "top_k": settings.top_k}
    if is_transformers_generator(module):
        options["synced_gpus"] = in_step
    if agree is not None:
        options["logits_processor"] = [lambda _, scores_BV: agree(scores_BV)]
    was_training = module.training
    module.eval()
    try:
        # torch.compile would compile again for every length of the text.
        with _seed_generators(settings.seed, device), torch.compiler.set_stance("force_eager"):
            output = module.generate(  # type: ignore[operator]
                input_ids=ids_BT, attention_mask=mask_BT, use_cache=True, pad_token_id=pad, **options
            )
    finally:
        module.train(was_training)
    return [_cut_at_end(row, ends) for row in output[:, ids_BT.shape[1] :].tolist()]


def get_max_positions(module: nn.Module) -> int | None:
    """Return the number of tokens that the model has positions for; `None`: any number."""
    positions: int | None = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return positions


def _refuse_misfit(module: nn.Module, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> None:
    if not prompts:
        raise DataError("prompts is empty; give every rank at least one prompt")
    words = getattr(getattr(module, "config", None), "vocab_size", None)
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"prompts[{index}] is empty; give it at least one token")
        if min(prompt) < 0 or (words is not None and max(prompt) >= words):
            expected = "0 or more" if words is None else f"0 to {words - 1}"
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
    """Return ids and mask (B, T), on the device."""
    rows = [torch.tensor(list(prompt), dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids.to(device), mask.to(device)


def _get_end_ids(module: nn.Module) -> tuple[set[int], int]:
    """Return the ids that end a text, and the id that pads a batch after an end."""
    config = getattr(module, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = []
    elif isinstance(ends, int):
        ends = [ends]
    return set(ends), ends[0] if ends else 0


def _cut_at_end(row: list[int], ends: set[int]) -> list[int]:
    length = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
    return row[:length]


@contextmanager
def _seed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of this device inside the context, and restore its generators afterwards."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would set every GPU's
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
