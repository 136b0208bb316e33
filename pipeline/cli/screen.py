"""Prints the output of commands: tables and text to stdout, progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from pipeline.errors import escape_unprintable

LONGEST_CELL = 400  # characters; the rest of a cell is not printed


class Screen:
    """Console of a command: a terminal, or a file or pipe in its place.

    Args:
        no_color: Whether to print without colours and bold type also on a terminal.
    """

    def __init__(self, no_color: bool) -> None:
        is_terminal = sys.stdout.isatty()
        # `no_color=None` lets the environment variable NO_COLOR decide.
        self._console = Console(no_color=no_color or None, highlight=False)
        self.is_coloured = is_terminal and not self._console.no_color
        """Whether colours are visible, so that they can carry a meaning."""

    def title(self, text: str) -> None:
        """Print a line in bold, below an empty line."""
        self._console.print(Text(f"\n{escape_unprintable(text)}", "bold"), soft_wrap=True)

    def line(self, text: str | Text = "") -> None:
        """Print a line without wrapping it, and without reading it as markup."""
        printed = text if isinstance(text, Text) else Text(escape_unprintable(text))
        self._console.print(printed, soft_wrap=True)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Collection[str] = ()
    ) -> None:
        """Print a table with the first column aligned left and the others right.

        A row is always one line. If the terminal is too narrow, the line runs over: no cell is cut to fit.

        Args:
            columns: Headers of the columns.
            rows: Cells of each row, one for each column.
            text_columns: Headers of further columns to align left.
        """
        lines = [[escape_unprintable(cell[:LONGEST_CELL]) for cell in line] for line in (columns, *rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for number, line in enumerate(lines):
            padded = []
            for index, (cell, width) in enumerate(zip(line, widths, strict=True)):
                spaces = " " * (width - cell_len(cell))
                is_left = index == 0 or columns[index] in text_columns
                padded.append(cell + spaces if is_left else spaces + cell)
            style = "bold" if number == 0 else ""
            self._console.print(Text("  ".join(padded).rstrip(), style), soft_wrap=True)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[int], object]]:
        """Show a progress bar if stderr is a terminal, and yield the function that advances it.

        Args:
            description: Words before the bar.
            total: Amount of work, in the unit of the calls that advance the bar.
        """
        if not sys.stderr.isatty():
            yield lambda amount: None
            return
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(description, total=total)
            yield lambda amount: progress.advance(task, amount)


def format_percent(part: float, whole: float) -> str:
    """Return a share as text, such as `3.1 %`; `0.0 %` if the whole is 0."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.1f} %" if percent >= 0.1 or part == 0 else "< 0.1 %"
