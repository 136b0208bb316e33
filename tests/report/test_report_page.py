"""What a page says of runs: how they ended, what they were, what differs; and that it is harmless."""

from __future__ import annotations

import json
import logging
import re
import time

import pytest
from filelock import FileLock
from support.recorded import event, row

from pipeline.report import ending
from pipeline.report.ending import write_at_end
from pipeline.report.figures import draw_figures
from pipeline.report.page import differences, page_data, panels_of, render
from pipeline.report.runs import read_run

FAILURE = (
    "2026-01-01 10:00:02,000 ERROR pipeline.failure Traceback (most recent call last):\nValueError: no\n"
)
INFO = "2026-01-01 10:00:01,000 INFO pipeline.api 100 parameters\n"


@pytest.mark.parametrize(
    ("how", "state", "status"),
    [
        ({}, "finished", "finished at step 3"),
        ({"finished": False}, "stopped", "stopped or killed at step 3"),
        ({"finished": False, "log": INFO + FAILURE}, "failed", "failed at step 3"),
        ({"finished": False, "log": FAILURE + INFO}, "stopped", "stopped or killed at step 3"),  # it went on
    ],
)
def test_how_a_run_ended(make_run, how, state, status):
    run = read_run(make_run(lines=[row(1), row(2), row(3)], **how))
    assert (run.state, run.status) == (state, status)
    assert ("ValueError: no" in run.failure) == (state == "failed")


def test_a_run_that_is_trained_now(make_run):
    path = make_run(lines=[row(1)], finished=False)
    with FileLock(path / ".lock"):
        assert read_run(path).status == "running at step 1"
        assert read_run(path, ended=True).state == "stopped"
    assert read_run(path).state == "stopped"


@pytest.mark.parametrize("lines", [[], [{"step": 0, "eval/loss": 9.0}]])
def test_a_run_without_rows_or_with_one(make_run, lines):
    page = page_data([read_run(make_run(lines=lines, finished=False))])
    assert len(page["panels"]) == len(lines)
    assert "</html>" in render(page)


def test_other_files_may_be_missing_or_damaged(make_run):
    path = make_run(lines=[row(1)])
    for name in ("recipe.yaml", "summary.json", "split.json", "environment.json"):
        (path / name).write_text("{")
    assert read_run(path).settings == {}
    for name in (
        "recipe.yaml",
        "summary.json",
        "split.json",
        "environment.json",
        ".lock",
        "logs/rank00000.log",
    ):
        (path / name).unlink()
    assert read_run(path).state == "stopped"


def test_facts(make_run):
    facts = read_run(make_run(lines=[row(50), row(100), event(100)], world_size=4)).facts
    assert facts["steps"] == "100 of 100"
    assert facts["tokens"] == "100k"
    assert facts["train loss, last"] == "0.0500"
    assert facts["tokens/s, mean"] == "2k"
    assert (facts["ranks"], facts["alerts"], facts["commit"]) == ("4", "1", "abcdef0123")


def test_the_keys_that_differ():
    one = {"optimizer.learning_rate": "0.1", "seed": "0", "ds.zero_optimization.stage": "2"}
    other = {"optimizer.learning_rate": "0.2", "seed": "0", "world_size": "8"}
    assert differences([one, other]) == [
        ("optimizer.learning_rate", ["0.1", "0.2"]),
        ("ds.zero_optimization.stage", ["2", None]),
        ("world_size", [None, "8"]),
    ]
    assert differences([one]) == []


def test_settings_of_runs_are_flat(make_run):
    runs = [
        read_run(make_run("a", [row(1)], world_size=1)),
        read_run(make_run("b", [row(1)], recipe={"optimizer": {"learning_rate": 1}}, world_size=2)),
    ]
    assert page_data(runs)["differences"] == [
        ("optimizer.learning_rate", ["0.001", "1"]),
        ("world_size", ["1", "2"]),
    ]


def test_every_column_has_a_plot(make_run):
    lines = [row(1) | {"own/metric": 1, "perf/samples_per_second": 2.0, "memory/peak_resident_gib": 1.0}]
    panels = panels_of([read_run(make_run(lines=lines))])
    keys = [key for panel in panels for key in panel.keys]
    assert sorted(keys) == sorted(set(lines[0]) - {"step", "train/tokens_seen"})
    assert [panel.title for panel in panels if panel.title in panel.keys] == [
        "own/metric",
        "perf/samples_per_second",
    ]


def test_what_stands_in_files_is_never_markup(make_run):
    hostile = "</script><script>alert(1)</script><!--"
    lines = [
        row(1) | {f"data/{hostile}_samples": 3},
        event(1, hostile, message=hostile),
        event(1, "sample", text=hostile),
    ]
    page = render(page_data([read_run(make_run("<b>x{{data}}", lines, recipe={"name": hostile}))]))
    assert "alert(1)</script>" not in page
    assert page.count("<script") == page.count("</script") == 3
    assert "<title>&lt;b&gt;x{{data}}</title>" in page
    assert not re.search(
        r"""(src|href)=["'](?!data:)""", page.partition("<script>")[0] + page.rpartition("</script>")[2]
    )
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["runs"][0]["events"][0]["message"] == hostile


def test_rows_that_a_rollback_took_back_are_beside_the_run(make_run):
    path = make_run(lines=[row(1), row(2)])
    (path / "metrics-until-step-2.jsonl").write_text(json.dumps(row(2, loss=77.0)) + "\n")
    (run,) = page_data([read_run(path)])["runs"]
    assert run["abandoned"][0]["train/loss"]["y"] == [77.0]
    assert run["curves"]["train/loss"]["y"] == [5.0, 2.5]


@pytest.mark.parametrize(("step", "number"), [(2, 1), (1, 2)])
def test_the_last_sample_is_shown_once(make_run, step, number):
    """A finished run has it in summary.json, and may have said it as an event too."""
    path = make_run(lines=[row(1), row(2), event(step, "sample", text="it wrote this")])
    (run,) = page_data([read_run(path)])["runs"]
    assert len(run["samples"]) == number


def test_runs_of_one_name_are_told_apart(make_run):
    runs = [read_run(make_run(name, [row(1)])) for name in ("a/same", "b/same")]
    names = [run["name"] for run in page_data(runs)["runs"]]
    assert len(set(names)) == 2


def test_figures_are_drawn_without_what_is_not_finite(make_run, tmp_path):
    runs = [read_run(make_run(name, [row(1), row(2, loss="NaN"), row(3)])) for name in ("a_$x$", "b")]
    for x in ("step", "tokens", "hours"):
        drawn = draw_figures(runs, tmp_path / x, x)
        assert {path.name for path in drawn} >= {"loss.png", "loss.svg", "throughput.png"}
        assert all(path.stat().st_size > 2000 for path in drawn)
    assert "a_$x$ train/loss" not in (tmp_path / "step" / "throughput.svg").read_text()
    assert ">a_$x$ train/loss<" in (tmp_path / "step" / "loss.svg").read_text()


def test_the_report_of_an_ended_run_raises_nothing_and_has_little_time(make_run, monkeypatch, caplog):
    path = make_run(lines=[row(1)])
    assert write_at_end(path) == path / "report.html"
    assert sorted(each.name for each in path.iterdir() if "report" in each.name) == ["report.html"]
    (path / "report.html").unlink()
    (path / "report.html").mkdir()
    with caplog.at_level(logging.WARNING, "pipeline.report"):
        assert write_at_end(path) is None
        assert "report.html is not written" in caplog.text
        monkeypatch.setattr(ending, "LONGEST", 0.05)
        monkeypatch.setattr(ending, "read_run", lambda *_, **__: time.sleep(1))
        assert write_at_end(path) is None
        assert f"python -m pipeline report {path}" in caplog.text
    (path / "metrics.jsonl").unlink()
    assert write_at_end(path) is None
