"""How far a run can go where it is: the longest rows, the largest micro-batch, the largest model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.config.model_schema import CausalLMConfig
from pipeline.config.schema import BatchConfig, RunConfig
from pipeline.config.settings import Settings
from pipeline.errors import ConfigError
from pipeline.planning.forecast import Forecast, forecast
from pipeline.planning.model import Model
from pipeline.planning.place import Place
from pipeline.planning.shapes import model_of, read_config

STEP = 128
"""Tokens by which a row grows."""
MOST_TOKENS, MOST_ROWS, MOST_SIZE = 2**26, 2**14, 64


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to `most` that fits, of those below which all fit; 0: none does."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def longest_sequence(settings: Settings, model: Model, place: Place) -> Forecast | None:
    """With rows as long as fit, a micro-batch of one; None: none fits. Pretrained weights have a number of
    positions, which is not exceeded.
    """
    one_row, most = _with_rows(settings, 1), MOST_TOKENS
    if (given := getattr(settings.config.model, "pretrained", None)) is not None:
        most = min(most, read_config(given).get("max_position_embeddings") or most)

    def at(number: int) -> Forecast | None:
        longer = _with_length(one_row, number * STEP)
        return _try(longer, model_of(longer.config) or model, place)

    return _best(at, most // STEP)


def largest_micro_batch(settings: Settings, model: Model, place: Place) -> Forecast | None:
    """With as many rows in a micro-batch as fit, whatever the global batch."""
    return _best(lambda n: _try(_with_rows(settings, n), model, place), MOST_ROWS)


def largest_model(settings: Settings, model: Model, place: Place) -> Forecast | None:
    """Of the same family and proportions: width and depth grow together, a micro-batch is one row."""
    one_row = _with_rows(settings, 1)

    def at(number: int) -> Forecast | None:
        scaled = _scaled(one_row, model, number)
        known = model_of(scaled.config)
        return None if known is None else _try(scaled, known, place)

    return None if model.dimensions is None else _best(at, MOST_SIZE)


def _best(at: Callable[[int], Forecast | None], most: int) -> Forecast | None:
    found: dict[int, Forecast] = {}

    def fits(number: int) -> bool:
        each = at(number)
        if each is not None:
            found[number] = each
        return each is not None

    return found.get(largest(fits, most))


def _try(settings: Settings, model: Model, place: Place) -> Forecast | None:
    """None: it does not fit, or cannot be."""
    try:
        found = forecast(settings, model, place)
    except ConfigError:
        return None
    return found if found.fits else None


def _with(settings: Settings, **values: Any) -> Settings:
    return replace(settings, config=settings.config.model_copy(update=values))


def _with_length(settings: Settings, tokens: int) -> Settings:
    config: RunConfig = settings.config
    model = config.model
    if isinstance(model, CausalLMConfig) and model.max_sequence_length is not None:
        model = model.model_copy(update={"max_sequence_length": max(tokens, model.max_sequence_length)})
    return _with(settings, data=config.data.model_copy(update={"sequence_length": tokens}), model=model)


def _with_rows(settings: Settings, rows: int) -> Settings:
    return _with(settings, batch=BatchConfig(micro_batch_size=rows, gradient_accumulation_steps=1))


def _scaled(settings: Settings, model: Model, size: int) -> Settings:
    """With `size` key-value heads, and all else in proportion."""
    dimensions = model.dimensions
    assert dimensions is not None
    groups = dimensions.heads // dimensions.key_value_heads
    heads = groups * size
    hidden = heads * dimensions.hidden // dimensions.heads
    ratio = hidden / dimensions.hidden
    asked = settings.config.model.model_copy(
        update={
            "architecture": dimensions.family,
            "pretrained": None,
            "vocab_size": dimensions.vocabulary,
            "hidden_size": hidden,
            "intermediate_size": max(64, round(dimensions.intermediate * ratio / 64) * 64),
            "num_heads": heads,
            "num_key_value_heads": heads // groups,
            "num_layers": max(1, round(dimensions.layers * ratio)),
        }
    )
    return _with(settings, model=asked)


def words_of_length(found: Forecast) -> str:
    """For the command line."""
    words = [f"data.sequence_length={getattr(found.config.data, 'sequence_length', None)}"]
    if (positions := getattr(found.config.model, "max_sequence_length", None)) is not None:
        words.append(f"model.max_sequence_length={positions}")
    return " ".join(words)


def words_of_rows(found: Forecast) -> str:
    """For the command line."""
    return f"batch.micro_batch_size={found.resolved.plan.micro_batch_size}"


def words_of_size(found: Forecast) -> str:
    """For the command line."""
    keys = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_key_value_heads")
    return " ".join(f"model.{key}={getattr(found.config.model, key)}" for key in keys)
