"""How far a run can go where it is: the longest rows, the largest micro-batch, the largest model."""

from __future__ import annotations

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
from pipeline.planning.shapes import model_of

STEP = 128
"""Tokens by which a row grows."""
MOST_TOKENS, MOST_ROWS, MOST_SIZE = 2**26, 2**14, 64


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole number from 1 to `most` that fits, of those below which all fit; 0: none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_sequence(settings: Settings, model: Model, place: Place) -> Forecast | None:
    """With rows as long as can be, micro-batches of one of them where more do not fit; None: none fits."""
    one_row = _with_rows(settings, 1, place)
    return _best(lambda n: _try(_with_length(one_row, n * STEP), None, place), MOST_TOKENS // STEP)


def largest_micro_batch(settings: Settings, model: Model, place: Place) -> Forecast | None:
    """With as many rows in a micro-batch as fit, whatever the global batch."""
    return _best(lambda n: _try(_with_rows(settings, n, place), model, place), MOST_ROWS)


def largest_model(settings: Settings, model: Model, place: Place) -> Forecast | None:
    """Of the same family and proportions: width and depth grow together, a micro-batch is one row."""
    if model.dimensions is None or not isinstance(settings.config.model, CausalLMConfig):
        return None
    one_row = _with_rows(settings, 1, place)
    return _best(lambda n: _try(_scaled(one_row, model, n), None, place), MOST_SIZE)


def _best(at: Callable[[int], Forecast | None], most: int) -> Forecast | None:
    found: dict[int, Forecast] = {}

    def fits(number: int) -> bool:
        each = at(number)
        if each is not None:
            found[number] = each
        return each is not None

    return found.get(largest(fits, most))


def _try(settings: Settings, model: Model | None, place: Place) -> Forecast | None:
    """None: it does not fit, or cannot be."""
    try:
        known = model if model is not None else model_of(settings.config)
        found = None if known is None else forecast(settings, known, place)
    except ConfigError:
        return None
    return found if found is not None and found.fits else None


def _with(settings: Settings, **values: Any) -> Settings:
    return replace(settings, config=settings.config.model_copy(update=values))


def _with_length(settings: Settings, tokens: int) -> Settings:
    config: RunConfig = settings.config
    model = config.model
    if isinstance(model, CausalLMConfig) and model.max_sequence_length is not None:
        model = model.model_copy(update={"max_sequence_length": max(tokens, model.max_sequence_length)})
    return _with(settings, data=config.data.model_copy(update={"sequence_length": tokens}), model=model)


def _with_rows(settings: Settings, rows: int, place: Place) -> Settings:
    batch = BatchConfig.model_construct(
        micro_batch_size=rows, gradient_accumulation_steps=1, global_batch_size=None
    )
    return _with(settings, batch=batch)


def _scaled(settings: Settings, model: Model, size: int) -> Settings:
    """Eight sizes are a doubling of the width's parameters: 64 heads' widths a step."""
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
    return f"data.sequence_length={getattr(found.config.data, 'sequence_length', None)}"


def words_of_rows(found: Forecast) -> str:
    """For the command line."""
    return f"batch.micro_batch_size={found.resolved.plan.micro_batch_size}"


def words_of_size(found: Forecast) -> str:
    """For the command line."""
    keys = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_key_value_heads")
    return " ".join(f"model.{key}={getattr(found.config.model, key)}" for key in keys)
