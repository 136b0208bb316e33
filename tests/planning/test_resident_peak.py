"""What a process on a CPU holds at the most, as it expected and as the system says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DAILY = 1
"""Of benchmarks/resident.py's one that recomputes."""


@pytest.fixture(scope="module")
def resident():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import resident
    finally:
        sys.path.remove(str(BENCHMARKS))
    return resident


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the tokenizer is trained once."""
    return tmp_path_factory.mktemp("resident")


@pytest.mark.daily(str(DAILY))
@pytest.mark.parametrize("number", range(16), ids=str)
def test_a_process_holds_what_it_expected(resident, number, folder):
    expected, measured = resident.took(resident.RUNS[number], folder / f"run{number}")
    assert expected == pytest.approx(measured, rel=0.10)


def test_all_runs_are_tried(resident):
    assert len(resident.RUNS) == 16
