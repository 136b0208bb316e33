"""Run directories, without a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from monitoring.report.recorded import write_run


@pytest.fixture
def make_run(tmp_path):
    """`make_run(name, lines, ...)` -> a directory; see write_run."""

    def make(name: str = "small-1", *lines, **how) -> Path:
        return write_run(tmp_path / name, *lines, **how)

    return make
