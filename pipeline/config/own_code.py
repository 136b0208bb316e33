"""Where a recipe names code to run: import paths, and code that comes with a model from the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config.loading import place_of
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError

OPTION = "--no-import-paths"
IMPORTED = ("kind", "iterable", "collate_fn")  # the fields that may hold `package.module:function`


def named_code(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value) of everything in a recipe, or in a section of it, that would run code."""
    if isinstance(section, BaseModel):
        for name in type(section).model_fields:
            value = getattr(section, name)
            if (name in IMPORTED and isinstance(value, str) and ":" in value) or (
                name == "trust_remote_code" and value
            ):
                yield f"{prefix}{name}", str(value)
            yield from named_code(value, f"{prefix}{name}.")
    elif isinstance(section, list):
        for number, value in enumerate(section):
            yield from named_code(value, f"{prefix}{number}.")
    elif isinstance(section, dict):
        for name, value in section.items():
            yield from named_code(value, f"{prefix}{name}.")


def refuse_code(config: RunConfig, source: Path, places: Mapping[str, str]) -> None:
    """Refuses a recipe that would run code.

    Raises:
        ConfigError: the first key that names some.
    """
    for dotted, value in named_code(config):
        place = place_of(dotted, source, places)
        raise ConfigError(
            f"{place}: {dotted}: {value!r} would run code, and {OPTION} was given; read that code, "
            "then leave the option out"
        )
