"""Captures log messages, on a rank as well as in the test's own process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _MessageCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def capture_logs(name: str = "pipeline") -> Iterator[list[str]]:
    """Yield a list that receives the logger's messages of level INFO and above while the block runs."""
    logger = logging.getLogger(name)
    handler = _MessageCollector()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
