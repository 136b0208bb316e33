"""How far a run can go where it is: the longest rows, the largest micro-batch, the largest model.

What is tried is what the words for the command line make of the run, so these do what was planned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pipeline.config.settings import Settings
from pipeline.errors import ConfigError, PipelineError
from pipeline.planning.changes import word
from pipeline.planning.families import families, shaping, standard_words
from pipeline.planning.forecast import Forecast, forecast
from pipeline.planning.history import History
from pipeline.planning.model import Dimensions, Model
from pipeline.planning.place import Place
from pipeline.planning.shapes import model_of, read_config

STEP = 128
"""Tokens by which a row grows."""
MOST_TOKENS, MOST_ROWS = 2**26, 2**14
MOST_HEADS, MOST_WIDTH, MOST_LAYERS = 1024, 2**17, 2**10
"""Of a model that is tried: key-value heads, hidden size, blocks."""
NO_MORE = "more is not tried"

Words: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Limit:
    """How far it goes."""

    found: Forecast | None
    """None: not even the smallest fits."""
    words: Words
    """Behind the command; they make the run that was planned."""
    stops: str = ""
    """What ends it in place of memory; empty: memory does."""


def longest_sequence(settings: Settings, model: Model, place: Place, history: History | None = None) -> Limit:
    """With rows as long as fit, a micro-batch of one. Pretrained weights have a number of positions, which is
    not exceeded.

    Raises:
        ConfigError: how memory grows with a row is not known of this model.
    """
    most, stops = MOST_TOKENS, NO_MORE
    section = settings.config.model
    language = section.language_model
    if model.dimensions is None:
        raise ConfigError(
            f"--longest: what a row of {model.name} takes is known of the recipe's length alone"
        )
    if (given := section.pretrained_from) is not None:
        stated = standard_words(model.dimensions.family, read_config(given))
        if (positions := stated.get("max_position_embeddings") or most) < most:
            most, stops = positions, f"{given} has no more positions"
    stated_positions = language.max_sequence_length if language is not None else None

    def at(number: int) -> Words:
        tokens = min(number * STEP, most)
        words = [word("data.sequence_length", tokens)]
        if stated_positions is not None:
            words.append(word("model.max_sequence_length", max(tokens, stated_positions)))
        return (*words, *_batch(settings, 1))

    return _furthest(settings, model, place, history, at, -(-most // STEP), stops)


def largest_micro_batch(
    settings: Settings, model: Model, place: Place, history: History | None = None
) -> Limit:
    """With as many rows in a micro-batch as fit, one micro-batch a step, whatever the global batch."""
    return _furthest(settings, model, place, history, lambda rows: _batch(settings, rows), MOST_ROWS)


def largest_model(settings: Settings, model: Model, place: Place, history: History | None = None) -> Limit:
    """Of the same family and proportions: width and depth grow together, a micro-batch is one row."""
    dimensions = model.dimensions
    if dimensions is None:
        return Limit(None, (), f"how {model.name} would grow is not known")
    split = settings.followed_by(_batch(settings, 1)).resolve(place.ranks, place.device).split
    step = split.tensor_parallel * split.sequence_parallel  # ranks that share a row divide its heads
    widest = dimensions.key_value_heads * MOST_WIDTH // dimensions.hidden
    deepest = dimensions.key_value_heads * MOST_LAYERS // dimensions.layers
    anew = _anew(settings, dimensions)
    language = settings.config.model.language_model
    # A config without it has as many as heads; some families have no such word.
    says_key_value_heads = (
        dimensions.key_value_heads != dimensions.heads
        or "num_key_value_heads" in families()[dimensions.family]["defaults"]
        or (language is not None and language.num_key_value_heads is not None)
    )

    def at(number: int) -> Words:
        sizes = _sizes(dimensions, number * step)
        if not says_key_value_heads:
            del sizes["num_key_value_heads"]
        return (*anew, *(word(f"model.{key}", size) for key, size in sizes.items()), *_batch(settings, 1))

    most = max(1, min(MOST_HEADS, widest, deepest) // step)
    return _furthest(settings, model, place, history, at, most)


def last_fitting(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to `most` that fits, of those below which all fit; 0: none does."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def _furthest(
    settings: Settings,
    model: Model,
    place: Place,
    history: History | None,
    at: Callable[[int], Words],
    most: int,
    stops: str = NO_MORE,
) -> Limit:
    """
    Args:
        at: Words for the command line, by a number that grows.
        model: Where it has to be built to be known, and these words change nothing of it.
        stops: Why no more than `most` is tried.
    """
    found: dict[int, Forecast] = {}
    refused: dict[int, str] = {}

    def fits(number: int) -> bool:
        try:
            changed = settings.followed_by(at(number))
            found[number] = forecast(changed, model_of(changed.config) or model, place, history)
        except PipelineError as error:
            refused[number] = str(error)
            return False
        if not found[number].memory.is_complete:
            raise ConfigError(
                f"--longest, --largest: what activations take is not known of {model.name}, computed so; "
                "without the option the plan says what is known"
            )
        return bool(found[number].fits)

    best = last_fitting(fits, most)
    if best == most:
        return Limit(found[best], at(best), stops)
    return Limit(found.get(best), at(best) if best else (), refused.get(best + 1, ""))


def _batch(settings: Settings, rows: int) -> Words:
    """One micro-batch of so many rows, whatever recipe and JSON say of a batch."""
    words = [word("batch.micro_batch_size", rows), word("batch.gradient_accumulation_steps", 1)]
    if settings.config.batch.global_batch_size is not None:
        words.append(word("batch.global_batch_size", None))
    of_json = [key for key, ours in settings.adopted.items() if ours.startswith("batch.")]
    return (*words, *(word(f"ds.{key}", "auto") for key in of_json))


def _sizes(dimensions: Dimensions, key_value_heads: int) -> dict[str, int]:
    """Of a model with so many, all else in proportion."""
    heads = dimensions.heads // dimensions.key_value_heads * key_value_heads
    hidden = heads * dimensions.hidden // dimensions.heads
    ratio = hidden / dimensions.hidden
    return {
        "hidden_size": hidden,
        "intermediate_size": max(64, round(dimensions.intermediate * ratio / 64) * 64),
        "num_layers": max(1, round(dimensions.layers * ratio)),
        "num_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


def _anew(settings: Settings, dimensions: Dimensions) -> Words:
    """In place of weights that are there, and have one size: a new model with their vocabulary."""
    config, words = settings.config, []
    if config.model.weights is not None:
        words.append(word("model.weights", None))
    if config.adapter is not None and config.adapter.weights is not None:
        words.append(word("adapter.weights", None))
    if (given := config.model.pretrained_from) is None:
        return tuple(words)
    words += [
        word("model.pretrained", None),
        word("model.architecture", dimensions.family),
        word("model.vocab_size", dimensions.vocabulary),
    ]
    if further := shaping(dimensions.family, read_config(given)):
        words.append(word("model.extra", further))
    if (documents := config.data.documents) is not None:
        words.append(word("data.tokenizer.pretrained", documents.tokenizer.pretrained))
    return tuple(words)
