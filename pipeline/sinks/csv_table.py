"""metrics.csv: the rows of metrics.jsonl as one table, for a spreadsheet or another program.

Columns appear as the run goes on (the first save, the first skipped step); a table has one head. So it is
written anew from the record at the start, which takes back what a resumed run has yet to do, and with each
new column; a row in between is appended.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pipeline.events import Event

CSV_FILE = "metrics.csv"


class CsvSink:
    """Events are left out, as in any table of numbers."""

    def __init__(self, path: Path, record: Callable[[], Iterable[Mapping[str, float]]]) -> None:
        """Write what the record has.

        Args:
            record: Reads its rows; of each row that is written here it has it already.

        Raises:
            OSError, MetricsFileError: also of `write`.
        """
        self._path = path
        self._record = record
        self._write_anew()

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Append one row; where it has a new column, write all again."""
        if not row.keys() <= self._columns.keys():
            self._file.close()
            self._write_anew()
            return
        self._writer.writerow({"step": step, **row})
        self._file.flush()  # one write for each row: a kill tears none

    def tell(self, step: int, event: Event) -> None:
        """Nothing."""

    def close(self, exit_code: int) -> None:
        """Close the file."""
        self._file.close()

    def _write_anew(self) -> None:
        """Beside, and one rename: whoever reads meanwhile has the old table or the new one."""
        self._columns = {"step": None} | {key: None for row in self._record() for key in row}
        partial = self._path.with_name(f"{self._path.name}.partial")
        self._file = partial.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, list(self._columns), restval="", lineterminator="\n")
        self._writer.writeheader()
        self._writer.writerows(self._record())
        self._file.flush()
        partial.replace(self._path)
