"""Command `python -m pipeline generate SOURCE --prompt TEXT`: lets a language model write text."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from pipeline.cli.inputs import (
    add_overrides,
    add_source_arguments,
    open_argument_source,
    report_file_errors,
)
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError, DataError, escape_unprintable
from pipeline.files import MAX_DESCRIPTION_BYTES, read_regular_file
from pipeline.monitoring.logs import log_to_console

if TYPE_CHECKING:
    from pipeline.models.generation import GenerationSettings

HELP = "let a language model write text"
DESCRIPTION = """\
Print a prompt and its continuation by a language model. A model that was trained on conversations (data.kind:
chat, or preference with a chat template), or a folder with a chat template, gets the prompt as a user's
message; then only its answer is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    add_source_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, or message to answer")
    prompt.add_argument(
        "--messages",
        metavar="FILE",
        help="conversation to answer: a JSON list of messages with role and content, or an object with "
        "`messages`; - for stdin",
    )
    add_generation_arguments(parser)
    # Keys of data, eval, loader and batch are accepted as in `evaluate`, but few have an effect here.
    add_overrides(parser, argparse.SUPPRESS)


def add_generation_arguments(parser: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    """Add the options for the length of a text and the choice of its tokens."""
    numbers: list[tuple[str, type, Any, str]] = [
        ("--max-new-tokens", int, max_new_tokens, "length of a text at most"),
        ("--temperature", float, 0.8, "divisor of the logits; 0 always takes the likeliest token"),
        ("--top-k", int, 50, "number of likeliest tokens to draw from; 0: all"),
        ("--top-p", float, 1.0, "probability that the tokens to draw from have together"),
        ("--min-p", float, 0.0, "lowest probability to draw, as a share of the likeliest token's"),
        ("--seed", int, 0, "seed of the sampling"),
    ]
    for name, kind, default, text in numbers:
        parser.add_argument(
            name, type=kind, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends a text; may be repeated"
    )


def read_generation_settings(arguments: argparse.Namespace) -> GenerationSettings:
    """Return the settings that the options of `add_generation_arguments` give.

    Raises:
        ConfigError: A value is out of its range.
    """
    from pipeline.models.generation import GenerationSettings

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    try:
        return GenerationSettings(**{name: getattr(arguments, name) for name in names})
    except DataError as error:
        raise ConfigError("--" + str(error).replace("_", "-")) from None


def check_is_text(name: str, text: str) -> None:
    """Raise a ConfigError if a text that was typed is not UTF-8; Python reads such bytes as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: not UTF-8; set the terminal to UTF-8 (LANG=C.UTF-8)") from None


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Generate the text and print it.

    Raises:
        PipelineError: An argument is out of range, or the model cannot be found, read or used.
    """
    log_to_console(Ranks(0, 0, 1, 1))
    prompt: Any = arguments.prompt
    if prompt is None:
        prompt = _read_conversation(arguments.messages)
    else:
        check_is_text("--prompt", prompt)
    source = open_argument_source(arguments)
    settings = read_generation_settings(arguments)
    from pipeline.training.api import generate_from_source

    print(escape_unprintable(generate_from_source(source, prompt, settings, arguments.stop)))


def _read_conversation(file: str) -> dict[str, Any]:
    """Return the conversation of a file as an object with `messages`.

    Raises:
        DataError: The file has no conversation, or is no JSON.
        OSError: The file cannot be read.
    """
    content = sys.stdin.buffer.read() if file == "-" else read_regular_file(file, MAX_DESCRIPTION_BYTES)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"--messages {file} is no JSON: {error}") from None
    row = value if isinstance(value, dict) else {"messages": value}
    if not isinstance(row.get("messages"), list):
        raise DataError(
            f'--messages {file}: expected messages, such as [{{"role": "user", "content": "Hi!"}}], or an '
            "object with `messages`"
        )
    return row
