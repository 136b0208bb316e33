"""A few words from the trained language model: after a prompt, or as the answer to a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipeline.config.data_schema import ConversationsConfig, DataConfig
from pipeline.config.schema import SampleConfig
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import ModelError
from pipeline.events import SAMPLE, Event
from pipeline.models.generation import Generates, GenerationSettings, longest_sequence

TEMPERATURE = 0.8


def asks_in_template(data: DataConfig, tokenizer: Any) -> bool:
    """Whether a prompt is a question in the tokenizer's chat template, as in such data."""
    return isinstance(data, ConversationsConfig) and bool(tokenizer and tokenizer.chat_template)


def sample_text(
    writer: Generates, tokenizer: Any, config: SampleConfig, seed: int, *, asks: bool
) -> str | None:
    """The prompt, and what the model writes after it, the same on every rank; None for a model that cannot
    generate. Collective.

    Args:
        asks: The prompt is a question in the tokenizer's chat template.
    """
    if not hasattr(writer.module, "generate"):
        return None
    prompt = _prompt_ids(tokenizer, config.prompt, asks)
    settings = GenerationSettings(config.max_new_tokens, TEMPERATURE, seed=seed)
    return str(tokenizer.decode(_write(writer, prompt, settings), skip_special_tokens=True))


def build_sampler(
    writer: Generates,
    tokenizer: Any,
    config: SampleConfig,
    seed: int,
    tell: Callable[[int, Event], None],
    *,
    asks: bool,
) -> Callable[[int], None] | None:
    """What has the model write after the evaluation of a step, and tells it; None: it is not asked for.

    Args:
        tokenizer: None of a model that writes no text.
    """
    if tokenizer is None or not config.every_eval or not config.max_new_tokens:
        return None

    def tell_sample(step: int) -> None:
        text = sample_text(writer, tokenizer, config, seed, asks=asks)
        if text is not None:
            fields = {"prompt": config.prompt, "text": text}
            tell(
                step,
                Event(SAMPLE, f"step {step}: the model wrote {text[:200]!r}", level="info", fields=fields),
            )

    return tell_sample


def generate_text(
    writer: Generates, tokenizer: Any, prompt: str, settings: GenerationSettings, *, asks: bool
) -> str:
    """The prompt and what the model writes after it; to a question the answer alone. Collective.

    Raises:
        ModelError: the prompt is longer than what the model sees, or it cannot generate.
    """
    ids = _prompt_ids(tokenizer, prompt, asks)
    longest = longest_sequence(writer.module)
    if longest is not None and len(ids) >= longest:
        raise ModelError(f"the prompt has {len(ids):,} tokens, and the model sees {longest:,}: shorten it")
    # As part of the whole: a token by itself may lose a space, or be half of a character.
    whole = tokenizer.decode(_write(writer, ids, settings), skip_special_tokens=True)
    text = str(whole[len(tokenizer.decode(ids, skip_special_tokens=True)) :])
    return text.strip() if asks else prompt + text


def _prompt_ids(tokenizer: Any, text: str, asks: bool) -> list[int]:
    """Ids to go on from: of a question as the chat template has it, up to where the answer begins.

    Raises:
        DataError: the template is no Jinja, or refuses it.
    """
    if asks:
        special = tokenizer.all_special_tokens
        template = TemplateProcess(tokenizer.chat_template, dict(tokenizer.special_tokens_map), special)
        question: list[int] = tokenizer(template.ask(text), add_special_tokens=False)["input_ids"]
        return question
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids or [tokenizer.eos_token_id]  # what stands between documents


def _write(writer: Generates, prompt: Sequence[int], settings: GenerationSettings) -> list[int]:
    """The ids of the prompt and of what the model writes after it, up to its end or as far as it can see.

    Args:
        prompt: Of one that the model has no positions for, the end is read.
    """
    longest = longest_sequence(writer.module)  # not every model has an end
    if longest is not None:
        prompt = prompt[-max(1, longest - 1) :]
        fits = max(1, min(settings.max_new_tokens, longest - len(prompt)))
        settings = replace(settings, max_new_tokens=fits)
    return [*prompt, *writer.generate([prompt], settings)[0]]
