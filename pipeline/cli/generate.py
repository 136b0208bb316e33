"""Command `python -m pipeline generate SOURCE --prompt TEXT`: lets a language model write text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipeline.cli.inputs import add_overrides, add_source_arguments, report_file_errors
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError, DataError, escape_unprintable
from pipeline.evaluation.sources import open_source
from pipeline.files import MAX_DESCRIPTION_BYTES, read_regular_file
from pipeline.monitoring.logs import log_to_console

HELP = "let a language model write text"
DESCRIPTION = """\
Print a prompt and its continuation by a language model. A model that was trained on conversations (data.kind:
chat, or preference with a chat template), or a folder with a chat template, gets the prompt as a user's
message; then only its answer is printed. For each conversation of a .jsonl file, one line of JSON is printed:
the conversation with its answer."""


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
        "`messages`; several in a .jsonl file; - for stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt or conversation")
    add_generation_arguments(parser)
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="number of texts for each prompt (default: 1)"
    )
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


def check_generation_arguments(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError if a value of `add_generation_arguments` is out of its range."""
    for name, is_allowed, expected in (
        ("max_new_tokens", arguments.max_new_tokens >= 1, "1 or more"),
        ("temperature", 0 <= arguments.temperature <= 100, "a number from 0 to 100"),
        ("top_k", arguments.top_k >= 0, "0 or more; 0 draws from all tokens"),
        ("top_p", 0 < arguments.top_p <= 1, "a number above 0, and 1 at most"),
        ("min_p", 0 <= arguments.min_p <= 1, "a number from 0 to 1"),
        ("seed", 0 <= arguments.seed < 2**32, "0 to 2^32 - 1"),
    ):
        if not is_allowed:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {getattr(arguments, name)}: expected {expected}")


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Generate the texts and print them.

    Raises:
        PipelineError: An argument is out of range, or the model cannot be found, read or used.
    """
    log_to_console(Ranks(0, 0, 1, 1))
    check_generation_arguments(arguments)
    if arguments.samples < 1:
        raise ConfigError(f"--samples {arguments.samples}: expected 1 or more")
    for name in ("prompt", "system"):
        if any(
            "\ud800" <= letter <= "\udfff" for letter in getattr(arguments, name) or ""
        ):  # lone surrogates
            raise ConfigError(f"--{name}: not UTF-8; set the terminal to UTF-8 (LANG=C.UTF-8)")
    prompts: list[Any] = [arguments.prompt]
    are_lines = False
    if arguments.messages is not None:
        prompts, are_lines = _read_conversations(arguments.messages)
    if arguments.system is not None:
        prompts = [_add_system_message(prompt, arguments.system) for prompt in prompts]
    source = open_source(
        arguments.source,
        arguments.step,
        arguments.overrides,
        base=arguments.base,
        import_paths=not arguments.no_import_paths,
    )
    from pipeline.models.generation import GenerationSettings
    from pipeline.training.api import generate_from_source

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    settings = GenerationSettings(**{name: getattr(arguments, name) for name in names})
    texts = generate_from_source(source, prompts, settings, arguments.stop, arguments.samples)
    for row, samples in zip(prompts, texts, strict=True):
        for number, text in enumerate(samples, start=1):
            if are_lines:
                answered = [*row["messages"], {"role": "assistant", "content": text}]
                print(json.dumps(row | {"messages": answered}), flush=True)
                continue
            if len(samples) > 1:
                print(f"--- sample {number} of {len(samples)} ---")
            print(escape_unprintable(text), flush=True)


def _read_conversations(file: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a file, each with `messages`, and whether it has one row in each line.

    Raises:
        DataError: The file has no conversation, or is no JSON.
        OSError: The file cannot be read.
    """
    name = "--messages -" if file == "-" else f"--messages {file}"
    content = sys.stdin.buffer.read() if file == "-" else read_regular_file(file, MAX_DESCRIPTION_BYTES)
    are_lines = Path(file).suffix == ".jsonl"
    pieces = [line for line in content.splitlines() if line.strip()] if are_lines else [content]
    rows = []
    for number, piece in enumerate(pieces, start=1):
        where = f"{name}, line {number}" if are_lines else name
        try:
            found = json.loads(piece)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} is no JSON: {error}; several conversations need a .jsonl file"
            ) from None
        row = found if isinstance(found, dict) else {"messages": found}
        messages = row.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise DataError(
                f'{where}: expected messages, such as [{{"role": "user", "content": "Hi!"}}], or an object '
                "with `messages`"
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{name} has no conversation; write one in each line")
    return rows, are_lines


def _add_system_message(prompt: str | dict[str, Any], text: str) -> dict[str, Any]:
    """Return a conversation that begins with a system message.

    Raises:
        ConfigError: It has one already.
    """
    row = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else prompt
    if row["messages"][0].get("role") == "system":
        raise ConfigError("--system: the conversation begins with a system message already; give one of them")
    return row | {"messages": [{"role": "system", "content": text}, *row["messages"]]}
