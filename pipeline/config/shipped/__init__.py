"""Recipes and DeepSpeed JSON files of the package. Commands find them by name: `python_stdlib`, `zero2`.

The folders beside this file are links to those of the repository; a wheel contains copies.
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
    """Return the path of the user's recipe, or of the shipped recipe of this name.

    Args:
        given: Value of --config.

    Raises:
        ConfigError: The path is empty, or there is no such recipe.
    """
    return _find_file("--config", given, RECIPES, (".yaml", ".yml"))


def find_deepspeed_json(given: Path) -> Path:
    """Return the path of the user's DeepSpeed JSON, or of the shipped file of this name.

    Args:
        given: Value of --deepspeed.

    Raises:
        ConfigError: The path is empty, or there is no such file.
    """
    return _find_file("--deepspeed", given, DS_CONFIGS, (".json",))


def _find_file(option: str, given: Path, folder: Path, suffixes: tuple[str, ...]) -> Path:
    """Return the user's file if it exists, else the shipped file of this name.

    A folder of that name does not count as the user's file, since an output folder may have the name.

    Args:
        option: Option of the command, for errors.
        given: Value of the option.
        folder: Folder of the shipped files.
        suffixes: Suffixes of the user's files; shipped files have the first one.
    """
    if given == Path():  # the option was given an empty text, or "."
        raise ConfigError(f"{option}: empty, or the folder '.'; name a file")
    if given.suffix not in ("", *suffixes) or (given.exists() and not given.is_dir()):
        return given
    shipped = {path.stem: path for path in sorted(folder.glob(f"*{suffixes[0]}"))}
    shipped_file = shipped.get(given.stem)
    is_in_folder = len(given.parts) > 1
    if is_in_folder and shipped_file is not None:
        raise ConfigError(f"{given}: no such file; for the shipped one: {option} {given.stem}")
    if shipped_file is not None:
        return shipped_file
    if is_in_folder or given.is_dir():
        return given  # reading it fails, with an error that names the problem
    local_names = [path.name for path in Path().iterdir() if path.suffix in suffixes]
    near = [*get_close_matches(given.name, local_names, n=1), *get_close_matches(given.stem, shipped, n=1)]
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    raise ConfigError(f"{option} {given}: no such file{hint}; shipped are {', '.join(shipped)}")
