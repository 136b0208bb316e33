"""What a process on a CPU holds at the most, as it expected and as the system says."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NUMBER = 16
"""Of the runs of benchmarks/resident.py; the one that is tried daily recomputes."""


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the tokenizer is trained once."""
    return tmp_path_factory.mktemp("resident")


@pytest.mark.daily("1")
@pytest.mark.parametrize("number", range(NUMBER), ids=str)
def test_a_process_holds_what_it_expected(number, folder):
    from resident import RUNS, took

    expected, measured = took(RUNS[number], folder / f"run{number}")
    assert expected == pytest.approx(measured, rel=0.10)


def test_every_run_is_tried():
    from resident import RUNS

    assert len(RUNS) == NUMBER
