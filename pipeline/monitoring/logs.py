"""Log lines: rank 0's on the console, every rank's in `logs/` of the run directory."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TextIO

from pipeline.distributed.ranks import Ranks
from pipeline.errors import escape_unprintable, shorten_message
from pipeline.monitoring.events import PLAN


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is now: a progress bar replaces it while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Printable(logging.Formatter):
    """Removes secrets and escapes from a line; a traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_unprintable(super().format(record))


class _ConsoleFormatter(_Printable):
    """Formats a line for the console: without megabytes, and with its level from warnings on."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shorten_message(record.message)
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return level + super().formatMessage(record)


class _File(logging.FileHandler):
    """Leaves lines out on a full disk: their tracebacks would bury the message about the disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def _is_for_console(record: logging.LogRecord) -> bool:
    """Return whether the console shows a record now: run_rank.py shows a failure and the plan at the end."""
    return record.name != "pipeline.failure" and getattr(record, "event", None) != PLAN


def log_to_console(ranks: Ranks, level: str = "info") -> None:
    """Show rank 0's lines on the console, and errors of the others.

    Args:
        ranks: Rank of this process.
        level: Least level of rank 0's lines, from `debug` to `error`. Files have everything from `info` on.
    """
    console = _CurrentStderr()
    console.setFormatter(_ConsoleFormatter("%(message)s"))
    wanted: int = getattr(logging, level.upper())
    console.setLevel(wanted if ranks.is_main_process else logging.ERROR)
    console.addFilter(_is_for_console)
    logger = logging.getLogger("pipeline")
    logger.setLevel(min(wanted, logging.INFO))
    logger.propagate = False
    for earlier in logger.handlers:  # an earlier run's of this process
        earlier.close()
    logger.handlers[:] = [console]
    # torchao, which transformers imports where it is installed, tells of its parts for other GPUs.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def log_to_file(run_dir: Path, ranks: Ranks) -> None:
    """Write lines with times to `logs/rank00000.log` too."""
    path = run_dir / "logs" / f"rank{ranks.rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 made it on its own machine
    file = _File(path)
    file.setFormatter(_Printable("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.getLogger("pipeline").addHandler(file)
