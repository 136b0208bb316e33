"""How a mistake ends the commands that look at a run."""

from __future__ import annotations

from collections.abc import Callable

from pipeline import errors
from pipeline.errors import PipelineError


def report_errors(work: Callable[[], None]) -> int:
    """As errors.report_errors; a folder that may not be read, a name that is too long, are bad input too."""

    def named() -> None:
        try:
            work()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise PipelineError(f"{where}{error.strerror or error}") from None

    return errors.report_errors(named)
