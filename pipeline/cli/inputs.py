"""Arguments that commands share: a recipe, a run or one of its checkpoints, overrides."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.recipe import NO_IMPORT_PATHS
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.errors import PipelineError
from pipeline.planner.shapes import check_pretrained


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and the arguments of add_overrides."""
    parser.add_argument("--config", type=Path, metavar="RECIPE.yaml", required=True, help="recipe")
    add_overrides(parser, "recipe keys, such as data.sequence_length=512")


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `RUN` and `--step`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, or one of its checkpoints")
    parser.add_argument("--step", help="which checkpoint: a step, `last` (default) or `best`", default="last")


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """Add `--no-import-paths` and overrides of the recipe's keys."""
    parser.add_argument(NO_IMPORT_PATHS, action="store_true", help="refuse a recipe that names code to run")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def read_recipe(arguments: argparse.Namespace) -> RunConfig:
    """Return the recipe that the arguments name.

    Raises:
        ConfigError, ModelError: The recipe is invalid, or names a pretrained model that cannot be read.
    """
    import_paths = not arguments.no_import_paths
    config = load_settings(arguments.config, None, arguments.overrides, import_paths=import_paths).config
    check_pretrained(config)
    return config


@contextmanager
def report_file_errors() -> Iterator[None]:
    """Turn an OSError of a command that reads a run into a PipelineError, which prints one line.

    A file that cannot be read is a mistake of the user there, and not a fault of the program.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:  # a lack of memory, which pipeline/__main__.py reports
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise PipelineError(f"{where}{error.strerror or error}") from None
