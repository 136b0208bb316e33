"""The package's own recipes and DeepSpeed JSON files, which a command may name: `python_stdlib`, `zero2`.

The folders beside this file are links to those of the repository; a wheel holds copies in their place.
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
    """Return the path as it was given, or the shipped recipe of this name.

    Raises:
        ConfigError: it names nothing, or there is neither.
    """
    return _find("--config", given, RECIPES, (".yaml", ".yml"))


def find_deepspeed_json(given: Path) -> Path:
    """Return the path as it was given, or the shipped DeepSpeed JSON of this name.

    Raises:
        ConfigError: it names nothing, or there is neither.
    """
    return _find("--deepspeed", given, DS_CONFIGS, (".json",))


def _find(option: str, given: Path, folder: Path, suffixes: tuple[str, ...]) -> Path:
    """Prefer a file of the user's. A folder does not count: an output folder may have such a name."""
    if given == Path():  # the path of an empty text
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
        return given  # the reader says what is wrong
    here = [path.name for path in Path().iterdir() if path.suffix in suffixes]
    near = [*get_close_matches(given.name, here, n=1), *get_close_matches(given.stem, shipped, n=1)]
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    raise ConfigError(f"{option} {given}: no such file{hint}; shipped are {', '.join(shipped)}")
