"""What a process on a CPU holds at the most, as it expected and as the system says."""

from __future__ import annotations

import pytest
from support.benchmarks import imported

resident = imported("resident")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the tokenizer is trained once."""
    return tmp_path_factory.mktemp("resident")


@pytest.mark.daily("1")
@pytest.mark.parametrize("number", range(len(resident.RUNS)), ids=str)
def test_a_process_holds_what_it_expected(number, folder):
    """The one that is tried daily recomputes."""
    expected, measured = resident.took(resident.RUNS[number], folder / f"run{number}")
    assert expected == pytest.approx(measured, rel=0.10)
