"""Prints the output of commands: tables and text to stdout, progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.errors import escape_unprintable

WIDTH = 110  # characters of a line if stdout is no terminal
LONGEST_CELL = 400  # characters
PAGE = 100  # characters of a table whose text columns can wrap


class Screen:
    """Console of a command: a terminal, or a file or pipe in its place.

    Args:
        no_color: Whether to print plain text also on a terminal.
    """

    def __init__(self, no_color: bool) -> None:
        is_terminal = sys.stdout.isatty()
        width = None if is_terminal else WIDTH
        self._console = Console(no_color=no_color or None, highlight=False, width=width)
        self.is_coloured = is_terminal and not self._console.no_color

    def title(self, words: str) -> None:
        """Print a line in bold, below an empty line."""
        self._console.print(Text(f"\n{escape_unprintable(words)}", "bold"), soft_wrap=True)

    def line(self, words: str | Text = "") -> None:
        """Print a line without wrapping it, and without reading it as markup."""
        text = words if isinstance(words, Text) else Text(escape_unprintable(words))
        self._console.print(text, soft_wrap=True)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str] = ()
    ) -> None:
        """Print a table with the first column aligned left and the others right.

        Columns named in `words` hold text: they are aligned left and wrap if the table is too wide.
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
        """Show a progress bar if stderr is a terminal, and yield the function that advances it."""
        if not sys.stderr.isatty():
            yield lambda amount: None
            return
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(description, total=total)
            yield lambda amount: progress.advance(task, amount)


def format_percent(part: float, whole: float) -> str:
    """Return a share as text, such as `3.1 %`; `0.0 %` if the whole is 0."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %" if share >= 0.1 or part == 0 else "< 0.1 %"
