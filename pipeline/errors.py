"""Errors that a user can cause. Each is shown without a traceback, and ends the run with its exit code.

Every other exception is a programmer's mistake and keeps its traceback. A message may quote text from any
file or library. So the text is cleaned here, where errors are made: secrets are hidden, control characters
are written as escapes, and a message has at most three lines. A long line is cut in the middle, since its
end says what to change.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from types import TracebackType
from typing import NoReturn

from pipeline.redaction import redact_text

# Control characters except line breaks and tabs, Unicode line separators, direction overrides and lone
# surrogates. They move a terminal's cursor, reverse its text, or cannot be encoded.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MAX_LINES = 3
MAX_USAGE_LENGTH = 120
MAX_LINE_LENGTH = 1000  # characters
MAX_WORD_LENGTH = 400  # characters; a path may have 4096, too many to read


def escape_unprintable(text: str) -> str:
    r"""Return the text without secrets, its unprintable characters written as escapes such as `\x1b`."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), redact_text(text))


def shorten_message(text: str, longest: int = MAX_LINE_LENGTH) -> str:
    """Return at most three lines of a message, cleaned, each cut to `longest` characters."""
    lines = [_cut(line, longest) for line in escape_unprintable(text.strip()).split("\n")]
    if len(lines) > MAX_LINES:
        more = len(lines) - MAX_LINES + 1
        lines = [*lines[: MAX_LINES - 1], f"... and {more} more"]
    return "\n".join(lines)


def summarize_error(error: BaseException, most: int = 200) -> str:
    """Return an exception's message on one line of at most `most` characters; its class name if empty."""
    return redact_text(" ".join(str(error).split()))[:most] or type(error).__name__


def _cut(text: str, most: int) -> str:
    """Cut a line in the middle. Its beginning names the place, and its end says what to change."""
    if most > MAX_WORD_LENGTH and len(text) > MAX_WORD_LENGTH:
        text = re.sub(rf"\S{{{MAX_WORD_LENGTH + 1},}}", lambda word: _cut(word[0], MAX_WORD_LENGTH), text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"


class PipelineError(Exception):
    """Input of the user cannot work. The message says what was given, what is expected and what to change."""

    exit_code = 2
    max_line_length = MAX_LINE_LENGTH

    def __str__(self) -> str:
        return shorten_message(super().__str__(), self.max_line_length)


class ConfigError(PipelineError):
    """A recipe, a DeepSpeed JSON file or a command-line override is wrong."""


class DataError(PipelineError):
    """A data file or a tokenizer is missing, empty or malformed."""


class ModelError(PipelineError):
    """A model cannot be built, or weights do not fit it."""


class CheckpointError(PipelineError):
    """No checkpoint can be resumed: there is none, or it is damaged or belongs to another run or model."""


class LaunchError(PipelineError):
    """The launcher's environment does not describe a job that can run here."""


class NonFiniteLossError(PipelineError):
    """The loss or its gradient was infinite or NaN in too many steps, which changed no parameter."""


class StoppedError(PipelineError):
    """The run ended at an event for which `watch` in the recipe says stop, or that has no remedy."""


class CallbackError(PipelineError):
    """A callback of the user raised an exception. The log has its traceback."""

    exit_code = 1


class DeviceMemoryError(PipelineError):
    """The device or the host ran out of memory."""

    exit_code = 12
    max_line_length = 2 * MAX_LINE_LENGTH  # the phase, the memory by owner, and three suggested changes


class DeviceFailedError(PipelineError):
    """The device failed (an assertion, an illegal address), and this process can no longer use it."""

    exit_code = 14


class Terminated(BaseException):
    """A signal asked for a stop before or after training. Launchers send SIGTERM if another rank ended."""

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number


INTERRUPTS = (KeyboardInterrupt, Terminated)
NO_FURTHER_CHECKPOINT = "no further checkpoint is saved"


def explain_interrupt(interrupt: BaseException, afterwards: str = "") -> tuple[str, int]:
    """Return the message for an interrupt and its exit code.

    Args:
        interrupt: One of `INTERRUPTS`.
        afterwards: Text on the state of the work that was done; empty for none.
    """
    code = interrupt.exit_code if isinstance(interrupt, Terminated) else 130
    return f"stopped; {afterwards}" if afterwards else "stopped", code


def explain_long_path(error: OSError) -> PipelineError | None:
    """Return an error for a path that is too long for any file; `None` if the error has another cause."""
    if error.errno != errno.ENAMETOOLONG:
        return None
    return PipelineError(f"{error.filename}: {error.strerror}; a name has 255 bytes at most, a path 4095")


def hide_secrets_in_tracebacks() -> None:
    """Print uncaught exceptions of all threads without secrets."""

    def show(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            print(
                escape_unprintable("".join(traceback.format_exception(kind, error, trace))),
                file=sys.stderr,
                end="",
            )

    sys.excepthook = show
    threading.excepthook = lambda ended: show(ended.exc_type, ended.exc_value, ended.exc_traceback)


def report_errors(work: Callable[[], int | None], afterwards: str | None = None) -> int:
    """Run a command and return its exit code. Errors of the user and interrupts become a message on stderr.

    Args:
        work: Command to run. It returns its exit code, or `None` for 0.
        afterwards: Text for `explain_interrupt`. `None`: an interrupt prints nothing.
    """
    hide_secrets_in_tracebacks()
    try:
        return work() or 0
    except (PipelineError, OSError) as error:
        mistake = error if isinstance(error, PipelineError) else explain_long_path(error)
        if mistake is None:
            raise
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        return mistake.exit_code
    except INTERRUPTS as interrupt:
        message, code = explain_interrupt(interrupt, afterwards or "")
        if afterwards is not None:
            print(message, file=sys.stderr, flush=True)
        return code


class CommandLineParser(argparse.ArgumentParser):
    """Argument parser that reports a mistake as one line of usage and one line of error."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake with the nearest option, and exit with code 2."""
        unknown = re.search(r"unrecognized argument (--?[\w-]+)", message)
        options = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[1], options, n=1, cutoff=0.75) if unknown else []
        usage = " ".join(self.format_usage().split())
        usage = (
            usage if len(usage) <= MAX_USAGE_LENGTH else f"{usage[:MAX_USAGE_LENGTH].rpartition(' ')[0]} ..."
        )
        hint = f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"
        self.exit(2, f"{usage}\n{self.prog}: error: {shorten_message(message)}{hint}\n")


def format_ranges(some: Collection[int], steps: Collection[int]) -> str:
    """Return `some`, a part of `steps`, as ranges such as `4 to 6, 9`. At most five are written out."""
    ranges = [list(run) for is_one, run in groupby(sorted(steps), set(some).__contains__) if is_one]
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ranges]
    return ", ".join(texts[:5]) + (" ..." if len(texts) > 5 else "")


def format_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first `most` names and the number of the others: `a.weight, a.bias and 3 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
