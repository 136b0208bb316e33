"""Command `python -m pipeline chat SOURCE`: a conversation with a language model, in a terminal or a pipe."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.generate import add_generation_arguments, check_is_text, read_generation_settings
from pipeline.cli.inputs import (
    add_overrides,
    add_source_arguments,
    open_argument_source,
    report_file_errors,
)
from pipeline.config.loading import did_you_mean
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError, DeviceFailedError, PipelineError, escape_unprintable
from pipeline.files import replace_file
from pipeline.monitoring.logs import log_to_console

if TYPE_CHECKING:
    from pipeline.evaluation.sources import LoadedModel
    from pipeline.models.generation import GeneratedToken, GenerationSettings

HELP = "talk to a language model"
DESCRIPTION = """\
Talk to a language model. Each line is a message; a line that ends with a backslash continues in the next one.
A model without a chat template continues each line. Ctrl-C stops an answer, Ctrl-D ends, and /help lists the
commands. In a pipe there are no commands, and standard output has the answers alone."""
COMMANDS = {
    "/regenerate": "answer the last message again",
    "/reset": "forget the conversation, but not the system message",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/save FILE": "save the conversation as a row of chat data (JSON)",
    "/help": "list the commands; a message that begins with a slash needs a space before it",
    "/quit": "end, as Ctrl-D does",
}
DIM = "\x1b[2m"  # code of terminals
NOT_DIM = "\x1b[22m"
UNFINISHED_TAG = re.compile(r"[<\[]/?[A-Za-z]*\Z")
"""Pattern of an end of text that may be the beginning of a tag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    add_source_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_generation_arguments(parser, max_new_tokens=512)
    add_overrides(parser, argparse.SUPPRESS)


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Load the model, and answer messages until the input ends.

    Raises:
        PipelineError: An argument is out of range, or the model cannot be found, loaded or used.
    """
    log_to_console(Ranks(0, 0, 1, 1), "warning")
    if sys.stdin is None or sys.stdout is None:
        raise ConfigError("standard input or output is closed; open both, such as with </dev/null")
    source = open_argument_source(arguments)
    settings = read_generation_settings(arguments)
    from pipeline.distributed.process_group import start_job

    chat = Chat(source.load(start_job(Ranks(0, 0, 1, 1), distributed=False)), settings, arguments.stop)
    chat.set_system(arguments.system or "")
    chat.run()


class ReasoningDimmer:
    """Puts codes around the text between tags of reasoning, by which a terminal dims it."""

    def __init__(self) -> None:
        from pipeline.data.chat_template import REASONING_TAGS  # imports numpy

        self._tag = re.compile(REASONING_TAGS.pattern.replace("<", "</?").replace(r"\[", r"\[/?"))
        self._pending = ""  # may be the beginning of a tag
        self._is_dim = False

    def push(self, text: str, is_end: bool = False) -> str:
        """Return the text with codes. The beginning of a possible tag is returned later, or if `is_end`."""
        text = self._pending + text
        unfinished = None if is_end else UNFINISHED_TAG.search(text)
        end = unfinished.start() if unfinished else len(text)
        self._pending = text[end:]
        dimmed = self._tag.sub(self._mark, text[:end])
        return dimmed + NOT_DIM if is_end and self._is_dim else dimmed

    def _mark(self, tag: re.Match[str]) -> str:
        begins = tag[0][1] != "/"
        if begins == self._is_dim:
            return tag[0]
        self._is_dim = begins
        return DIM + tag[0] if begins else tag[0] + NOT_DIM


class Chat:
    """A conversation with a model, or single texts that a model without a chat template continues.

    In a terminal, a line may be a command, and Ctrl-C stops an answer. An answer is stored with its
    reasoning; the chat template decides whether it is sent again.

    Args:
        model: The model.
        settings: Settings for the choice of each token.
        stop: Texts that end an answer.
    """

    def __init__(self, model: LoadedModel, settings: GenerationSettings, stop: list[str]) -> None:
        from pipeline.evaluation.conversation import ChatFormat, TextStream

        self._model = model
        self._settings = settings
        self._format = ChatFormat(model.tokenizer) if model.is_conversational else None
        self._make_stream = partial(TextStream, model.tokenizer, end_ids=model.end_ids, stop=stop)
        self._system: list[dict[str, str]] = []
        self._messages: list[dict[str, str]] = []  # questions and their answers in turn
        self._sample = 0
        self._has_left_out = False  # whether the last prompt was without the oldest messages
        self._saved: Path | None = None  # file of this conversation, which may be replaced
        self._is_answering = False
        self._is_interrupted = False  # whether Ctrl-C was pressed after the last line was read
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._dims = self._is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def set_system(self, text: str) -> None:
        """Set the system message; an empty text removes it.

        Raises:
            ConfigError, DataError: The model has no chat template, or its template refuses a system message.
        """
        system = [{"role": "system", "content": text}] if text else []
        if system:
            if self._format is None:
                raise ConfigError("a model without a chat template takes no system message; leave it out")
            self._format.render([*system, {"role": "user", "content": "?"}])
        self._system = system

    def run(self) -> None:
        """Answer messages until the input ends.

        Raises:
            PipelineError: Without a terminal, a message cannot be answered.
            KeyboardInterrupt: Ctrl-C was pressed twice, or there is no terminal.
        """
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        if self._is_terminal:
            signal.signal(signal.SIGINT, self._interrupt)
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` a history and editing
            parameter = next(self._model.engine.module.parameters())
            dtype = str(parameter.dtype).removeprefix("torch.")
            print(f"{self._model.name}, {dtype} on {parameter.device}; Ctrl-D ends, /help lists commands")
            if self._format is None:
                print("this model has no chat template: it continues each line")
        while True:
            try:
                text = self._read_message()
                self._is_interrupted = False
                check_is_text("message", text)
                if self._is_terminal and text.startswith("/"):
                    self._run_command(text)
                elif text.strip():
                    self._sample = 0
                    self._answer([*self._messages, {"role": "user", "content": text}])
            except EOFError:
                print(end="\n" if self._is_terminal else "")
                return
            except KeyboardInterrupt:
                if self._is_interrupted or not self._is_terminal:
                    raise
                self._is_interrupted = True
                print("\nCtrl-C again or Ctrl-D ends")
            except PipelineError as error:
                if not self._is_terminal or isinstance(error, DeviceFailedError):
                    raise
                print(f"error: {error}", file=sys.stderr, flush=True)

    def _read_message(self) -> str:
        """Return a line with those that continue it."""
        text = input("> " if self._is_terminal else "")
        while text.endswith("\\"):
            text = text.removesuffix("\\")
            with suppress(EOFError):
                text += "\n" + input("... " if self._is_terminal else "")
        return text

    def _run_command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        match name:
            case "/regenerate":
                if not self._messages:
                    raise ConfigError("/regenerate: there is no answer yet; write a message")
                self._sample += 1
                self._answer(self._messages[:-1])
            case "/reset":
                self._messages = []
            case "/system":
                self.set_system(argument.strip())
            case "/save":
                self._save(argument.strip())
            case "/help":
                print("\n".join(f"{command:14}{text}" for command, text in COMMANDS.items()))
            case "/quit":
                raise EOFError
            case _:
                names = [command.split()[0] for command in COMMANDS]
                raise ConfigError(f"{name} is no command{did_you_mean(name, names)}")

    def _save(self, name: str) -> None:
        if not name or not self._messages:
            problem = "there is no message yet" if name else "name a file, such as /save talk.json"
            raise ConfigError(f"/save: {problem}")
        path = Path(name).expanduser()
        if path.exists() and path != self._saved:
            raise ConfigError(f"/save: {path} exists; choose another name")
        messages = [*self._system, *self._messages]
        try:
            replace_file(path, json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"/save: {path}: {error.strerror or error}") from None
        self._saved = path
        print(f"saved {len(messages)} messages to {path}")

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Show the answer to the last message as it is generated, and store the messages with it."""
        from pipeline.evaluation.conversation import find_opened_reasoning
        from pipeline.training.api import translate_device_failures
        from pipeline.training.device_failures import advise_on_generation

        self._is_answering = True
        dimmer = ReasoningDimmer()
        answer = ""

        def show(text: str, is_end: bool = False) -> None:
            nonlocal answer
            answer += text
            text = escape_unprintable(text)
            print(dimmer.push(text, is_end) if self._dims else text, end="", flush=True)

        def on_token(_: int, token: GeneratedToken) -> bool:
            if not self._is_interrupted:
                show(stream.push(token.id))
            return self._is_interrupted or stream.finish_reason is not None

        try:
            ids, settings = self._fit(messages)
            # Without a template, the text continues the prompt's last word.
            stream = self._make_stream(prompt_ids=() if self._format else ids)
            if self._format is not None:
                show(find_opened_reasoning(self._model.tokenizer.decode(ids)))
            advise = partial(advise_on_generation, settings.max_new_tokens)
            with translate_device_failures(self._model.engine.device, advise):
                self._model.engine.generate([ids], settings, on_token)
            show(stream.finish())
        finally:
            show("", is_end=True)
            print(end="\n" if answer and not answer.endswith("\n") else "", flush=True)
            self._is_answering = False
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        if self._is_interrupted:
            _print_note("stopped; the conversation has the answer up to here")
        elif self._format is not None and stream.finish_reason == "length":
            _print_note(f"the answer was cut after {settings.max_new_tokens:,} tokens")

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[int], GenerationSettings]:
        """Return the prompt's ids and the answer's settings. A long prompt loses its oldest messages."""
        from pipeline.evaluation.samples import encode_text, limit_length

        settings = replace(self._settings, sample=self._sample)
        limit = self._model.max_positions
        if self._format is None:
            ids = encode_text(self._model.tokenizer, messages[-1]["content"])
            return ids, limit_length(settings, ids, limit)
        # An answer needs all its tokens, or a quarter of the model's positions.
        for num_left_out in range(0, len(messages), 2):
            ids = self._format.render([*self._system, *messages[num_left_out:]])
            if limit is None or len(ids) + min(settings.max_new_tokens, limit // 4) <= limit:
                break
        settings = limit_length(settings, ids, limit)
        if num_left_out and not self._has_left_out:
            _print_note(
                f"the conversation is longer than the model's {limit:,} positions: its oldest messages, now "
                f"{num_left_out}, are left out from here on"
            )
        self._has_left_out = num_left_out > 0
        return ids, settings

    def _interrupt(self, *_: object) -> None:
        """Handle Ctrl-C in a terminal: an answer ends after its next token."""
        if self._is_interrupted or not self._is_answering:
            raise KeyboardInterrupt
        self._is_interrupted = True


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
