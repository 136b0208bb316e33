"""Recipes and DeepSpeed JSON files of the package, which a command finds by name: `python_stdlib`, `zero2`.

The folders beside this file link to those of the repository; a wheel contains copies of them.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from pipeline.errors import ConfigError

DS_CONFIGS = (Path(__file__).parent / "ds_configs").resolve()
LAUNCH = (Path(__file__).parent / "launch").resolve()
RECIPES = LAUNCH / "recipes"
DEFAULT_RECIPE = RECIPES / "python_stdlib.yaml"


def find_recipe(given: Path) -> Path:
    """Return the given path, or the path of the shipped recipe of this name.

    Raises:
        ConfigError: The path is empty, or neither exists.
    """
    return _find_file("--config", given, RECIPES, (".yaml", ".yml"))


def find_deepspeed_json(given: Path) -> Path:
    """Return the given path, or the path of the shipped DeepSpeed JSON of this name.

    Raises:
        ConfigError: The path is empty, or neither exists.
    """
    return _find_file("--deepspeed", given, DS_CONFIGS, (".json",))


def _find_file(option: str, given: Path, folder: Path, suffixes: tuple[str, ...]) -> Path:
    """Return a file of the user if there is one, else the shipped file of this name.

    A folder of the name does not count, since an output folder may be called so.
    """
    if given == Path():  # the option was given an empty text, or "."
        raise ConfigError(f"{option}: empty, or the folder '.'; name a file")
    if given.suffix not in ("", *suffixes) or (given.exists() and not given.is_dir()):
        return given
    shipped = {path.stem: path for path in sorted(folder.glob(f"*{suffixes[0]}"))}
    found = shipped.get(given.stem)
    if len(given.parts) > 1 and found is not None:
        raise ConfigError(f"{given}: no such file; for the shipped one: {option} {given.stem}")
    if found is not None:
        return found
    if len(given.parts) > 1 or given.is_dir():
        return given  # reading it fails, with an error that names the problem
    here = [path.name for path in Path().iterdir() if path.suffix in suffixes]
    near = [*get_close_matches(given.name, here, n=1), *get_close_matches(given.stem, shipped, n=1)]
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    raise ConfigError(f"{option} {given}: no such file{hint}; shipped are {', '.join(shipped)}")
