"""Defines the rows of the doctor's table, and prints them.

A check that passes has one row. A check that fails has one row for each distinct fault.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

HOST = "<host>"
"""Placeholder in a fix. `group_faults` replaces it with the name of the first host that has the fault."""
STYLES = {"ok": "green", "warning": "yellow", "fail": "bold red", "skipped": "dim"}
"""Rich style of each status, in the table."""
LINE_WIDTH = 140
"""Characters in a line if the output is no terminal."""
Status = Literal["ok", "warning", "fail", "skipped"]
"""Result of a check. Only `fail` means that a launch would fail; `skipped` means that nothing was checked."""


@dataclass(frozen=True)
class Fault:
    """Fault of one host, and what to do about it.

    Hosts with equal faults share a row, so the fix contains HOST in place of the host's name.
    """

    status: Status
    """`fail` or `warning`."""
    description: str
    """Description of the fault, without a full stop."""
    fix: str
    """Advice: a command, or a sentence in the imperative."""


@dataclass(frozen=True)
class CheckRow:
    """One row of the table."""

    check: str
    """Name of the check."""
    status: Status
    text: str
    """Result of the check, or description of the fault."""
    fix: str = ""
    """Advice, printed on a line of its own; empty if there is no fault."""
    hosts: tuple[str, ...] = ()
    """Hosts that the row is about; empty if it is about all of them."""


def group_faults(check: str, faults: Iterable[tuple[str, Fault]], ok_text: str) -> list[CheckRow]:
    """Return a row for each distinct fault, with all hosts that have it.

    If there are no faults, return one row of the status `ok`.

    Args:
        check: Name of the check.
        faults: Pairs of a host and one of its faults.
        ok_text: Text of the row if there are no faults.
    """
    hosts_by_fault: dict[Fault, list[str]] = {}
    for host, fault in faults:
        hosts_by_fault.setdefault(fault, []).append(host)
    rows = []
    for fault, hosts in hosts_by_fault.items():
        first, *others = hosts
        fix = fault.fix.replace(HOST, first)
        if others:
            fix += f" (the same for {', '.join(others)})"
        rows.append(CheckRow(check, fault.status, fault.description, fix, tuple(hosts)))
    return rows or [CheckRow(check, "ok", ok_text)]


def skip_check(check: str) -> list[CheckRow]:
    """Return the row of a check for which no host answered."""
    return [CheckRow(check, "skipped", "not checked: no host answered")]


def merge_texts(text_by_host: Mapping[str, str]) -> str:
    """Return the texts of all hosts as one text, with each distinct text once.

    Hosts are named only if their texts differ.

    Args:
        text_by_host: Host -> its text; at least one.
    """
    hosts_by_text: dict[str, list[str]] = {}
    for host, text in text_by_host.items():
        hosts_by_text.setdefault(text, []).append(host)
    if len(hosts_by_text) == 1:
        return next(iter(hosts_by_text))
    return "; ".join(f"{', '.join(hosts)}: {text}" for text, hosts in hosts_by_text.items())


def has_failure(rows: list[CheckRow]) -> bool:
    """Return whether a check failed, so that a launch would fail too."""
    return any(row.status == "fail" for row in rows)


def print_rows(rows: Sequence[CheckRow], seconds: float) -> None:
    """Print the table: a line for each row, its fix below it, and a last line with the counts.

    Args:
        rows: Rows of all checks.
        seconds: Duration of the examination.
    """
    from rich.console import Console  # slow to load
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else LINE_WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        text = f"{', '.join(row.hosts)}: {row.text}" if row.hosts else row.text
        table.add_row(Text(row.check), Text(row.status, STYLES[row.status]), Text(text))
        if row.fix:
            table.add_row("", "", Text(f"-> {row.fix}", "bold"))
    console.print(table)
    counts = {status: sum(row.status == status for row in rows) for status in STYLES}
    failed_hosts = sorted({host for row in rows if row.status == "fail" for host in row.hosts})
    summary = f"{counts['fail']} failed, {counts['warning']} warned, {counts['ok']} passed in {seconds:.1f} s"
    if failed_hosts:
        summary = f"{', '.join(failed_hosts)}: {summary}"
    console.print(Text(summary), soft_wrap=True)
