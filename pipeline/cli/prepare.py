"""Command `python -m pipeline prepare --config RECIPE.yaml`: tokenises documents before the first run."""

from __future__ import annotations

import argparse
import re

from pipeline.cli.inputs import add_recipe_arguments, read_recipe
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError
from pipeline.monitoring.logs import log_to_console

HELP = "tokenise the documents of a recipe into data.cache_dir"
DESCRIPTION = """\
Tokenises the documents of a recipe into data.cache_dir, so that every run of it starts without delay. After
an interrupt, run the same command to continue. A run prepares its data by itself if this was not done."""
EPILOG = """\
On machines that share data.cache_dir, each can prepare a share of the parts; nothing has to be merged:

  sbatch --array=0-15 --wrap '%(prog)s --config R.yaml \\
      --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT'
"""
AFTER_INTERRUPT = "finished parts are kept; run the same command to continue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_recipe_arguments(parser)
    parser.add_argument(
        "--shard", metavar="i/n", help="prepare only every n-th part, from the i-th on; i is 0 to n - 1"
    )
    parser.add_argument(
        "--verify", action="store_true", help="verify the checksums of prepared data, and repair it"
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
    """Prepare the data of the recipe, or verify and repair it with `--verify`."""
    log_to_console(Ranks(0, 0, 1, 1))
    data = read_recipe(arguments).data
    shard = None if arguments.shard is None else parse_shard(arguments.shard)
    if data.documents is None:
        print(f"data of kind {data.kind} needs no preparation")
        return
    from pipeline.data.prepared import prepare_documents  # imports numpy and transformers

    prepare_documents(data.documents, shard, arguments.verify)
