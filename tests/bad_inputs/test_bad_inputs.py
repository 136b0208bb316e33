"""Everything a user can get wrong: code 2, at most three lines, what, where and what to change.

Each case is a line in one of the tables beside this file; a child is forked for it after the imports.
"""

from __future__ import annotations

import re

import pytest
from bad_inputs import artifacts, command_lines, documents, environments, hostfiles, hostile, recipes, splits
from bad_inputs.case import Case
from bad_inputs.home import Server, make_home

from pipeline.errors import MAX_LINE_LENGTH, MAX_LINES, UNPRINTABLE

TABLES = [recipes, command_lines, environments, hostfiles, splits, documents, artifacts, hostile]
CASES = [case for table in TABLES for case in table.CASES]


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """Answers of the selected cases: case -> (answer, the words that it must hold)."""
    folder = tmp_path_factory.mktemp("bad")
    home = folder / "home"
    selected = {
        id(item.callspec.params["case"]): item.callspec.params["case"]
        for item in request.session.items
        if "case" in getattr(getattr(item, "callspec", None), "params", {}) and item.path == request.path
    }
    server = Server(folder / "server")
    try:
        make_home(home, server)
        heres = {number: folder / "cases" / case.id for number, case in selected.items()}
        for here in heres.values():
            here.mkdir(parents=True)
        given = [case.request(home, heres[number]) for number, case in selected.items()]
        done = dict(zip(selected, server.run(given), strict=True))
        yield {number: (done[number], case.words(home, heres[number])) for number, case in selected.items()}
    finally:
        server.close()


def test_there_are_enough_and_each_has_a_name():
    names = [case.id for case in CASES]
    assert sorted(set(names)) == sorted(names)
    assert len(names) >= 280


@pytest.mark.slow  # one process a case
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=[pytest.mark.nightly] if case.is_nightly else [])
        for case in CASES
    ],
)
def test_it_is_answered(answers: dict, case: Case):
    answer, words = answers[id(case)]
    out = answer["stdout"]
    err = answer["stderr"]
    assert "Traceback" not in out + err, err
    starts = [found.start() for found in re.finditer(r"^([\w. -]+: )?error: ", err, re.MULTILINE)]
    assert len(starts) == 1, f"not one error: {answer}"
    error = err[starts[0] :].rstrip("\n")
    assert answer["code"] == 2, error
    assert error.count("\n") < MAX_LINES, error
    assert max(map(len, error.split("\n"))) <= MAX_LINE_LENGTH + 100
    assert UNPRINTABLE.search(out + err) is None
    assert "REPORT" not in out + err, "transformers' own, of weights that do not fit"
    for word in words:
        assert word in error
