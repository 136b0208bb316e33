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
# surrogates. Such characters move a terminal's cursor, reverse its text, or cannot be encoded.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MAX_LINES = 3  # lines of a message
MAX_USAGE_LENGTH = 120  # characters of a command's usage in an error
MAX_LINE_LENGTH = 1000  # characters
MAX_WORD_LENGTH = 400  # characters; a path may have 4096, too many to read


def escape_unprintable(text: str) -> str:
    r"""Return the text with secrets redacted and unprintable characters as escapes such as `\x1b`."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), redact_text(text))


def shorten_message(text: str, max_line_length: int = MAX_LINE_LENGTH) -> str:
    """Return at most three lines of a message, each cut to about `max_line_length` characters.

    Secrets are redacted and unprintable characters escaped, as in `escape_unprintable`.
    """
    lines = [_cut(line, max_line_length) for line in escape_unprintable(text.strip()).split("\n")]
    if len(lines) > MAX_LINES:
        num_hidden = len(lines) - MAX_LINES + 1
        lines = [*lines[: MAX_LINES - 1], f"... and {num_hidden} more lines"]
    return "\n".join(lines)


def summarize_error(error: BaseException, max_length: int = 200) -> str:
    """Return an exception's message on one line, without secrets.

    It is cut to `max_length` characters. An empty message is replaced by the name of the exception's class.
    """
    return redact_text(" ".join(str(error).split()))[:max_length] or type(error).__name__


def _cut(text: str, max_length: int) -> str:
    """Cut the middle out of a long line, and first out of each of its long words.

    The beginning of a line names the place, and its end says what to change.
    """
    if max_length > MAX_WORD_LENGTH and len(text) > MAX_WORD_LENGTH:
        text = re.sub(rf"\S{{{MAX_WORD_LENGTH + 1},}}", lambda word: _cut(word[0], MAX_WORD_LENGTH), text)
    if len(text) <= max_length:
        return text
    return f"{text[: max_length * 2 // 3]} ... {text[-max_length // 4 :]}"


class PipelineError(Exception):
    """The user's input cannot work. The message says what was given, what is expected and what to change."""

    exit_code = 2
    """Exit code of the process that this error ends."""
    max_line_length = MAX_LINE_LENGTH
    """Number of characters to which `str` of this error cuts each line of the message."""

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
    """The run ended at an event for which `watch` in the recipe says `stop`, or which has no remedy."""


class CallbackError(PipelineError):
    """A callback of the user raised an exception. The log has its traceback."""

    exit_code = 1


class DeviceMemoryError(PipelineError):
    """The device or the host ran out of memory."""

    exit_code = 12
    # The message has the phase, the memory by owner, and three suggested changes.
    max_line_length = 2 * MAX_LINE_LENGTH


class DeviceFailedError(PipelineError):
    """The device failed (an assertion, an illegal address), and this process can no longer use it."""

    exit_code = 14


class Terminated(BaseException):
    """A signal stopped the process before or after training. Launchers send SIGTERM if another rank ended.

    Args:
        signal_number: Number of the signal. The exit code is 128 more, as in a shell.
    """

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number


INTERRUPTS = (KeyboardInterrupt, Terminated)
"""Exceptions that mean a stop on request, not a failure."""
NO_FURTHER_CHECKPOINT = "no further checkpoint is saved"
"""Text of `train` for `explain_interrupt`."""


def explain_interrupt(interrupt: BaseException, afterwards: str = "") -> tuple[str, int]:
    """Return the message for an interrupt and its exit code.

    Args:
        interrupt: One of `INTERRUPTS`.
        afterwards: Text that says what remains of the work; empty for none.
    """
    code = interrupt.exit_code if isinstance(interrupt, Terminated) else 130
    return f"stopped; {afterwards}" if afterwards else "stopped", code


def explain_long_path(error: OSError) -> PipelineError | None:
    """Return an error for a path that is longer than the system allows; `None` if the cause is another."""
    if error.errno != errno.ENAMETOOLONG:
        return None
    return PipelineError(
        f"{error.filename}: {error.strerror}; a name has 255 bytes at most, a path 4095; shorten it"
    )


def hide_secrets_in_tracebacks() -> None:
    """Make Python print uncaught exceptions of all threads without secrets, from now on."""

    def print_error(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(
                escape_unprintable("".join(traceback.format_exception(kind, error, trace))),
                file=sys.stderr,
                end="",
            )

    sys.excepthook = print_error
    threading.excepthook = lambda thread_error: print_error(
        thread_error.exc_type, thread_error.exc_value, thread_error.exc_traceback
    )


def report_errors(work: Callable[[], int | None], afterwards: str | None = None) -> int:
    """Run a command and return its exit code. Errors of the user and interrupts become a message on stderr.

    Any other exception propagates. From now on, this process prints uncaught exceptions without secrets.

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
        if len(usage) > MAX_USAGE_LENGTH:
            usage = f"{usage[:MAX_USAGE_LENGTH].rpartition(' ')[0]} ..."
        hint = f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"
        self.exit(2, f"{usage}\n{self.prog}: error: {shorten_message(message)}{hint}\n")


def format_ranges(selected: Collection[int], steps: Collection[int]) -> str:
    """Return some of `steps` as ranges such as `4 to 6, 9`. At most five ranges are written out.

    A range ends at the next of `steps` that is not selected, so steps that are missing there do not split it.
    """
    groups = groupby(sorted(steps), set(selected).__contains__)
    ranges = [list(group) for is_selected, group in groups if is_selected]
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ranges]
    return ", ".join(texts[:5]) + (" ..." if len(texts) > 5 else "")


def format_names(names: Sequence[str], max_names: int = 5) -> str:
    """Return the first `max_names` names and the number of the others: `a.weight, a.bias and 3 more`."""
    num_others = len(names) - max_names
    return ", ".join(names[:max_names]) + (f" and {num_others} more" if num_others > 0 else "")
