"""Shell patterns of the recipe, matched with the names of a model's parameters and modules."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.errors import ConfigError, ModelError

GroupKey = tuple[int, bool]
"""Number in optimizer.groups from 1 on, or 0 for no group; and whether its weight decay is off."""


def assign_parameter_groups(trained: Mapping[str, int], config: OptimizerConfig) -> dict[str, GroupKey]:
    """Return name -> group of each trained parameter of a whole model.

    Weight decay applies to matrices. It applies to biases, norms and other vectors only if their group
    states one.

    Args:
        trained: Name -> number of dimensions, of each trained parameter.
        config: Optimizer section of the recipe.

    Raises:
        ConfigError: A pattern of optimizer.groups matches no trained parameter, or a group of muon has a
            parameter that is not a matrix.
        ModelError: No parameter is trained.
    """
    if not trained:
        raise ModelError(
            "no parameter of the model requires a gradient, so nothing can be trained; check model.freeze"
        )
    group_of: dict[str, int] = {}
    for number, group in enumerate(config.groups or [], 1):
        for pattern in group.patterns:
            key = f"optimizer.groups.{number - 1}.patterns"
            for name in match_parameters(pattern, trained, key, "that is trained"):
                group_of.setdefault(name, number)  # the first group that matches
        members = [name for name, number_of_group in group_of.items() if number_of_group == number]
        others = [name for name in members if trained[name] != 2]
        if others and group.kind == "muon":
            raise ConfigError(
                f"optimizer.groups.{number - 1}.kind: muon is for matrices, and {others[0]} has "
                f"{trained[others[0]]} dimension(s); write patterns that match only matrices"
            )
    keys: dict[str, GroupKey] = {}
    for name, dimensions in trained.items():
        number = group_of.get(name, 0)
        decays_all = number > 0 and (config.groups or [])[number - 1].weight_decay is not None
        keys[name] = (number, dimensions < 2 and not decays_all)
    return keys


def get_optimizer_kind(key: GroupKey, config: OptimizerConfig) -> str:
    """Return the kind of optimizer of a group: `adamw`, `sgd`, `adafactor` or `muon`."""
    number = key[0]
    if config.groups and number:
        return config.groups[number - 1].kind or config.kind
    return config.kind


def match_modules(
    pattern: str, names: Iterable[str], key: str, what: str, others: Iterable[str] = ()
) -> list[str]:
    """Return the names that match a pattern as a whole, or whose last parts equal it, as in peft.

    Args:
        pattern: Shell pattern.
        names: Names of modules.
        key: Key of the recipe that has the pattern, for the error.
        what: Kind of module, such as "linear layer", for the error.
        others: Names of modules that can be trained fully, for advice in the error.

    Raises:
        ConfigError: The pattern matches no name. The message has the nearest names.
    """
    names = list(names)

    def matches(name: str) -> bool:
        return fnmatchcase(name, pattern) or name.endswith(f".{pattern}")

    matching = [name for name in names if matches(name)]
    if matching:
        return matching
    if any(matches(name) for name in others):
        raise ConfigError(
            f"{key}: {pattern!r} is no {what} of the model; to train it fully: "
            f"adapter.modules_to_save=[{pattern}]"
        )
    last_parts = {name.rpartition(".")[2] for name in names}
    nearest = _format_nearest(pattern, [*last_parts, *names])
    raise ConfigError(f"{key}: {pattern!r} matches no {what} of the model{nearest}")


def match_parameters(
    pattern: str, names: Iterable[str], key: str, of_what: str = "of the model"
) -> list[str]:
    """Return the names that a pattern matches as a whole; `*` also matches dots.

    Args:
        pattern: Shell pattern.
        names: Names of parameters.
        key: Key of the recipe that has the pattern, for the error.
        of_what: Description that follows the word "parameter" in the error.

    Raises:
        ConfigError: The pattern matches no name. The message has the nearest names.
    """
    names = list(names)
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if matching:
        return matching
    raise ConfigError(
        f"{key}: {pattern!r} matches no parameter {of_what}{_format_nearest(pattern, names)} (a pattern is "
        "compared with whole names, and * stands for anything)"
    )


def _format_nearest(pattern: str, names: list[str]) -> str:
    """Return `; nearest: ...` with the three names that are most like the pattern."""
    return f"; nearest: {', '.join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))}"
