"""How far preparing is: a bar on a terminal, a line now and then elsewhere, one line at the end."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from pipeline.data.prepared.parts import Advance, PartTask
from pipeline.files import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS = 10.0  # a batch job shows that it lives
log = logging.getLogger(__name__)


class PrepareProgress:
    """Adds up what is reported of parts; a context manager.

    Args:
        total_bytes: Of input, as far as known.
        num_parts: To prepare.
    """

    def __init__(self, total_bytes: int, num_parts: int) -> None:
        self._total_bytes = total_bytes
        self._num_parts = num_parts
        self._finished_parts = 0
        self._finished_bytes = 0
        self._under_way: dict[str, int] = {}  # bytes of text by the part's key
        self.text_bytes = self.documents = self.tokens = 0
        self._start = time.monotonic()
        self._last_line = self._start
        self._bar: Progress | None = None

    def __enter__(self) -> PrepareProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("preparing"),
                BarColumn(20),
                TextColumn("{task.percentage:3.0f} %  {task.fields[line]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.add_task("preparing", total=max(1, self._total_bytes), line="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, task: PartTask, advance: Advance) -> None:
        """A batch of the part is done."""
        self.text_bytes += advance.bytes
        self.documents += advance.documents
        self.tokens += advance.tokens
        self._under_way[task.key] = self._under_way.get(task.key, 0) + advance.bytes
        self._show()

    def finish(self, task: PartTask) -> None:
        """The part is there."""
        self._under_way.pop(task.key, None)
        self._finished_parts += 1
        self._finished_bytes += task.part.size
        self._show()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def rates(self) -> str:
        """Return bytes of text and tokens a second, since the start."""
        size = format_bytes(self.text_bytes / self.seconds)
        return f"{size}/s, {self.tokens / self.seconds:,.0f} tokens/s"

    def _show(self) -> None:
        parts = f"{self._finished_parts} of {self._num_parts} parts"
        if self._bar is not None:
            # Compressed input is smaller than its text: a part counts as no more than its size.
            done = self._finished_bytes + min(sum(self._under_way.values()), self._total_bytes)
            line = f"{parts}, {self.tokens / 1e6 / self.seconds:.2f} M tokens/s"  # fits into 80 columns
            self._bar.update(self._bar.task_ids[0], completed=min(done, self._total_bytes), line=line)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            log.info(
                "preparing: %s, %s documents, %s tokens, %s",
                parts,
                f"{self.documents:,}",
                f"{self.tokens:,}",
                self.rates(),
            )
