"""metrics.csv: the numbers of metrics.jsonl as one table, whatever columns come and what is taken back."""

from __future__ import annotations

import csv
import math
from functools import partial
from pathlib import Path

from pipeline.sinks.csv_table import CsvSink
from pipeline.sinks.jsonl import JsonlSink, iterate_metrics, read_metrics

ROWS = [
    (0, {"eval/loss": 3.5}),
    (1, {"train/loss": 0.1 + 0.2, "train/grad_norm": math.inf}),
    (2, {"train/loss": 2.0, "train/grad_norm": 1e-30, "perf/mfu": 0.4}),
    (3, {"train/loss": math.nan}),
]


def write(folder: Path, rows, start_step: int = 0, keep_open: bool = False) -> None:
    record = JsonlSink(folder / "metrics.jsonl", start_step=start_step)
    table = CsvSink(folder / "metrics.csv", partial(iterate_metrics, record.path))
    for step, row in rows:
        record.write(step, row)
        table.write(step, row)
    if not keep_open:
        table.close(0)
        record.close(0)


def read(folder: Path) -> list[dict[str, float]]:
    """The rows, without what is empty."""
    with (folder / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert all(None not in line for line in lines), "a line is longer than the head"
    return [{key: float(text) for key, text in line.items() if text} for line in lines]


def test_every_number_is_there_to_the_last_digit_under_one_head(tmp_path):
    write(tmp_path, ROWS)
    assert str(read(tmp_path)) == str(
        [{k: float(v) for k, v in row.items()} for row in read_metrics(tmp_path / "metrics.jsonl")]
    )
    head = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert head == "step,eval/loss,train/loss,train/grad_norm,perf/mfu"


def test_each_row_is_on_the_disk_when_it_was_written(tmp_path):
    write(tmp_path, ROWS, keep_open=True)
    assert [row["step"] for row in read(tmp_path)] == [0, 1, 2, 3]


def test_a_run_that_goes_on_takes_later_rows_back(tmp_path):
    write(tmp_path, ROWS)
    write(tmp_path, [(2, {"train/loss": 9.0})], start_step=1)
    assert [(row["step"], row.get("train/loss")) for row in read(tmp_path)] == [
        (0, None),
        (1, 0.1 + 0.2),
        (2, 9.0),
    ]
    assert "perf/mfu" not in (tmp_path / "metrics.csv").read_text()


def test_a_table_that_was_torn_or_is_another_file_is_written_anew(tmp_path):
    write(tmp_path, ROWS[:2])
    (tmp_path / "metrics.csv").write_bytes(b"step,tra")
    write(tmp_path, ROWS[2:], start_step=1)
    assert [row["step"] for row in read(tmp_path)] == [0, 1, 2, 3]
