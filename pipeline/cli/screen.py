"""Output of `inspect` and `plan`: tables and text on stdout, progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.errors import escape_unprintable

WIDTH = 110  # characters, where there is no terminal to ask
LONGEST_CELL = 400  # characters
PAGE = 100  # characters of a table that can be narrower


class Screen:
    """A terminal, or what stands in for one.

    Args:
        no_color: Plain text also on a terminal.
    """

    def __init__(self, no_color: bool) -> None:
        is_terminal = sys.stdout.isatty()
        width = None if is_terminal else WIDTH
        self._console = Console(no_color=no_color or None, highlight=False, width=width)
        self.is_coloured = is_terminal and not self._console.no_color

    def title(self, words: str) -> None:
        """Print a bold line after an empty one."""
        self._console.print(Text(f"\n{escape_unprintable(words)}", "bold"), soft_wrap=True)

    def line(self, words: str | Text = "") -> None:
        """Never wrapped or read as markup."""
        text = words if isinstance(words, Text) else Text(escape_unprintable(words))
        self._console.print(text, soft_wrap=True)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str] = ()
    ) -> None:
        """Print a table: the first column aligned left, the others right.

        Args:
            words: Columns of words: on the left, and on several lines where one is too narrow.
        """
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for number, column in enumerate(columns):
            wraps = column in words
            table.add_column(
                escape_unprintable(column),
                justify="left" if wraps or number == 0 else "right",
                no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis",
            )
        for row in rows:
            table.add_row(*(Text(escape_unprintable(cell[:LONGEST_CELL])) for cell in row))
        self._console.print(table, width=min(self._console.width, PAGE) if words else None)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[int], object]]:
        """Yield a function that advances a progress bar; it does nothing unless stderr is a terminal."""
        if not sys.stderr.isatty():
            yield lambda amount: None
            return
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(description, total=total)
            yield lambda amount: progress.advance(task, amount)


def format_percent(part: float, whole: float) -> str:
    """`3.1 %`; of nothing it is nothing."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %" if share >= 0.1 or part == 0 else "< 0.1 %"
