"""What the doctor is asked, what it sees, and what it says: a row for each check, or for each fault that it
finds, and the table of them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeline.distributed.doctor.network_facts import Connection
from pipeline.distributed.doctor.probe import Answered
from pipeline.distributed.op_builds import NativeOp

HOST = "<host>"
STYLES = {"ok": "green", "warning": "yellow", "fail": "bold red"}
WIDTH = 140  # characters, where there is no terminal to ask
Status = Literal["ok", "warning", "fail"]


@dataclass(frozen=True)
class Wanted:
    """What to examine."""

    devices: Mapping[str, list[int] | None]
    """The job: every host and its devices (None: all it has), in order: the first is the master."""
    quick: bool = False
    """Leave the all-reduce out: torch is not loaded."""
    folders: Sequence[str] = ("runs", "~/.cache/deepspeed-pipeline")
    """What the run writes to; the first is the folder of its runs."""
    ops: Collection[NativeOp] | None = None
    """What the run will build or load of DeepSpeed's native ops; None: no run is known."""
    force_multi: bool = False
    """The launcher will use ssh also for one host."""
    is_remote: bool = True
    """The hosts are reached through ssh, as the launcher would; False: this machine alone."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    status: Status
    found: str
    fix: str = ""
    """What to do: a command or a variable."""
    hosts: tuple[str, ...] = ()
    """Those it is about; none: all."""


@dataclass(frozen=True)
class Seen:
    """All that the checks look at. Keys are hosts, in the job's order, but for those that did not answer."""

    wanted: Wanted
    here: Answered
    """The machine that the job is started on, which the others are compared with."""
    facts: Mapping[str, Answered]
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the host's clock is ahead of the one here."""
    links: Mapping[str, list[Connection]] = field(default_factory=dict)
    """From the host to all others."""
    sees: Mapping[str, list[str]] = field(default_factory=dict)
    """Hosts whose marker lies in the host's own run folder."""

    def on_host(self, command: str) -> str:
        """The command on the host with the fault, for this shell."""
        return f"ssh {HOST} {command}" if self.wanted.is_remote else command


class Fault(NamedTuple):
    """Of one host. HOST stands for its name in the fix."""

    host: str
    status: Status
    found: str
    fix: str


def rows_of(check: str, faults: Iterable[Fault], fine: str) -> list[Row]:
    """A row for each fault, with all the hosts that have it; without any, one that says `fine`."""
    together: dict[tuple[Status, str, str], list[str]] = {}
    for fault in faults:
        together.setdefault(fault[1:], []).append(fault.host)
    rows = []
    for (status, found, fix), hosts in together.items():
        first, *others = hosts
        more = f" (the same for {', '.join(others)})" if others else ""
        rows.append(Row(check, status, found, fix.replace(HOST, first) + more, tuple(hosts)))
    return rows or [Row(check, "ok", fine)]


def is_red(rows: list[Row]) -> bool:
    """Whether a launch would fail."""
    return any(row.status == "fail" for row in rows)


def show(rows: Sequence[Row], seconds: float) -> None:
    """A line a row, what is wrong with its fix below it, and a last line that counts."""
    from rich.console import Console  # slow to load
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        style = STYLES[row.status]
        words = Text(f"{', '.join(row.hosts)}: {row.found}" if row.hosts else row.found)
        table.add_row(Text(row.check), Text(row.status, style), words)
        if row.fix:
            table.add_row("", "", Text(f"-> {row.fix}", "bold"))
    console.print(table)
    counts = {status: sum(row.status == status for row in rows) for status in STYLES}
    failed = sorted({host for row in rows if row.status == "fail" for host in row.hosts})
    last = f"{counts['fail']} failed, {counts['warning']} warned of, {counts['ok']} fine, in {seconds:.1f} s"
    console.print(Text(f"{', '.join(failed)}: {last}" if failed else last), soft_wrap=True)
