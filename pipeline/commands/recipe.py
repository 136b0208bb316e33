"""What every command that reads a recipe has in common: its arguments, and how a mistake ends it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from pipeline.config.recipe import OPTION
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.distributed.ranks import Ranks
from pipeline.errors import report_errors
from pipeline.logs import log_to_console


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


def run_with_recipe(
    arguments: argparse.Namespace, work: Callable[[RunConfig], None], interrupted: str
) -> int:
    """Does `work` with the recipe. Exit code: 0 done, 2 bad input, 130 Ctrl-C (`interrupted` is said)."""
    log_to_console(Ranks(0, 0, 1, 1))

    def load_and_work() -> None:
        import_paths = not arguments.no_import_paths
        settings = load_settings(arguments.config, None, arguments.overrides, import_paths=import_paths)
        work(settings.config)

    return report_errors(load_and_work, interrupted)
