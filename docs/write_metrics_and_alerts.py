"""Writes the tables of docs/reference/metrics-and-alerts.md from the code.

python docs/write_metrics_and_alerts.py

The text around the tables is written by hand in that page. The alerts are ALERTS of
pipeline/monitoring/alerts/rules.py, and the metrics are those of pipeline/monitoring/columns.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.monitoring import columns
from pipeline.monitoring.alerts.rules import ALERTS
from pipeline.monitoring.columns import Column

PAGE = Path(__file__).with_name("reference") / "metrics-and-alerts.md"


def build_document() -> str:
    """Return the text of the page with new tables between its markers."""
    text = PAGE.read_text(encoding="utf-8")
    tables = {
        "training": _format_columns(columns.TRAINING),
        "objectives": _format_columns(columns.OBJECTIVE_METRICS),
        "evaluation": _format_columns(columns.EVALUATION),
        "performance": _format_columns(columns.PERFORMANCE),
        "time": _format_columns(columns.TIME),
        "memory": _format_columns(columns.MEMORY),
        "alerts": _format_rows(
            ("event", "when", "first step"),
            [(f"`{name}`", alert.condition, alert.first) for name, alert in ALERTS.items()],
        ),
    }
    for name, table in tables.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->\n")
        text = before + begin + table + end + after
    return text


def _format_columns(described: Mapping[str, Column]) -> str:
    rows = [(f"`{name}`", column.unit, column.meaning) for name, column in described.items()]
    return _format_rows(("metric", "unit", "meaning"), rows)


def _format_rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(build_document(), encoding="utf-8")
