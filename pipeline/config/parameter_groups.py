"""Which of a model's parameters are stepped together, by their names and dimensions."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.patterns import matching
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
