"""Logging: rank 0 logs to the console, and every rank to `logs/` of the run directory."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TextIO

from pipeline.distributed.ranks import Ranks
from pipeline.errors import escape_unprintable, shorten_message
from pipeline.monitoring.events import PLAN


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _PrintableFormatter(logging.Formatter):
    """Removes secrets and escape sequences from a line; a traceback keeps its line breaks."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_unprintable(super().format(record))


class _ConsoleFormatter(_PrintableFormatter):
    """Shortens long lines for the console, and prefixes warnings and errors with their level."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shorten_message(record.message)
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return level + super().formatMessage(record)


class _QuietFileHandler(logging.FileHandler):
    """Drops lines that cannot be written, such as to a full disk.

    Otherwise logging would print a traceback for each of them, and hide the message about the disk.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def _is_for_console(record: logging.LogRecord) -> bool:
    """Return whether the console handler prints a record.

    It omits failures and the plan's comparison: the end of the run prints both.
    """
    return record.name != "pipeline.failure" and getattr(record, "event", None) != PLAN


def log_to_console(ranks: Ranks, level: str = "info") -> None:
    """Show rank 0's lines on the console, and only errors of the other ranks.

    Closes and replaces the handlers of an earlier run in this process, including its log file. Also hides
    FutureWarning and DeprecationWarning, and warnings about torchao, for the whole process.

    Args:
        ranks: Rank of this process.
        level: Minimum level of rank 0's lines on the console, from `debug` to `error`. It lowers the level of
            log files only if it is `debug`: they contain everything from `info` on.
    """
    console = _StderrHandler()
    console.setFormatter(_ConsoleFormatter("%(message)s"))
    min_level: int = getattr(logging, level.upper())
    console.setLevel(min_level if ranks.is_main_process else logging.ERROR)
    console.addFilter(_is_for_console)
    logger = logging.getLogger("pipeline")
    logger.setLevel(min(min_level, logging.INFO))
    logger.propagate = False
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:] = [console]
    hide_torchao_warnings()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def hide_torchao_warnings() -> None:
    """Hide the warnings that an import of torchao logs; transformers imports it if it is installed.

    torchao logs which kernels it cannot load, and torch logs a deprecated call of torchao.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def log_to_file(run_dir: Path, ranks: Ranks) -> None:
    """Also write this rank's lines, with times, to `logs/rankNNNNN.log` of the run directory.

    Raises:
        OSError: The file or its directory cannot be created.
    """
    path = run_dir / "logs" / f"rank{ranks.rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 created it on its own machine only
    file = _QuietFileHandler(path)
    file.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.getLogger("pipeline").addHandler(file)
