"""Command `python -m pipeline generate RUN --prompt TEXT`: lets a run's language model write text."""

from __future__ import annotations

import argparse

from pipeline.checkpoint.find import find_checkpoint
from pipeline.cli.inputs import add_checkpoint_arguments, add_overrides, report_file_errors
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError, escape_unprintable
from pipeline.monitoring.logs import log_to_console

HELP = "let a checkpoint's language model write text"
DESCRIPTION = """\
Print a prompt and its continuation by the language model of a checkpoint of any split. A model that was
trained on conversations (data.kind: chat, or preference with a chat template) gets the prompt as a user's
message in its chat template; then only its answer is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text to continue, or message to answer"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="length of the text at most (default: 128)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="divisor of the logits; 0 always takes the likeliest token (default: 0.8)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    # Keys of data, eval, loader and batch are accepted as in `evaluate`, but few have an effect here.
    add_overrides(parser, argparse.SUPPRESS)


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Generate the text and print it.

    Raises:
        PipelineError: An argument is out of range, or the checkpoint cannot be found, read or used.
    """
    log_to_console(Ranks(0, 0, 1, 1))
    if arguments.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {arguments.max_new_tokens}: expected 1 or more")
    if not 0 <= arguments.temperature <= 100:
        raise ConfigError(f"--temperature {arguments.temperature}: expected a number from 0 to 100")
    if any("\ud800" <= letter <= "\udfff" for letter in arguments.prompt):  # lone surrogates
        raise ConfigError("--prompt: not UTF-8; set the terminal to UTF-8 (LANG=C.UTF-8)")
    if not 0 <= arguments.seed < 2**32:
        raise ConfigError(f"--seed {arguments.seed}: expected 0 to 2^32 - 1")
    _, checkpoint, _ = find_checkpoint(arguments.run, arguments.step)
    from pipeline.training.api import generate

    text = generate(
        checkpoint,
        arguments.prompt,
        arguments.overrides,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        import_paths=not arguments.no_import_paths,
    )
    print(escape_unprintable(text), flush=True)
