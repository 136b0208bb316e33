"""The doctor's table: a row for each check that is well, or for each fault that a check found."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

HOST = "<host>"
"""Placeholder in a fix for the name of the host that has the fault."""
STYLES = {"ok": "green", "warning": "yellow", "fail": "bold red"}
WIDTH = 140  # characters, if there is no terminal to ask
Status = Literal["ok", "warning", "fail"]


@dataclass(frozen=True)
class Fault:
    """A fault of one host, and what to do about it."""

    status: Status
    found: str
    fix: str


@dataclass(frozen=True)
class CheckRow:
    """One line of the table."""

    check: str
    status: Status
    found: str
    fix: str = ""
    hosts: tuple[str, ...] = ()
    """Hosts that the row is about; empty if it is about all of them."""


def group_faults(check: str, faults: Iterable[tuple[str, Fault]], fine: str) -> list[CheckRow]:
    """Return a row for each distinct fault, with all hosts that have it; without faults a row with `fine`.

    Args:
        check: Name of the check.
        faults: Each host with one of its faults.
        fine: Text of the row if there are no faults.
    """
    together: dict[Fault, list[str]] = {}
    for host, fault in faults:
        together.setdefault(fault, []).append(host)
    rows = []
    for fault, hosts in together.items():
        first, *others = hosts
        more = f" (the same for {', '.join(others)})" if others else ""
        fix = fault.fix.replace(HOST, first) + more
        rows.append(CheckRow(check, fault.status, fault.found, fix, tuple(hosts)))
    return rows or [CheckRow(check, "ok", fine)]


def merge_texts(fine: Mapping[str, str]) -> str:
    """Return what hosts without a fault say of themselves, as one text.

    Args:
        fine: Host -> its text.
    """
    together: dict[str, list[str]] = {}
    for host, text in fine.items():
        together.setdefault(text, []).append(host)
    if len(together) == 1:
        return next(iter(together))
    return "; ".join(f"{', '.join(hosts)}: {text}" for text, hosts in together.items())


def has_failure(rows: list[CheckRow]) -> bool:
    """Return whether a launch would fail."""
    return any(row.status == "fail" for row in rows)


def print_rows(rows: Sequence[CheckRow], seconds: float) -> None:
    """Print a line for each row, the fix below what is wrong, and a last line with the counts."""
    from rich.console import Console  # slow to load
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        words = Text(f"{', '.join(row.hosts)}: {row.found}" if row.hosts else row.found)
        table.add_row(Text(row.check), Text(row.status, STYLES[row.status]), words)
        if row.fix:
            table.add_row("", "", Text(f"-> {row.fix}", "bold"))
    console.print(table)
    counts = {status: sum(row.status == status for row in rows) for status in STYLES}
    failed = sorted({host for row in rows if row.status == "fail" for host in row.hosts})
    last = f"{counts['fail']} failed, {counts['warning']} warned of, {counts['ok']} fine, in {seconds:.1f} s"
    console.print(Text(f"{', '.join(failed)}: {last}" if failed else last), soft_wrap=True)
