"""Shell patterns over the names of a model's parameters, as sections of the recipe have them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.errors import ConfigError, ModelError

GroupKey = tuple[int, bool]
"""Number of the group in optimizer.groups from 1 on, or 0; whether this part of it does not decay."""


def assign_parameter_groups(trained: Mapping[str, int], config: OptimizerConfig) -> dict[str, GroupKey]:
    """Return name -> group of each parameter of a whole model that is trained.

    Matrices decay. Biases, norms and other vectors do not, unless their group says so.

    Args:
        trained: Name -> number of dimensions.

    Raises:
        ConfigError: A pattern of optimizer.groups matches nothing that is trained, or muon has a parameter
            that is no matrix.
        ModelError: No parameter is trained.
    """
    if not trained:
        raise ModelError("the model has no parameter that requires a gradient; nothing can be trained")
    group_of: dict[str, int] = {}
    for number, group in enumerate(config.groups or [], 1):
        for pattern in group.patterns:
            key = f"optimizer.groups.{number - 1}.patterns"
            for name in match_parameters(pattern, trained, key, "that is trained"):
                group_of.setdefault(name, number)  # the first group that matches
        flat = [name for name, its in group_of.items() if its == number and trained[name] != 2]
        if flat and group.kind == "muon":
            raise ConfigError(
                f"optimizer.groups.{number - 1}.kind: muon steps matrices, and {flat[0]} has "
                f"{trained[flat[0]]} dimension(s); write patterns that match matrices alone"
            )
    keys: dict[str, GroupKey] = {}
    for name, dimensions in trained.items():
        number = group_of.get(name, 0)
        decays_all = number > 0 and (config.groups or [])[number - 1].weight_decay is not None
        keys[name] = (number, dimensions < 2 and not decays_all)
    return keys


def get_optimizer_kind(key: GroupKey, config: OptimizerConfig) -> str:
    """Return the optimizer of a group: `adamw`, `sgd`, `adafactor` or `muon`."""
    own = config.groups[key[0] - 1].kind if config.groups and key[0] else None
    return own or config.kind


def match_modules(
    pattern: str, names: Iterable[str], key: str, what: str, others: Iterable[str] = ()
) -> list[str]:
    """Return the names that a pattern matches as a whole, or whose last parts it is, as in peft.

    Args:
        key: Where the recipe has the pattern, for the error.
        others: Names of modules that can be trained whole.

    Raises:
        ConfigError: There are none. The message says which names are nearest.
    """
    names = list(names)

    def matches(name: str) -> bool:
        return fnmatchcase(name, pattern) or name.endswith(f".{pattern}")

    if found := [name for name in names if matches(name)]:
        return found
    if any(matches(name) for name in others):
        raise ConfigError(
            f"{key}: {pattern!r} is no {what} of the model; to train it whole: "
            f"adapter.modules_to_save=[{pattern}]"
        )
    last = {name.rpartition(".")[2] for name in names}
    raise ConfigError(
        f"{key}: {pattern!r} matches no {what} of the model{_nearest(pattern, [*last, *names])}"
    )


def match_parameters(
    pattern: str, names: Iterable[str], key: str, of_what: str = "of the model"
) -> list[str]:
    """Return the names that the pattern matches as a whole; `*` also matches dots.

    Args:
        key: Where the recipe has the pattern, for the error.
        of_what: Which parameters have these names.

    Raises:
        ConfigError: There are none. The message says which names are nearest.
    """
    names = list(names)
    if found := [name for name in names if fnmatchcase(name, pattern)]:
        return found
    raise ConfigError(
        f"{key}: {pattern!r} matches no parameter {of_what}{_nearest(pattern, names)} (a pattern is "
        "compared with whole names, and * stands for anything)"
    )


def _nearest(pattern: str, names: list[str]) -> str:
    return f"; nearest: {', '.join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))}"
