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
    (tmp_path / "runs" / "early").mkdir()
    (tmp_path / "runs" / "early" / "recipe.yaml").touch()
    return tmp_path


def test_one_file_for_one_run_or_several(runs, capsys):
    assert main(["report", "runs/tiny-1"]) == 0
    assert main(["report", "runs/tiny-1", "runs/tiny-2/"]) == 0
    assert main(["report", "runs/tiny-1", "-o", "other.html", "--figures", "papers"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/tiny-1/report.html",
        "report.html",
        "2 figures in papers",
        "other.html",
    ]
    assert "tiny-2" in (runs / "report.html").read_text()
    assert {path.name for path in (runs / "papers").iterdir()} == {"loss.png", "loss.svg"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs/tinny-1"], "runs/tinny-1 does not exist; did you mean runs/tiny-1?"),
        (["nowhere/at-all"], "nowhere/at-all does not exist; give a run directory"),
        (["runs"], "runs is no run directory: it has no metrics.jsonl; it holds runs: tiny-1, tiny-2"),
        (["runs/tiny-1/metrics.jsonl"], "lies inside of a run directory; give that: "),
        (["runs/tiny-1/checkpoints"], "lies inside of a run directory; give that: "),
        (["runs/early"], "runs/early has no metrics.jsonl: the run ended before its first row"),
        (
            ["runs/tiny-1", "-o", "runs/tiny-1/metrics.jsonl"],
            "expected the name of a file that ends in .html",
        ),
        (["runs/tiny-1", "-o", "gone/x.html"], "there is no folder gone"),
        (["runs/tiny-1", "-o", "folder.html"], "Is a directory"),
        (["runs/tiny-1", "--figures", "runs/early/recipe.yaml"], "File exists"),
    ],
)
def test_a_mistake_is_one_line(runs, capsys, arguments, said):
    (runs / "folder.html").mkdir()
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize("port", ["x", "-1", "65536"])
def test_a_port_is_a_number(runs, capsys, port):
    with pytest.raises(SystemExit) as ended:
        main(["report", "runs/tiny-1", "--follow", f"--port={port}"])
    assert ended.value.code == 2
    assert "expected a number from 0 to 65535" in capsys.readouterr().err
