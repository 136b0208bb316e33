"""What is suggested, on the disk: the JSON, and a text that says why, and how to train with it."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.command_lines import Word, shell_line, train_command
from pipeline.config.loading import Tree, get_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.errors import ConfigError
from pipeline.files import GIB
from pipeline.planning.suggest import Suggestion
from pipeline.shipped import LAUNCH


def text_beside(path: Path, force: bool) -> Path:
    """Where it is said why the JSON is what it is.

    Args:
        force: Whether files that are there are written over.

    Raises:
        ConfigError: it would be the JSON itself, or one of the two is there already.
    """
    if not path.name or path.suffix.lower() == ".txt":
        raise ConfigError(
            f"--suggest {path}: the split is a JSON, beside which a .txt says why; name a .json file"
        )
    why = path.with_suffix(".txt")
    for each in () if force else (path, why):
        if each.exists():
            raise ConfigError(f"--suggest {path}: {each} is there already; name another file, or add --force")
    return why


def write(suggestion: Suggestion, path: Path, recipe: Path, command: str, force: bool = False) -> Path:
    """The JSON, and beside it a text that says why.

    Args:
        recipe: What is trained.
        command: That was typed to find it.
        force: Whether files that are there are written over.

    Returns:
        The path of the text.

    Raises:
        ConfigError: it cannot be written there, or is there already.
    """
    best = suggestion.best
    found, time = best.found, best.found.time
    assert time is not None
    why = text_beside(path, force)
    words: tuple[Word, ...] = ("--config", recipe, "--deepspeed", path, *best.overrides)
    training = train_command(found.place.per_node, *words)
    if found.place.nodes > 1:
        training = shell_line(LAUNCH / "multi_node.sh", "HOSTFILE", *words)
    text = f"""\
{path.name}: the fastest of {suggestion.fitting:,} splits that fit, of {suggestion.tried:,} tried.

{found.resolved.split}; {found.place}
offload: {", ".join(offloaded(best.json)) or "none"}; recomputation: {recomputed(found.config) or "none"}
{found.resolved.plan}
memory of the fullest rank: {found.peak / GIB:.1f} of {found.place.memory / GIB:.1f} GiB
host memory of a machine: {found.host_bytes / GIB:.0f} GiB
a step: {time.seconds:.2f} s, {time.tokens_per_second * time.gpus:,.0f} tokens/s

Found by: {command}
To train with it: {training}
"""
    try:
        path.write_text(json.dumps(best.json, indent=2) + "\n", "utf-8")
        why.write_text(text + _refused(recipe, path, best.overrides), "utf-8")
    except OSError as error:
        raise ConfigError(f"--suggest {path}: {error.strerror or error}") from None
    return why


def offloaded(tree: Tree) -> list[str]:
    """What a JSON has elsewhere than on its GPU, and where."""
    names = {"optimizer": "optimizer", "param": "weights"}
    at = {name: get_dotted(tree, f"zero_optimization.offload_{key}.device") for key, name in names.items()}
    return [f"{name} on {where}" for name, where in at.items() if where]


def recomputed(config: RunConfig) -> str:
    """What blocks compute again in the backward; empty: of a model that has none."""
    model = config.model.language_model
    if model is None:
        return ""
    return f"{model.activation_checkpointing}{', inputs on the host' if model.activation_offload else ''}"


def _refused(recipe: Path, path: Path, words: tuple[str, ...]) -> str:
    """What has to be changed first, such as a section that a JSON takes the place of; empty: nothing."""
    try:
        load_settings(recipe, path, words)
    except ConfigError as error:
        return f"That is refused as it stands: {error}\n"
    return ""
