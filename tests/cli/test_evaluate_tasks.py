"""`evaluate --tasks`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json

import pytest
from support.base_model import write_base_model
from support.launch import ROOT

from pipeline.__main__ import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_base_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def call(capsys):
    """`call("--tasks", ...)` -> (exit code, stdout, stderr)."""

    def function(*arguments):
        capsys.readouterr()
        code = main(["evaluate", *map(str, arguments)])
        return code, *capsys.readouterr()

    return function


def test_a_list_says_what_is_there(call):
    code, out, _ = call("--tasks", "list")
    assert code == 0
    assert "addition_choice       which of four numbers is the sum of two" in out
    assert "and lm-eval's own, in " in out
    assert "lm-eval ls tasks" in out


def test_a_table_a_file_and_a_comparison(call, model, tmp_path):
    tasks = ["--tasks", "addition_choice,stdlib_cloze", "--limit", 8]
    code, out, err = call(model, *tasks, "--output", tmp_path / "a.json")
    assert code == 0
    assert "evaluating tiny on cpu in fp32" in err
    table = [line.split() for line in out.splitlines()]
    assert table[0] == ["task", "metric", "value", "n"]
    assert [(row[0], row[1], row[3], row[-1]) for row in table[1:]] == [
        ("addition_choice", "acc", "±", "8"),
        ("stdlib_cloze", "perplexity", "±", "8"),
        ("stdlib_cloze", "acc", "±", "8"),
    ]
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["settings"]["precision"] == "fp32"
    assert written["settings"]["limit"] == 8
    assert len(written["tasks"]["stdlib_cloze"]["documents"]) == 8
    code, out, _ = call(model, "--tasks", "addition_choice", "--compare", tmp_path / "a.json", "--limit", 5)
    assert code == 0
    *_, header, row = out.splitlines()
    assert header.split()[:5] == ["task", "metric", "earlier", "now", "difference"]
    assert row.split()[:2] == ["addition_choice", "acc"]
    assert row.split()[4:] == ["+0", "+0", "to", "+0", "5"]
    other = ["--tasks", "addition_choice", "--num-fewshot", "1", "--compare", tmp_path / "a.json"]
    code, _, err = call(model, *other, "--limit", 5)
    assert code == 0
    assert "warning: the earlier results had other prompts (num_fewshot of addition_choice)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "addition"], "SOURCE is missing: give a run directory"),
        (["MODEL", "--output", "a.json"], "--output is for tasks; name some"),
        (["MODEL", "--limit", "3"], "--limit is for tasks"),
        (["MODEL"], "is no run, so it has no held-out data"),
        (["MODEL", "--tasks", "addition", "--limit", "0"], "--limit 0: expected a number above 0"),
        (["MODEL", "--tasks", "addition", "--limit", "nan"], "--limit nan: expected a number above 0"),
        (["MODEL", "--tasks", "addition", "--num-fewshot", "-1"], "--num-fewshot -1: expected 0 or more"),
        (
            ["MODEL", "--tasks", "addition", "--output", "/none/a.json"],
            "--output /none/a.json: there is no folder",
        ),
        (["MODEL", "--tasks", "addition", "--output", "/"], "--output /: it is a folder"),
        (["MODEL", "--tasks", "addition", "--compare", "none.json"], "none.json: No such file"),
        (["MODEL", "--tasks", "addition", "--step", "best"], "--step best:"),
        (["MODEL", "--tasks", "addition", "optimizer.eps=1"], "is no run, so it has no recipe"),
        (["none", "--tasks", "addition"], "none"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(call, model, arguments, message):
    code, out, err = call(*[model if word == "MODEL" else word for word in arguments])
    assert (code, out) == (2, "")
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in error
    assert "Traceback" not in err


def test_without_lm_eval_it_says_what_to_install(call, model, monkeypatch):
    monkeypatch.setattr("pipeline.config.optional_packages.is_installed", lambda module: module != "lm_eval")
    for arguments in ((model, "--tasks", "addition"), ("--tasks", "list")):
        code, _, err = call(*arguments)
        assert code == 2
        assert f"--tasks needs lm-eval, which is not installed: pip install -e '{ROOT}[tasks]'" in err
