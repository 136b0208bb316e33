"""Generates text with the trained language model, after a prompt or as the answer to a question."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline.config.data_schema import DataConfig
from pipeline.config.schema import RunConfig
from pipeline.data.batches import IGNORE_INDEX
from pipeline.data.bundle import DataBundle
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import ModelError
from pipeline.evaluation.conversation import ChatFormat, TextStream
from pipeline.models.generation import GeneratedToken, GenerationSettings, TextGenerator, get_max_positions
from pipeline.monitoring.events import SAMPLE, Event

TEMPERATURE = 0.8
TOP_K = 50
# Used if neither the recipe nor the data has a prompt.
DEFAULT_PROMPT = "def "
DEFAULT_QUESTION = "Hello!"


def uses_chat_template(data: DataConfig, tokenizer: Any) -> bool:
    """Return whether prompts are put into the chat template as questions.

    This is so if the data has conversations and the tokenizer has a template.

    Args:
        data: Section `data` of the recipe.
        tokenizer: Tokenizer of the model, or `None`.
    """
    return data.conversations is not None and bool(tokenizer and tokenizer.chat_template)


class Sample(NamedTuple):
    """A prompt and the model's continuation."""

    prompt: str
    text: str
    """Continuation without the prompt."""


def sample_text(generator: TextGenerator, data: DataBundle, config: RunConfig) -> Sample | None:
    """Generate the sample that the recipe asks for, the same on every rank. Collective.

    If the recipe has no prompt and the data has conversations or preferences, the first held-out row's prompt
    is used.

    Returns:
        `None` if the model cannot generate.
    """
    if not hasattr(generator.module, "generate"):
        return None
    tokenizer: Any = data.tokenizer
    has_conversations = config.data.conversations is not None
    prompt = config.sample.prompt
    ids = None
    if prompt is None and has_conversations:
        ids = _get_held_out_prompt(data)
    if ids is None:
        if prompt is None:
            prompt = DEFAULT_QUESTION if has_conversations else DEFAULT_PROMPT
        if uses_chat_template(config.data, tokenizer):
            ids = ChatFormat(tokenizer).render([{"role": "user", "content": prompt}])
        else:
            ids = encode_text(tokenizer, prompt)
    settings = GenerationSettings(config.sample.max_new_tokens, TEMPERATURE, TOP_K, seed=config.seed)
    return _generate_sample(generator, tokenizer, ids, settings)


def _get_held_out_prompt(data: DataBundle) -> list[int] | None:
    """Return the ids before the first answer of the first held-out row.

    Without held-out data, the first training row is used.

    Returns:
        `None` if the row has no answer, or no prompt of at least two tokens before it.
    """
    dataset: Any = next(iter({**data.eval, **data.eval_sets}.values()), data.train)
    row = dataset[0]
    begin = int((row["shift_labels"] != IGNORE_INDEX).int().argmax()) + 1
    return row["input_ids"][:begin].tolist() if begin > 1 else None


def build_text_sampler(
    generator: TextGenerator, data: DataBundle, config: RunConfig, tell: Callable[[int, Event], None]
) -> Callable[[int], None] | None:
    """Return a function that generates a sample after the evaluation of a step, and reports it as an event.

    Args:
        generator: Engine with the model.
        data: Data of the run, with the tokenizer.
        config: Recipe of the run.
        tell: Called with the step and the event.

    Returns:
        `None` if the recipe asks for no sample, or the model is no language model.
    """
    if data.tokenizer is None or not config.sample.every_eval or not config.sample.max_new_tokens:
        return None

    def report_sample(step: int) -> None:
        sample = sample_text(generator, data, config)
        if sample is not None:
            message = f"step {step}: the model wrote {sample.text[:200]!r}"
            tell(step, Event(SAMPLE, message, level="info", fields=sample._asdict()))

    return report_sample


Prompt = str | list[dict[str, Any]] | dict[str, Any]
"""Text, messages of a conversation with `role` and `content`, or an object with `messages` and `tools`."""


def generate_text(
    generator: TextGenerator,
    tokenizer: Any,
    prompt: Prompt,
    settings: GenerationSettings,
    *,
    is_conversational: bool,
    end_ids: Collection[int] = (),
    stop: Sequence[str] = (),
) -> str:
    """Return a prompt with its continuation, or only the answer to a conversation. Collective.

    Args:
        generator: Engine with the model.
        tokenizer: Tokenizer of the model.
        prompt: Text to continue, or conversation to answer.
        settings: Settings for the choice of each token. Fewer than `max_new_tokens` are generated if the
            prompt leaves the model fewer positions.
        is_conversational: Whether a text is a user's message to answer; see uses_chat_template.
        end_ids: Ids that end a text, besides those of the model's generation config.
        stop: Strings that end a text, and are not part of it.

    Raises:
        ModelError: The prompt fills the model's context, or the model cannot generate.
        DataError: The chat template is missing, is not valid Jinja or refuses the conversation.
    """
    continued = prompt if isinstance(prompt, str) and not is_conversational else None
    if continued is not None:
        ids = encode_text(tokenizer, continued)
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        row = messages if isinstance(messages, dict) else {"messages": messages}
        ids = ChatFormat(tokenizer).render(row["messages"], row.get("tools"))
    settings = limit_length(settings, ids, get_max_positions(generator.module))
    context = [] if continued is None else ids
    stream = TextStream(tokenizer, end_ids=end_ids, stop=stop, prompt_ids=context)
    parts: list[str] = []

    def add_token(_: int, token: GeneratedToken) -> bool:
        parts.append(stream.push(token.id))
        return stream.finish_reason is not None

    generator.generate([ids], settings, add_token)
    text = "".join(parts) + stream.finish()
    return text.strip() if continued is None else continued + text


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text to continue; an empty text begins a new document."""
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids or [tokenizer.eos_token_id]


def limit_length(
    settings: GenerationSettings, prompt_ids: Sequence[int], max_positions: int | None
) -> GenerationSettings:
    """Return the settings with no more new tokens than the model has positions after a prompt.

    Raises:
        ModelError: There is no position for a new token.
    """
    if max_positions is None:
        return settings
    room = max_positions - len(prompt_ids)
    if room < 1:
        raise ModelError(
            f"the prompt has {len(prompt_ids):,} tokens, and the model takes {max_positions:,} together with "
            "the generated ones: shorten it"
        )
    return replace(settings, max_new_tokens=min(settings.max_new_tokens, room))


@tag_errors(Phase.GENERATION)
def _generate_sample(
    generator: TextGenerator, tokenizer: Any, prompt_ids: Sequence[int], settings: GenerationSettings
) -> Sample:
    """Generate until the model ends its text, `max_new_tokens` are reached or the model's context is full.

    If the prompt does not fit into the context, its beginning is removed.
    """
    max_positions = get_max_positions(generator.module)
    if max_positions is not None:
        prompt_ids = prompt_ids[-max(1, max_positions - 1) :]
    settings = limit_length(settings, prompt_ids, max_positions)
    ids = [*prompt_ids, *generator.generate([prompt_ids], settings)[0]]
    # Decoded together with the prompt: alone, the first token may lose its space or be half a character.
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    prompt = str(tokenizer.decode(prompt_ids, skip_special_tokens=True))
    return Sample(prompt, text[len(prompt) :])
