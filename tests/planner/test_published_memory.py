"""The planner's formulas are held to memory that other trainers published."""

from __future__ import annotations

from statistics import median

import pytest
from support.benchmarks import imported
from support.launch import ROOT

published = imported("published_memory")


@pytest.fixture(scope="module")
def tests():
    """Rows that set no constant."""
    return [row for row in published.rows() if row["set"] == "test"]


@pytest.fixture(scope="module")
def compared(tests):
    return list(published.compared(tests))


def test_the_docs_say_how_far_off_it_is(tests, compared):
    ran = [published.fits(row) for row in tests if not row.get("oom")]
    out = [published.fits(row) for row in tests if row.get("oom")]
    typical = median(abs(each.error) for each in compared)
    written = (
        f"The median of all {len(compared)} is {typical:.1%}. None of {len(out)} runs that ran out of "
        f"memory is said to fit; of {len(ran) - ran.count(None)} that ran, "
        f"{ran.count(False)} are said not to."
    )
    text = (ROOT / "docs" / "planning.md").read_text("utf-8")
    assert written.replace("%", " %") in " ".join(text.split())
    for line in published.table(tests).splitlines()[2:]:
        cells = line.replace("_", "-").replace("%", " %").split(" | ")
        assert " | ".join(cells[2:]) in text  # whose trainer has a longer name there


@pytest.mark.parametrize(
    ("counted", "most"), [("allocated", 0.02), ("active", 0.01), ("reserved", 0.06), ("nvidia_smi", 0.03)]
)
def test_half_of_the_published_numbers_are_met_by_each_way_to_count(compared, counted, most):
    assert median(abs(each.error) for each in compared if each.counted == counted) <= most


def test_so_they_are_without_any_term_of_a_trainer(tests):
    """Blocks, states and steps by the planner's formulas alone, logits as transformers makes them."""
    known = ("transformers", "llama-factory", "torchtune", "fsdp_qlora", "axolotl", "litgpt", "arctic")
    plain = [published.without_terms(row) for row in tests if row["stack"] in known]
    assert median(abs(each.error) for each in published.compared(plain)) <= 0.035


def test_no_run_that_ran_out_of_memory_is_said_to_fit(tests):
    found = [published.fits(row) for row in tests if row.get("oom")]
    assert found.count(False) > 110
    assert True not in found


def test_few_runs_that_ran_are_said_not_to_fit(tests):
    found = [published.fits(row) for row in tests if not row.get("oom")]
    assert found.count(True) > 180
    assert found.count(False) <= 12


def test_a_model_that_nobody_traced_is_not_said_to_fit(tests):
    row = next(row for row in tests if row["precision"] == "fp32" and row.get("oom"))
    assert published.fits(row | {"model": "mpt-1b"}) is not True
