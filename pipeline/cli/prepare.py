"""Command `python -m pipeline prepare --config RECIPE.yaml`: tokenises documents before the first run."""

from __future__ import annotations

import argparse
import re

from pipeline.cli.inputs import ParagraphHelpFormatter, add_recipe_arguments, read_recipe
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError
from pipeline.monitoring.logs import log_to_console

HELP = "tokenise the documents of a recipe into data.cache_dir"
DESCRIPTION = """\
Tokenise the documents of a recipe into data.cache_dir, so that runs of the recipe start without delay. After
an interrupt, run the same command to continue. This command is optional: a run prepares what is missing."""
EPILOG = """\
Machines that share data.cache_dir can divide the work. Each prepares some of the parts, and nothing has to be
merged afterwards:

  sbatch --array=0-15 --wrap '%(prog)s --config R.yaml \\
      --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT'
"""
AFTER_INTERRUPT = "finished parts remain; run the same command to continue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = ParagraphHelpFormatter
    add_recipe_arguments(parser)
    parser.add_argument(
        "--shard", metavar="i/n", help="prepare only parts i, i + n, i + 2n, ...; i is 0 to n - 1"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare prepared data with its checksums, and prepare damaged parts again",
    )


def parse_shard(text: str) -> tuple[int, int]:
    """Return (index, count) of a text `i/n`.

    Raises:
        ConfigError: The text has another form, or the index is not below the count.
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--shard {text}: expected i/n with i from 0 to n - 1, such as 0/16")
    return int(match[1]), int(match[2])


def run(arguments: argparse.Namespace) -> None:
    """Prepare the data of the recipe; with `--verify`, also compare what is prepared with its checksums.

    Raises:
        PipelineError: The recipe or `--shard` is invalid, or the data cannot be read or written.
    """
    log_to_console(Ranks(0, 0, 1, 1))
    data = read_recipe(arguments).data
    shard = None if arguments.shard is None else parse_shard(arguments.shard)
    if data.documents is None:
        print(f"data of kind {data.kind} needs no preparation")
        return
    from pipeline.data.prepared import prepare_documents  # imports numpy and transformers

    prepare_documents(data.documents, shard, arguments.verify)
