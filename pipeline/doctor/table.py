"""The doctor's table, on stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.doctor.rows import Row

STYLES = {"ok": "green", "warning": "yellow", "fail": "bold red"}
WIDTH = 140  # characters, where there is no terminal to ask


def show(rows: Sequence[Row], seconds: float) -> None:
    """A line a row, what is wrong with its fix below it, and a last line that counts."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        style = STYLES[row.verdict]
        words = Text(f"{', '.join(row.hosts)}: {row.found}" if row.hosts else row.found)
        table.add_row(Text(row.check), Text(row.verdict, style), words)
        if row.fix:
            table.add_row("", "", Text(f"-> {row.fix}", "bold"))
    console.print(table)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in STYLES}
    failed = sorted({host for row in rows if row.verdict == "fail" for host in row.hosts})
    last = f"{counts['fail']} failed, {counts['warning']} warned of, {counts['ok']} fine, in {seconds:.1f} s"
    console.print(Text(f"{', '.join(failed)}: {last}" if failed else last), soft_wrap=True)
