"""Command `python -m pipeline chat SOURCE`: a conversation with a language model, in a terminal or a pipe."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.generate import add_generation_arguments, check_generation_arguments
from pipeline.cli.inputs import add_overrides, add_source_arguments, report_file_errors
from pipeline.data.chat_template import REASONING_TAGS
from pipeline.distributed.ranks import Ranks
from pipeline.errors import UNPRINTABLE, ConfigError, DeviceFailedError, ModelError, PipelineError
from pipeline.evaluation.sources import open_source
from pipeline.files import MAX_DESCRIPTION_BYTES, read_regular_file, replace_file
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
    "/help": "list the commands; a message that begins with a slash is written with two",
    "/quit": "end, as Ctrl-D does",
}
DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"
END_TAGS = REASONING_TAGS.pattern.replace("<", "</").replace(r"\[", r"\[/")
ANY_TAG = re.compile(f"(?P<begin>{REASONING_TAGS.pattern})|{END_TAGS}")
UNFINISHED_TAG = re.compile(r"[<\[]/?[A-Za-z]*\Z")


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
    check_generation_arguments(arguments)
    if sys.stdin is None:
        raise ConfigError("standard input is closed; messages are read from it")
    source = open_source(
        arguments.source,
        arguments.step,
        arguments.overrides,
        base=arguments.base,
        import_paths=not arguments.no_import_paths,
    )
    from pipeline.distributed.process_group import start_job
    from pipeline.models.generation import GenerationSettings

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    settings = GenerationSettings(**{name: getattr(arguments, name) for name in names})
    model = source.load(start_job(Ranks(0, 0, 1, 1), distributed=False))
    chat = Chat(model, settings, arguments.stop)
    if arguments.system is not None:
        chat.set_system(arguments.system)
    try:
        Dialogue(chat).run()
    except BrokenPipeError:  # such as of `| head`, which reads no further answers
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Chat:
    """A conversation with a model, or single texts that a model without a chat template continues.

    An answer is stored with its reasoning; the chat template decides whether it is sent again.

    Args:
        model: The model.
        settings: Settings for the choice of each token.
        stop: Texts that end an answer.

    Attributes:
        system: List of the system message; empty for none.
        messages: Messages after the system message, the oldest first.
        was_stopped: Whether Ctrl-C ended the last answer.

    Raises:
        DataError: A stop text is empty, or the chat template is not valid.
    """

    def __init__(self, model: LoadedModel, settings: GenerationSettings, stop: list[str]) -> None:
        from pipeline.evaluation.conversation import ChatFormat, TextStream

        self.model = model
        self.system: list[dict[str, str]] = []
        self.messages: list[dict[str, str]] = []
        self.was_stopped = False
        self._settings = settings
        self._format = ChatFormat(model.tokenizer) if model.is_conversational else None
        self._make_stream = partial(TextStream, model.tokenizer, end_ids=model.end_ids, stop=stop)
        self._make_stream()  # checks the stop texts
        self._sample = 0
        self._has_left_out = False

    def set_system(self, text: str) -> None:
        """Set the system message; an empty text removes it.

        Raises:
            ConfigError, DataError: The model has no chat template, or its template refuses a system message.
        """
        if self._format is None:
            raise ConfigError("a model without a chat template takes no system message; leave it out")
        system = [{"role": "system", "content": text}] if text else []
        self._format.write([*system, {"role": "user", "content": "?"}])
        self.system = system

    def ask(self, text: str, show: Callable[[str], None]) -> str:
        """Add a message and its answer, and return a note about the answer; empty for none.

        Args:
            text: Message, or text to continue.
            show: Called with each further part of the answer.

        Raises:
            PipelineError: The message is too long, the template refuses it, or the device failed.
        """
        self._sample = 0
        return self._answer([*self.messages, {"role": "user", "content": text}], show)

    def regenerate(self, show: Callable[[str], None]) -> str:
        """Replace the last answer by another sample; see `ask`."""
        if not self.messages:
            raise ConfigError("/regenerate: there is no answer yet; write a message")
        self._sample += 1
        return self._answer(self.messages[:-1], show)

    def _answer(self, messages: list[dict[str, str]], show: Callable[[str], None]) -> str:
        """Answer the last message, and store the messages unless nothing of the answer was shown."""
        from pipeline.training.device_failures import advise_on_generation, explain_failure

        self.was_stopped = False
        with _delay_interrupt():  # the template's process would answer the next request with this text
            ids, begun = self._fit(messages)
        max_new_tokens = self._settings.max_new_tokens
        if self.model.max_positions is not None:
            max_new_tokens = min(max_new_tokens, self.model.max_positions - len(ids))
        settings = replace(self._settings, max_new_tokens=max_new_tokens, sample=self._sample)
        # Without a template, the text continues the prompt's last word.
        stream = self._make_stream(prompt_ids=() if self._format else ids)
        parts: list[str] = []

        def emit(text: str) -> None:
            parts.append(text)
            show(text)

        def on_token(_: int, token: GeneratedToken) -> bool:
            emit(stream.push(token.id))
            return stream.finish_reason is not None

        try:
            emit(begun)
            self.model.engine.generate([ids], settings, on_token)
            emit(stream.finish())
        except KeyboardInterrupt:
            self.was_stopped = True
            if not any(parts[1:]):
                return "stopped before the answer began; the conversation is as before"
        except Exception as error:
            advise = partial(advise_on_generation, max_new_tokens)
            explained = explain_failure(error, self.model.engine.device, advise)
            if explained is None:
                raise
            raise explained from error
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]
        if self.was_stopped:
            return "stopped; the conversation has the answer up to here"
        is_cut = self._format is not None and stream.finish_reason == "length"
        return f"the answer was cut after {max_new_tokens:,} tokens" if is_cut else ""

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[int], str]:
        """Return the ids of a prompt with room for an answer, and the text that begins the answer in it.

        If the conversation is too long, the oldest messages after the system message are left out.

        Raises:
            ModelError: The last message alone is too long.
        """
        from pipeline.evaluation.conversation import find_opened_reasoning

        positions = self.model.max_positions or sys.maxsize
        starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
        for start in starts if self._format else starts[-1:]:
            text = ""
            if self._format is None:  # after an empty text, the model begins a new document
                tokenizer = self.model.tokenizer
                ids = tokenizer(messages[start]["content"])["input_ids"] or [tokenizer.eos_token_id]
            else:
                text = self._format.write([*self.system, *messages[start:]])
                ids = self._format.encode(text)
            room = 1 if start == starts[-1] else min(self._settings.max_new_tokens, positions // 4)
            if len(ids) + room > positions:
                continue
            is_shortened = self._format is not None and start > 0
            if is_shortened and not self._has_left_out:
                _print_note(
                    f"the conversation is longer than the model's {positions:,} positions: its oldest "
                    f"messages, now {start}, are left out from here on"
                )
            self._has_left_out = is_shortened
            return ids, find_opened_reasoning(text)
        raise ModelError(
            f"the message has {len(ids):,} tokens, and the model takes {positions:,} with its answer; "
            "shorten it"
        )


class ReasoningDimmer:
    """Dims the text between tags of reasoning by codes of terminals."""

    def __init__(self) -> None:
        self._held = ""  # may be the beginning of a tag
        self._is_dim = False

    def push(self, text: str, is_end: bool = False) -> str:
        """Return further text with codes; at the end, all that is left."""
        text = self._held + text
        unfinished = None if is_end else UNFINISHED_TAG.search(text)
        end = unfinished.start() if unfinished else len(text)
        self._held = text[end:]
        shown = ANY_TAG.sub(self._mark, text[:end])
        return shown + NOT_DIM if is_end and self._is_dim else shown

    def _mark(self, tag: re.Match[str]) -> str:
        begins = tag["begin"] is not None
        if begins == self._is_dim:
            return tag[0]
        self._is_dim = begins
        return DIM + tag[0] if begins else tag[0] + NOT_DIM


class Dialogue:
    """Reads messages and commands, and shows answers. Without a terminal there are no commands."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._dims = self._is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def run(self) -> None:
        """Answer messages until the input ends.

        Raises:
            PipelineError: Without a terminal, a message cannot be answered.
            KeyboardInterrupt: Ctrl-C was pressed twice, or there is no terminal.
        """
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` a history and editing
            model = self._chat.model
            parameter = next(model.engine.module.parameters())
            dtype = str(parameter.dtype).removeprefix("torch.")
            print(f"{model.name}, {dtype} on {parameter.device}; Ctrl-D ends, /help lists commands")
            if not model.is_conversational:
                print("this model has no chat template: it continues each line")
        was_interrupted = False
        is_open = True
        while is_open:
            try:
                message = self._read_message()
                was_interrupted = False
                is_open = self._handle(message)
                was_interrupted = self._chat.was_stopped
            except EOFError:
                print(end="\n" if self._is_terminal else "")
                is_open = False
            except KeyboardInterrupt:
                if was_interrupted or not self._is_terminal:
                    raise
                was_interrupted = True
                print("\nCtrl-C again or Ctrl-D ends")
            except PipelineError as error:
                if not self._is_terminal or isinstance(error, DeviceFailedError):
                    raise
                print(f"error: {error}", file=sys.stderr, flush=True)

    def _read_message(self) -> str:
        """Return a line with those that continue it.

        Raises:
            EOFError: There is none.
        """
        lines = [input("> " if self._is_terminal else "")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            try:
                lines.append(input("... " if self._is_terminal else ""))
            except EOFError:
                break
        return "\n".join(lines)

    def _handle(self, text: str) -> bool:
        """Answer a message or run a command, and return whether to continue.

        Raises:
            PipelineError: The message cannot be answered, or the command cannot be run.
        """
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # lone surrogates
            raise ConfigError("the message is not UTF-8; set the terminal to UTF-8 (LANG=C.UTF-8)")
        if self._is_terminal and text.startswith("/") and not text.startswith("//"):
            return self._run_command(text)
        if self._is_terminal and text.startswith("//"):
            text = text.removeprefix("/")
        if text.strip():
            self._show_answer(partial(self._chat.ask, text))
        return True

    def _show_answer(self, generate: Callable[[Callable[[str], None]], str]) -> None:
        dimmer = ReasoningDimmer()
        last = "\n"

        def show(text: str, is_end: bool = False) -> None:
            nonlocal last
            text = UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
            last = text or last
            print(dimmer.push(text, is_end) if self._dims else text, end="", flush=True)

        note = ""
        try:
            note = generate(show)
        finally:
            show("", is_end=True)
            print(end="" if last.endswith("\n") else "\n", flush=True)
        if note:
            _print_note(note)

    def _run_command(self, line: str) -> bool:
        """Run a command, and return whether to continue."""
        name, _, rest = line.partition(" ")
        match name:
            case "/regenerate":
                self._show_answer(self._chat.regenerate)
            case "/reset":
                self._chat.messages = []
            case "/system":
                self._chat.set_system(rest.strip())
            case "/save":
                self._save(rest.strip())
            case "/help":
                print("\n".join(f"{command:14}{text}" for command, text in COMMANDS.items()))
            case "/quit":
                return False
            case _:
                names = [command.split()[0] for command in COMMANDS]
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else "/help lists the commands"
                raise ConfigError(f"{name} is no command; {hint}")
        return True

    def _save(self, name: str) -> None:
        """Write the conversation to a file. Only a file with a conversation is replaced."""
        if not name or not self._chat.messages:
            problem = "there is no message yet" if name else "name a file, such as /save talk.json"
            raise ConfigError(f"/save: {problem}")
        path = Path(name).expanduser()
        if path.exists() and not _has_conversation(path):
            raise ConfigError(f"/save: {path} exists and is no conversation; choose another name")
        messages = [*self._chat.system, *self._chat.messages]
        try:
            replace_file(path, json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"/save: {path}: {error.strerror or error}") from None
        print(f"saved {len(messages)} messages to {path}")


def _has_conversation(path: Path) -> bool:
    """Return whether a file is as `/save` writes it."""
    try:
        return set(json.loads(read_regular_file(path, MAX_DESCRIPTION_BYTES))) == {"messages"}
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


@contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Handle a Ctrl-C inside of the block at its end."""
    caught: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        signal.raise_signal(signal.SIGINT)
