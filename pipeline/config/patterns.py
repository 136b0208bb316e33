"""Shell patterns over the names of a model's parameters, as sections of the recipe have them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from pipeline.errors import ConfigError

_NEAREST = 3


def matching_parts(
    pattern: str, names: Iterable[str], key: str, what: str, others: Iterable[str] = ()
) -> list[str]:
    """The names that a pattern of whole names matches, or whose last parts it is, as peft has it.

    Args:
        others: Names of modules that are trained whole where they are asked for.

    Raises:
        ConfigError: there are none; says which names are nearest.
    """
    names = list(names)

    def matches(name: str) -> bool:
        return fnmatchcase(name, pattern) or name.endswith(f".{pattern}")

    found = [name for name in names if matches(name)]
    if found:
        return found
    if any(matches(name) for name in others):
        raise ConfigError(
            f"{key}: {pattern!r} is no {what} of the model; to train it whole: "
            f"adapter.modules_to_save=[{pattern}]"
        )
    last = {name.rpartition(".")[2] for name in names}
    near = difflib.get_close_matches(pattern, [*last, *names], _NEAREST, cutoff=0.0)
    raise ConfigError(f"{key}: {pattern!r} matches no {what} of the model; nearest: {', '.join(near)}")


def matching(pattern: str, names: Iterable[str], key: str, of_what: str = "of the model") -> list[str]:
    """The names that the pattern matches as a whole; `*` also matches dots.

    Args:
        key: Where the recipe has the pattern, for the error.
        of_what: Which parameters have these names.

    Raises:
        ConfigError: there are none; says which names are nearest.
    """
    names = list(names)
    if found := [name for name in names if fnmatchcase(name, pattern)]:
        return found
    near = difflib.get_close_matches(pattern, names, _NEAREST, cutoff=0.0)
    raise ConfigError(
        f"{key}: {pattern!r} matches no parameter {of_what}; nearest: {', '.join(near)} (a pattern is "
        "held against whole names, and * stands for anything)"
    )
