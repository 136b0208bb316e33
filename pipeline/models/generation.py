"""Token ids that a language model writes after prompts, by transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipeline.distributed.progress import Phase, phase
from pipeline.errors import DataError, ModelError
from pipeline.models.transformers_facts import is_transformers_generator


@dataclass(frozen=True)
class GenerationSettings:
    """How each next token is chosen. All ranks give the same ones."""

    max_new_tokens: int
    temperature: float = 0.0
    """0: always the likeliest token."""
    top_k: int = 50
    """With a temperature: drawn from this many of the likeliest tokens; 0: from all."""
    seed: int = 0
    """Of the draws. The random numbers of training stay as they are."""
    gather: bool = True
    """ZeRO 3: all parameters are gathered once where memory allows; False, or where it does not: for every
    token again, layer by layer, by all ranks in step."""

    def __post_init__(self) -> None:
        """
        Raises:
            DataError: nothing would be written, or the temperature is below zero.
        """
        if self.max_new_tokens < 1:
            raise DataError(f"max_new_tokens is {self.max_new_tokens}; give 1 or more")
        if self.temperature < 0 or self.top_k < 0:
            raise DataError(f"temperature {self.temperature}, top_k {self.top_k}: give 0 or more")


class TextGenerator(Protocol):
    """What writes text. Collective: all ranks enter `generate` together."""

    @property
    def module(self) -> nn.Module:
        """It can write where this has a `generate`."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> list[list[int]]:
        """What the model writes after each prompt, without the prompt, up to its end token and with it.

        Leaves training as it is: mode, gradients, random numbers.

        Args:
            prompts: One or more, each of one id or more. Ranks with the same `dp_rank` give the same ones;
                others may give others.

        Raises:
            DataError: no prompts, an empty one, or an id that the model has not.
            ModelError: the model cannot generate; or a prompt and `max_new_tokens` exceed its positions.
        """
        ...


@phase(Phase.GENERATION)
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
    """See TextGenerator.generate, for a module that gives whole logits on this rank.

    Args:
        in_step: A forward is collective: a rank that is done goes on until all are.
        agree: Gives the ranks that compute one model's parts the same scores (B, V).
    """
    if not hasattr(module, "generate"):
        raise ModelError(f"a {type(module).__name__} has no `generate` to write text with")
    _check(module, prompts, settings)
    ids_BT, mask_BT = _left_padded(prompts, device)
    ends, pad = _end_ids(module)
    how: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "do_sample": settings.temperature > 0}
    if settings.temperature > 0:
        how |= {"temperature": settings.temperature, "top_k": settings.top_k}
    if is_transformers_generator(module):
        how["synced_gpus"] = in_step
    if agree is not None:
        how["logits_processor"] = [lambda _, scores_BV: agree(scores_BV)]
    was_training = module.training
    module.eval()
    try:
        # A prompt's lengths would each be compiled for.
        with _seeded(settings.seed, device), torch.compiler.set_stance("force_eager"):
            output = module.generate(  # type: ignore[operator]
                input_ids=ids_BT, attention_mask=mask_BT, use_cache=True, pad_token_id=pad, **how
            )
    finally:
        module.train(was_training)
    return [_until_end(row, ends) for row in output[:, ids_BT.shape[1] :].tolist()]


def get_max_positions(module: nn.Module) -> int | None:
    """Tokens that the model has positions for; None: any number."""
    longest: int | None = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return longest


def _check(module: nn.Module, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> None:
    if not prompts:
        raise DataError("prompts: none is given; every rank needs one at least")
    words = getattr(getattr(module, "config", None), "vocab_size", None)
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"prompts[{index}] is empty; give it one token at least")
        if min(prompt) < 0 or (words is not None and max(prompt) >= words):
            raise DataError(
                f"prompts[{index}] has ids from {min(prompt)} to {max(prompt)}, and the model's vocabulary "
                f"ends at {words}; encode it with the model's tokenizer"
            )
    length, longest = max(map(len, prompts)), get_max_positions(module)
    if longest is not None and length + settings.max_new_tokens > longest:
        raise ModelError(
            f"a prompt of {length:,} tokens and max_new_tokens {settings.max_new_tokens:,} are more than the "
            f"{longest:,} that the model sees; shorten one of them"
        )


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, T) ids and mask, on the device."""
    rows = [torch.tensor(list(prompt), dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids.to(device), mask.to(device)


def _end_ids(module: nn.Module) -> tuple[set[int], int]:
    """The tokens that the model ends with, and what stands behind an end in a batch."""
    config = getattr(module, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return set(ends), ends[0] if ends else 0


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    return row[: next((at + 1 for at, token in enumerate(row) if token in ends), len(row))]


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws on this device follow the seed; afterwards its generators are as they were."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would set every GPU's
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
