"""The errors a user can cause. Each is shown as one line, without a traceback, and ends the run with code 2.

A programmer's mistake raises anything else and keeps its traceback. What a message repeats may come from
anywhere: secrets are hidden, escapes are written out and it is cut here, wherever it is shown.
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

# What moves a terminal's cursor, turns text round or cannot be written at all: control characters but for
# line breaks and tabs, separators of lines, overrides of direction, halves of surrogate pairs.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MOST_LINES = 3
LONGEST_USAGE = 120
LONGEST_LINE, LONGEST_WORD = 1000, 400  # characters; a path may have 4096, but nobody reads it


def escape_unprintable(text: str) -> str:
    """The text without secrets, with what no terminal should be given written as an escape: `\\x1b`."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), redact_text(text))


def shorten_message(text: str, longest: int = LONGEST_LINE) -> str:
    """At most three lines of what a message says, without megabytes and escapes of what it repeats."""
    lines = [_cut(line, longest) for line in escape_unprintable(text.strip()).split("\n")]
    if len(lines) > MOST_LINES:
        more = len(lines) - MOST_LINES + 1
        lines = [*lines[: MOST_LINES - 1], f"... and {more} more"]
    return "\n".join(lines)


def summarize_error(error: BaseException, most: int = 200) -> str:
    """What a library says of its failure, in `most` characters; its class where it says nothing."""
    return redact_text(" ".join(str(error).split()))[:most] or type(error).__name__


def _cut(text: str, most: int) -> str:
    """Cut in the middle: what and where stand at the beginning, what to change at the end."""
    if most > LONGEST_WORD and len(text) > LONGEST_WORD:
        text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _cut(word[0], LONGEST_WORD), text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"


class PipelineError(Exception):
    """Something the user gave cannot work. The message says what was given and what to change."""

    exit_code = 2
    longest_line = LONGEST_LINE

    def __str__(self) -> str:
        return shorten_message(super().__str__(), self.longest_line)


class ConfigError(PipelineError):
    """A recipe, a DeepSpeed JSON file or a command-line override is wrong."""


class DataError(PipelineError):
    """A data file or a tokenizer is missing, empty or malformed."""


class ModelError(PipelineError):
    """A model cannot be built, or weights do not fit it."""


class CheckpointError(PipelineError):
    """There is nothing to resume from, or what there is does not fit."""


class LaunchError(PipelineError):
    """The launcher's environment does not describe a job that can run here."""


class NonFiniteLossError(PipelineError):
    """The loss or its gradient stayed infinite or NaN; the parameters were not touched by those steps."""


class StoppedError(PipelineError):
    """Something went wrong that the recipe says a run is to end at (`watch`), or that nothing cures."""


class CallbackError(PipelineError):
    """A callback of the user's raised. The log has its traceback."""

    exit_code = 1


class DeviceMemoryError(PipelineError):
    """The device, or the host, has no memory left for what the run needs."""

    exit_code = 12
    longest_line = 2 * LONGEST_LINE  # where, what was held by what, and three changes


class DeviceFailedError(PipelineError):
    """The device is of no use to this process any more: an assertion or a wrong address in a kernel."""

    exit_code = 14


class Terminated(BaseException):
    """A signal asked for a stop before training or after it. SIGTERM also comes if another rank has ended."""

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number


INTERRUPTS = (KeyboardInterrupt, Terminated)
NO_CHECKPOINT = "no further checkpoint is saved"


def explain_interrupt(interrupt: BaseException, afterwards: str = "") -> tuple[str, int]:
    """Return what is said of an interrupt, one of INTERRUPTS, and the exit code.

    Args:
        afterwards: What becomes of the work that was done; empty: there is nothing to say.
    """
    code = interrupt.exit_code if isinstance(interrupt, Terminated) else 130
    return "; ".join(["stopped", *filter(None, [afterwards])]), code


def explain_long_path(error: OSError) -> PipelineError | None:
    """For a path that no file can have, wherever it was used; None where something else is wrong."""
    if error.errno != errno.ENAMETOOLONG:
        return None
    return PipelineError(f"{error.filename}: {error.strerror}; a name has 255 bytes at most, a path 4095")


def hide_secrets_in_tracebacks() -> None:
    """Print exceptions that nothing catches, on any thread, without secrets."""

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
    """Do a command's work, and return its exit code: what `work` returns or 0, 2 bad input, 130 Ctrl-C.

    Args:
        afterwards: See `explain_interrupt`; None: an interrupt is not told.
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
    """A parser whose mistakes are a line of usage and a line of error."""

    def error(self, message: str) -> NoReturn:
        """Ends with code 2."""
        unknown = re.search(r"unrecognized argument (--?[\w-]+)", message)
        options = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[1], options, n=1, cutoff=0.75) if unknown else []
        usage = " ".join(self.format_usage().split())
        usage = usage if len(usage) <= LONGEST_USAGE else f"{usage[:LONGEST_USAGE].rpartition(' ')[0]} ..."
        hint = f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"
        self.exit(2, f"{usage}\n{self.prog}: error: {shorten_message(message)}{hint}\n")


def format_ranges(some: Collection[int], steps: Collection[int]) -> str:
    """Return `4 to 6, 9` for some of these steps. At most five stretches are written out."""
    runs = [list(run) for is_one, run in groupby(sorted(steps), set(some).__contains__) if is_one]
    said = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(said[:5]) + (" ..." if len(said) > 5 else "")


def format_names(names: Sequence[str], most: int = 5) -> str:
    """`a.weight, a.bias and 3 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
