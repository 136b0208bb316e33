"""By what a run is known, its recipe, its data and its global batch, and in what another one differs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.config.loading import Tree, read_yaml
from pipeline.config.schema import RunConfig
from pipeline.config.settings import recipe_yaml
from pipeline.config.yaml_loader import Loader
from pipeline.errors import CheckpointError, ConfigError
from pipeline.files import CONFIGURATION_LIMIT, read_plain
from pipeline.redaction import REDACTED

# Sections that do not change what is trained: a run goes on though they differ. What they say of the batch is
# compared by what it comes to.
BESIDE_THE_POINT = {
    *("checkpoint", "wandb", "sample", "runs_dir", "run_dir", "callbacks"),
    *("engine", "batch", "loader", "distributed", "watch", "notify", "profile"),
}
READERS = ("tensorboard", "csv", "sinks", "console")  # in `log`: of the same rows; csv in older recipes
DECISIVE = {"data": "split.data", "global_batch_size": "batch.global_batch_size"}  # in split.json -> its name
FINGERPRINT = DECISIVE["data"]
# What a run that is named by `run_dir` may go on with: further, or at another rate.
MAY_CHANGE = ("max_steps", "max_epochs", "early_stopping", "optimizer", "schedule")
MAY_NOT_CHANGE = ("optimizer.kind",)  # whose state the checkpoint holds
# Where an adapter's base lies: digests of its weights and of data and tokenizer are compared instead.
PLACES = ("model.pretrained", "model.weights", "data.tokenizer.pretrained")


def _identity(recipe: Tree, split: Tree) -> Tree:
    kept = {key: value for key, value in recipe.items() if key not in BESIDE_THE_POINT}
    if isinstance(kept.get("log"), dict):
        kept["log"] = kept["log"] | dict.fromkeys((*READERS, "price_per_device_hour"))
    if isinstance(kept.get("model"), dict):
        kept["model"] = kept["model"] | {"attention": None, "fp8": None}  # how it is computed
    if isinstance(kept.get("objective"), dict):
        kept["objective"] = kept["objective"] | {"reduction": kept["objective"].get("reduction") or "sum"}
    return kept | {name: split.get(key) for key, name in DECISIVE.items()}


class Difference(NamedTuple):
    """A key in which two runs differ, dotted as on the command line."""

    key: str
    then: Any
    now: Any
    is_place: bool = False
    """Whether it is where an adapter's base lies."""

    def __str__(self) -> str:
        if self.key == FINGERPRINT:
            return "its data was other"
        return f"{self.key} was {self.then}, is {self.now}"

    @property
    def override(self) -> str:
        """What on the command line brings the value back."""
        return shlex.quote(f"{self.key}={json.dumps(self.then, ensure_ascii=False)}")


def differences_from(path: Path, config: RunConfig, split: Tree) -> list[Difference]:
    """In what the run in `path` is another one.

    Raises:
        CheckpointError: it cannot be said.
    """
    try:
        then = _identity(
            _with_defaults(read_yaml(path / "recipe.yaml").tree),
            json.loads(read_plain(path / "split.json", CONFIGURATION_LIMIT)),
        )
    except (ConfigError, OSError, ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"recipe.yaml or split.json in {path} cannot be read") from None
    now = _identity(yaml.load(recipe_yaml(config), Loader=Loader), json.loads(json.dumps(split)))
    found = [
        difference._replace(is_place=config.adapter is not None and difference.key in PLACES)
        for difference in _compare(then, now)
    ]
    if any(difference.key.startswith("data.") and not difference.is_place for difference in found):
        # The data is other for that very reason.
        return [difference for difference in found if difference.key != FINGERPRINT]
    return found


def _with_defaults(recipe: Tree) -> Tree:
    """A recipe written before there was some key means that key's default."""
    try:
        filled = yaml.load(recipe_yaml(RunConfig.model_validate(recipe)), Loader=Loader)
    except ValueError:  # a value that is none any more: compared as it stands
        return recipe
    return filled if isinstance(filled, dict) else recipe


def _compare(then: Any, now: Any, prefix: str = "") -> Iterator[Difference]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _compare(then.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
    elif not _is_same(then, now):
        yield Difference(prefix, then, now)


def _is_same(then: Any, now: Any) -> bool:
    """Compare two values; a secret that one of the records hides is equal to any other."""
    if then == now:
        return True
    written = re.escape(json.dumps(then, default=str)).replace(re.escape(REDACTED), ".*")
    return ".*" in written and re.fullmatch(written, json.dumps(now, default=str), re.DOTALL) is not None


def may_change(difference: Difference) -> bool:
    """Whether a run that is named by `run_dir` goes on with another value."""
    is_free = difference.key.partition(".")[0] in MAY_CHANGE and difference.key not in MAY_NOT_CHANGE
    return is_free or difference.is_place
