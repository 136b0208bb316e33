"""Command `python -m pipeline supports FEATURE ...`: says whether features can be used together."""

from __future__ import annotations

import argparse

from pipeline.cli.inputs import ParagraphHelpFormatter
from pipeline.config.features import FEATURES, combine_features
from pipeline.config.optional_packages import MissingPackageError
from pipeline.config.split import Device
from pipeline.errors import ConfigError

HELP = "say whether features can be used together"
DESCRIPTION = """\
Say whether features can be used together, in one line. "yes" comes with the keys that ask for them: keys with
ds. belong to the DeepSpeed JSON, the others to the recipe. You can copy them behind `train`. "no" comes with
the error that `train` would print. The exit code is 0 for yes, 1 for no and 2 for a mistake."""
EPILOG = """\
Examples:

  %(prog)s lora zero3 packed
  %(prog)s fp8 tensor"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = ParagraphHelpFormatter
    parser.add_argument("features", nargs="*", metavar="FEATURE", help="feature; without any, list them all")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer, or without features the list of them, and return the exit code.

    Raises:
        ConfigError: A name is unknown, or two features exclude each other by their meaning.
    """
    if not arguments.features:
        width = max(map(len, FEATURES))
        for group, features in FEATURES.items():
            print(f"{group:{width}}  {' '.join(features)}")
        return 0
    combined = combine_features(arguments.features)
    try:
        ranks = combined.check(Device.probe())
    except MissingPackageError as error:
        print(f"yes, once a package is installed: {combined}\n{error}")
        return 0
    except ConfigError as error:
        print(f"no: {error}")
        return 1
    print(f"yes, for example on {ranks} rank{'s' * (ranks > 1)}: {combined}")
    return 0
