"""What a command is given: a recipe, or the folder of a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.recipe import OPTION
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.errors import PipelineError


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """`--config`, `--no-import-paths` and overrides."""
    parser.add_argument("--config", type=Path, metavar="RECIPE.yaml", required=True, help="recipe")
    parser.add_argument(OPTION, action="store_true", help="refuse a recipe that names code to run")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="recipe keys, as data.sequence_length=512",
    )


def read_recipe(arguments: argparse.Namespace) -> RunConfig:
    """The recipe that these arguments name."""
    import_paths = not arguments.no_import_paths
    return load_settings(arguments.config, None, arguments.overrides, import_paths=import_paths).config


@contextmanager
def reading_a_run() -> Iterator[None]:
    """Around a command that looks at a run: files that cannot be read, or named, are bad input there."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise PipelineError(f"{where}{error.strerror or error}") from None
