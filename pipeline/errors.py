"""The errors a user can cause. Each is shown as one line, without a traceback, and ends the run with code 2.

A programmer's mistake raises anything else and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


class PipelineError(Exception):
    """Something the user gave cannot work. The message says what was given and what to change."""

    exit_code = 2


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


def report_errors(work: Callable[[], int | None], interrupted: str | None = None) -> int:
    """What a command ends with: what `work` returns or 0, 2 bad input, 130 Ctrl-C (`interrupted` is said)."""
    try:
        return work() or 0
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        if interrupted is not None:
            print(interrupted, file=sys.stderr, flush=True)
        return 130
