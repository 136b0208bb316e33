"""Adds the command-line arguments that commands share, and reports errors of files in one line."""

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
from pipeline.evaluation.sources import ModelSource, open_source
from pipeline.planner.shapes import check_pretrained

PATH_OR_NAME = "a path, or the name of a shipped file"
"""Help text of options that take a file."""


class ParagraphHelpFormatter(argparse.HelpFormatter):
    """Help formatter that wraps the paragraphs of a description or epilog, and keeps indented lines.

    Paragraphs are separated by empty lines. A paragraph that begins with a space is a command to copy.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.strip("\n").split("\n\n"):
            if paragraph.startswith(" "):
                filled.append(paragraph)
            else:
                filled.append(super()._fill_text(paragraph, width, indent))
        return "\n\n".join(filled)


def add_recipe_arguments(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Add `--config`, `--no-import-paths` and overrides."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="RECIPE.yaml",
        required=is_required,
        help=f"recipe; {PATH_OR_NAME}",
    )
    add_overrides(parser, "recipe keys, such as data.sequence_length=512")


def add_source_arguments(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Add `SOURCE`, `--step` and `--base`, which together name a model for `open_source`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs=None if is_required else "?",
        help="run directory, one of its checkpoints, exported folder (transformers or peft), or hub name",
    )
    parser.add_argument(
        "--step", help="checkpoint of a run: a step, `last` (default) or `best`", default="last"
    )
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="base of an adapter's folder, if it is not where the folder's adapter_config.json says",
    )


def open_argument_source(arguments: argparse.Namespace) -> ModelSource:
    """Return the model that the arguments of `add_source_arguments` and `add_overrides` name.

    Raises:
        PipelineError: See `open_source`.
    """
    return open_source(
        arguments.source,
        arguments.step,
        arguments.overrides,
        base=arguments.base,
        import_paths=not arguments.no_import_paths,
    )


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """Add `--no-import-paths` and overrides of the recipe's keys.

    Args:
        parser: Parser to add them to.
        help: Help text of the overrides; `argparse.SUPPRESS` leaves them out of the help.
    """
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
    """Turn an OSError into a PipelineError, which is printed as one line without a traceback.

    Use it for commands in which a file that cannot be read or written is a mistake of the user, and not a
    fault of the program.

    Raises:
        PipelineError: The body raised an OSError other than a lack of memory.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:  # pipeline/__main__.py reports a lack of memory
            raise
        file_name = f"{error.filename}: " if error.filename else ""
        raise PipelineError(f"{file_name}{error.strerror or error}") from None
