"""Fixture that writes run directories without training."""

from __future__ import annotations

from pathlib import Path

import pytest
from monitoring.report.recorded import write_run


@pytest.fixture
def make_run(tmp_path):
    """Give `make_run(name, lines, ...)`, which writes a run directory and returns it; see `write_run`."""

    def make(name: str = "small-1", *lines, **options) -> Path:
        return write_run(tmp_path / name, *lines, **options)

    return make
