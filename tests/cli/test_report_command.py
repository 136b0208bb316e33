"""`python -m pipeline report`: where the page goes, and one line for whatever is wrong."""

from __future__ import annotations

import json

import pytest

from pipeline.__main__ import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs in runs/, where one stands."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-1", "tiny-2"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "train/loss": 2.0}) + "\n"
        )
    return tmp_path


def test_one_file_for_one_run_or_several(runs, capsys):
    assert main(["report", "runs/tiny-1"]) == 0
    assert main(["report", "runs/tiny-1", "runs/tiny-2/"]) == 0
    assert main(["report", "runs/tiny-1", "-o", "other.html"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/tiny-1/report.html",
        "report.html",
        "other.html",
    ]
    assert "tiny-2" in (runs / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs/tinny-1"], "runs/tinny-1 does not exist; give a run directory"),
        (["runs"], "runs has no metrics.jsonl; give one of the runs in it: tiny-1, tiny-2"),
        (["runs/tiny-1/checkpoints"], "checkpoints has no metrics.jsonl; give a run directory"),
        (
            ["runs/tiny-1", "-o", "runs/tiny-1/metrics.jsonl"],
            "expected the name of a file that ends in .html",
        ),
        (["runs/tiny-1", "-o", "gone/x.html"], "No such file or directory"),
        (["runs/tiny-1", "-o", "folder.html"], "Is a directory"),
    ],
)
def test_a_mistake_is_one_line(runs, capsys, arguments, said):
    (runs / "folder.html").mkdir()
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
