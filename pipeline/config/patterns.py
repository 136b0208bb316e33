"""Shell patterns over the names of a model's parameters, as sections of the recipe have them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.errors import ConfigError, ModelError

GroupKey = tuple[int, bool]
"""(0, or the number of the group in optimizer.groups from 1 on; whether it is what of it does not decay)."""


def group_keys(trained: Mapping[str, int], config: OptimizerConfig) -> dict[str, GroupKey]:
    """Name -> group of each parameter of a whole model that is trained.

    Matrices decay; biases, norms and other vectors do not, where their group does not say so.

    Args:
        trained: Name -> number of dimensions.

    Raises:
        ConfigError: a pattern of optimizer.groups matches nothing that is trained, or muon is to step what is
            no matrix.
        ModelError: no parameter is trained.
    """
    if not trained:
        raise ModelError("the model has no parameter that requires a gradient; nothing can be trained")
    group_of: dict[str, int] = {}
    for number, group in enumerate(config.groups or [], 1):
        for pattern in group.patterns:
            key = f"optimizer.groups.{number - 1}.patterns"
            for name in matching(pattern, trained, key, "that is trained"):
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


def kind_of(key: GroupKey, config: OptimizerConfig) -> str:
    """What steps a group: `adamw`, `sgd`, `adafactor` or `muon`."""
    own = config.groups[key[0] - 1].kind if config.groups and key[0] else None
    return own or config.kind


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
