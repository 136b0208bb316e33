"""report.html at the end of a run, however it ends: nothing of it can change how, or hold it up for long."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from pipeline.errors import one_line
from pipeline.report.page import REPORT_FILE, page_data, render, write_page
from pipeline.report.runs import read_run
from pipeline.sinks.jsonl import METRICS_FILE

log = logging.getLogger(__name__)

LONGEST = 5.0  # seconds: some 300,000 rows


def write_at_end(directory: Path) -> Path | None:
    """Writes the report of a run whose sinks are closed. Raises nothing: a Ctrl-C too ends the report alone.

    Returns:
        Its path; None where there is none: no metrics yet, or, told by a line, a failure or no time.
    """
    path = directory / REPORT_FILE
    made: list[Path] = []

    def make() -> None:
        try:
            write_page(render(page_data([read_run(directory, ended=True)])), path)
            made.append(path)
        except Exception as error:
            log.warning("%s is not written: %s", path, one_line(error))

    with suppress(BaseException):
        if (directory / METRICS_FILE).is_file():
            thread = threading.Thread(target=make, name="report", daemon=True)
            thread.start()
            thread.join(LONGEST)
            if thread.is_alive():
                log.warning(
                    "%s takes more than %.0f s; `python -m pipeline report %s` makes it",
                    path,
                    LONGEST,
                    directory,
                )
    return made[0] if made else None
