"""Generates text with the trained language model, after a prompt or as the answer to a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline.config.data_schema import DataConfig
from pipeline.config.schema import RunConfig
from pipeline.data.batches import IGNORE_INDEX
from pipeline.data.bundle import DataBundle
from pipeline.data.template_process import TemplateProcess
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import ModelError
from pipeline.models.generation import GenerationSettings, TextGenerator, get_max_positions
from pipeline.monitoring.events import SAMPLE, Event

TEMPERATURE = 0.8
CODE = "def "
QUESTION = "Hello!"  # default prompts, if neither the recipe nor the data has one


def uses_chat_template(data: DataConfig, tokenizer: Any) -> bool:
    """Return whether a prompt is put as a question into the tokenizer's chat template, as in the data."""
    return data.conversations is not None and bool(tokenizer and tokenizer.chat_template)


class Sample(NamedTuple):
    """A prompt and the model's continuation."""

    prompt: str
    text: str


def sample_text(writer: TextGenerator, data: DataBundle, config: RunConfig) -> Sample | None:
    """Return the sample that the recipe asks for, the same on every rank. Collective.

    Without a prompt in the recipe, conversations and preferences give their first held-out prompt.

    Returns:
        `None` if the model cannot generate.
    """
    if not hasattr(writer.module, "generate"):
        return None
    tokenizer: Any = data.tokenizer
    is_spoken = config.data.conversations is not None
    prompt = config.sample.prompt
    ids = _held_out_prompt(data) if prompt is None and is_spoken else None
    if ids is None:
        default = QUESTION if is_spoken else CODE
        asks = uses_chat_template(config.data, tokenizer)
        ids = _prompt_ids(tokenizer, default if prompt is None else prompt, asks)
    settings = GenerationSettings(config.sample.max_new_tokens, TEMPERATURE, seed=config.seed)
    return _write(writer, tokenizer, ids, settings)


def _held_out_prompt(data: DataBundle) -> list[int] | None:
    """Return the ids before the first answer of the first held-out row, or of the first training row.

    Returns:
        `None` if every token counts in the loss, so that the answer's start is not known.
    """
    dataset: Any = next(iter({**data.eval, **data.eval_sets}.values()), data.train)
    row = dataset[0]
    begin = int((row["shift_labels"] != IGNORE_INDEX).int().argmax()) + 1
    return row["input_ids"][:begin].tolist() if begin > 1 else None


def build_sampler(
    writer: TextGenerator, data: DataBundle, config: RunConfig, tell: Callable[[int, Event], None]
) -> Callable[[int], None] | None:
    """Return a function that generates and reports a sample after the evaluation of a step.

    Returns:
        `None` if the recipe asks for no sample or the model writes no text.
    """
    if data.tokenizer is None or not config.sample.every_eval or not config.sample.max_new_tokens:
        return None

    def tell_sample(step: int) -> None:
        sample = sample_text(writer, data, config)
        if sample is not None:
            message = f"step {step}: the model wrote {sample.text[:200]!r}"
            tell(step, Event(SAMPLE, message, level="info", fields=sample._asdict()))

    return tell_sample


def generate_text(
    writer: TextGenerator, tokenizer: Any, prompt: str, settings: GenerationSettings, *, asks: bool
) -> str:
    """Return the prompt and the model's continuation, or only the answer to a question. Collective.

    Raises:
        ModelError: The prompt is longer than the model's context, or the model cannot generate.
    """
    ids = _prompt_ids(tokenizer, prompt, asks)
    longest = get_max_positions(writer.module)
    if longest is not None and len(ids) >= longest:
        raise ModelError(f"the prompt has {len(ids):,} tokens, and the model sees {longest:,}: shorten it")
    text = _write(writer, tokenizer, ids, settings).text
    return text.strip() if asks else prompt + text


def _prompt_ids(tokenizer: Any, text: str, asks: bool) -> list[int]:
    """Return the ids of a prompt. A question is put into the chat template, up to the answer's start.

    Raises:
        DataError: The template is not valid Jinja, or it refuses the question.
    """
    if asks:
        special = tokenizer.all_special_tokens
        template = TemplateProcess(tokenizer.chat_template, dict(tokenizer.special_tokens_map), special)
        question: list[int] = tokenizer(template.write_question(text), add_special_tokens=False)["input_ids"]
        return question
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids or [tokenizer.eos_token_id]  # the separator of documents


@tag_errors(Phase.GENERATION)
def _write(
    writer: TextGenerator, tokenizer: Any, prompt: Sequence[int], settings: GenerationSettings
) -> Sample:
    """Return the prompt and the model's continuation, up to its end or the end of the model's context.

    A prompt longer than the context is cut at its beginning.
    """
    longest = get_max_positions(writer.module)  # `None` if the model has no limit
    if longest is not None:
        prompt = prompt[-max(1, longest - 1) :]
        fits = max(1, min(settings.max_new_tokens, longest - len(prompt)))
        settings = replace(settings, max_new_tokens=fits)
    ids = [*prompt, *writer.generate([prompt], settings)[0]]
    # Decoded as part of the whole: a single token may lose a space, or be half of a character.
    whole = str(tokenizer.decode(ids, skip_special_tokens=True))
    begin = str(tokenizer.decode(prompt, skip_special_tokens=True))
    return Sample(begin, whole[len(begin) :])
