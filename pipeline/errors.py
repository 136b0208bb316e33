"""The errors a user can cause. Each is shown as one line, without a traceback, and ends the run with code 2.

A programmer's mistake raises anything else and keeps its traceback.
"""


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
