"""python -m pipeline prepare --config RECIPE.yaml: tokenises a recipe's documents ahead of the first run."""

from __future__ import annotations

import argparse
import re

from pipeline.cli.inputs import add_recipe_arguments, read_recipe
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError
from pipeline.monitoring.logs import log_to_console

HELP = "tokenise the documents of a recipe into data.cache_dir"
DESCRIPTION = """\
Tokenises the documents of a recipe into data.cache_dir, from where every run of it starts at once. Killed or
interrupted, it goes on where it was; what is there is not made again. A run does the same by itself."""
EPILOG = """\
On many machines that share data.cache_dir, each makes its share of the parts, and nothing has to be merged:

  sbatch --array=0-15 --wrap '%(prog)s --config R.yaml \\
      --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT'
"""
AFTER_INTERRUPT = "what is finished is kept, and the same command goes on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_recipe_arguments(parser)
    parser.add_argument(
        "--shard", metavar="i/n", help="prepare only every n-th part, from the i-th on; i is 0 to n - 1"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare all that is there with its checksums, and mend it"
    )


def parse_shard(text: str) -> tuple[int, int]:
    """(index, count) of `i/n`.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--shard {text}: expected i/n with i from 0 to n - 1, as 0/16")
    return int(match[1]), int(match[2])


def run(arguments: argparse.Namespace) -> None:
    """Tokenize the recipe's data into the cache."""
    log_to_console(Ranks(0, 0, 1, 1))
    data = read_recipe(arguments).data
    shard = None if arguments.shard is None else parse_shard(arguments.shard)
    if data.documents is None:
        print(f"data of kind {data.kind} needs no preparation")
        return
    from pipeline.data.prepared import prepare_documents  # numpy and transformers come in here

    prepare_documents(data.documents, shard, arguments.verify)
