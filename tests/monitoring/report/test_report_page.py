"""The report's page: how runs ended, their settings and differences; and that the page is harmless."""

from __future__ import annotations

import json
import logging
import os
import re
import time

import numpy as np
import pytest
from filelock import FileLock
from monitoring.report.recorded import event, row

from pipeline.config.command_lines import format_pipeline_command
from pipeline.monitoring.report import page
from pipeline.monitoring.report.page import (
    encode_runs,
    list_panels,
    render_page,
    report_killed_run,
    write_final_report,
)
from pipeline.monitoring.report.runs import (
    ENDED_SILENTLY,
    MAX_POINTS,
    extract_error_line,
    read_run,
    record_processes,
)

FAILURE = (
    "2026-01-01 10:00:02,000 ERROR pipeline.failure Traceback (most recent call last):\nValueError: no\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: no'
INFO = "2026-01-01 10:00:01,000 INFO pipeline.training.api 100 parameters\n"


@pytest.mark.parametrize(
    ("how", "state", "status"),
    [
        ({}, "finished", "finished at step 3"),
        ({"finished": False}, ENDED_SILENTLY, "ended without a recorded reason (killed?) after step 3"),
        ({"finished": False, "log": INFO + FAILURE}, "failed", "failed at step 3"),
        (
            {"finished": False, "log": FAILURE + INFO},
            ENDED_SILENTLY,
            "ended without a recorded reason (killed?) after step 3",
        ),  # it went on
    ],
)
def test_how_a_run_ended(make_run, how, state, status):
    run = read_run(make_run(lines=[row(1), row(2), row(3)], **how))
    assert (run.state, run.facts["state"]) == (state, status)
    assert run.error == {"finished": "", "failed": "ValueError: no", ENDED_SILENTLY: status}[state]
    assert run.failure.endswith("ValueError: no") == (state == "failed")


def test_the_last_line_of_the_record_says_how_it_ended(make_run):
    stopped = make_run("stopped", [row(1), event(1, "time")], finished=False)
    assert read_run(stopped).facts["state"] == "stopped at step 1"
    told = event(1, "run_failed", message="ValueError: no", traceback=TRACEBACK)
    failed = read_run(make_run("failed", [row(1), told], finished=False))
    assert (failed.state, failed.error) == ("failed", "ValueError: no")
    assert failed.failure == f"ValueError: no\n{TRACEBACK}"
    users = make_run("users", [row(1), event(1, "run_failed", message="no such file")], finished=False)
    assert read_run(users).error == "no such file"
    went_on = make_run("went on", [row(1), event(1, "run_failed"), event(1, "time"), row(2)], finished=False)
    assert read_run(went_on).state == ENDED_SILENTLY


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        ("", ""),
        ("error: data.path: no such file\nmore", "error: data.path: no such file"),
        (f"{TRACEBACK}\n  of two lines", "ValueError: no"),
        (
            f"{TRACEBACK}\n\nDuring handling of the above, another:\n\n{TRACEBACK.replace('no', 'late')}",
            "ValueError: late",
        ),
        (
            f"{TRACEBACK}\n2026-01-01 10:00:02,000 ERROR pipeline.failure error: out of memory\n",
            "error: out of memory",
        ),
        ("a frame\n  File 'cut off'\nValueError: no", "a frame"),
    ],
)
def test_the_line_that_names_an_error(failure, line):
    assert extract_error_line(failure) == line


def test_an_error_is_the_first_thing_on_the_page(make_run):
    page = render_page(encode_runs([make_run(lines=[row(1)], finished=False, log=FAILURE)]))
    places = [
        page.index(f'id="{name}"') for name in ("failures", "created", "runs", "panels", "alerts", "events")
    ]
    assert places == sorted(places)
    assert '"error":"ValueError: no"' in page


def test_last_and_best_values(make_run):
    losses = {1: 9.0, 2: 4.0, 3: "NaN", 4: 5.0}
    lines = [row(step, loss=loss, accuracy=loss) for step, loss in losses.items()]
    encoded = encode_runs(
        [make_run(lines=[*lines, {"step": 4, "eval/loss": 1.5}, {"step": 4, "own/loss": 1.0}])]
    )
    run = json.loads(encoded)["runs"][0]
    assert run["last_and_best"] == {
        "train/loss": "5 at step 4; lowest 4 at step 2",
        "eval/loss": "1.5 at step 4, the lowest",
        "train/accuracy": "5 at step 4; highest 9 at step 1",
        "perf/tokens_per_second": "2000 at step 4; highest 2000 at step 1",
    }
    assert run["facts"]["not finite"] == "train/loss 1, train/accuracy 1"
    lost = json.loads(encode_runs([make_run("lost", [row(1, loss="Infinity")])]))["runs"][0]
    assert lost["last_and_best"]["train/loss"] == "inf at step 1"


@pytest.mark.slow
def test_the_page_of_many_rows_and_columns_is_bounded(make_run):
    rng = np.random.default_rng(0)
    lines = [
        {"step": step} | {f"own/{n}": value for n, value in enumerate(rng.normal(size=20))}
        for step in range(4000)
    ]
    assert len(encode_runs([make_run(lines=lines)])) < 20 * MAX_POINTS * 120


def test_of_several_ranks_the_first_failure_is_shown(make_run):
    path = make_run("small", [row(1)], finished=False, log=FAILURE.replace("02,000", "02,500"), world_size=2)
    (path / "logs" / "rank00001.log").write_text(INFO + FAILURE.replace("no", "the cause"))
    (path / "logs" / "rank00002.log").write_text(FAILURE.replace("10:", "09:"))  # of a start with more ranks
    assert read_run(path).error == "ValueError: the cause"


def test_what_a_watchdog_found_is_shown_until_the_run_goes_on(make_run):
    path = make_run("small", [row(1)], finished=False, log=FAILURE)
    (path / "hang").mkdir()
    (path / "hang" / "diagnosis.txt").write_text("rank 0 is gone\n")
    assert read_run(path).error == "rank 0 is gone"
    later = (path / "hang" / "diagnosis.txt").stat().st_mtime + 1
    os.utime(path / "metrics.jsonl", (later, later))
    assert "rank 0" not in read_run(path).failure


def test_a_killed_run_that_goes_on_has_its_report_first(make_run):
    told = report_killed_run(path := make_run("killed", [row(1), row(2)], finished=False), str)
    assert told is not None
    assert (
        told.message == "the last process of this run ended without a recorded reason (killed?) after step 2"
    )
    assert '"state":"ended without a recorded reason' in (path / "report.html").read_text()
    stopped = make_run("stopped", [row(1), event(1, "time")], finished=False)
    fresh = make_run("fresh", finished=False)
    for each in (stopped, fresh):
        assert report_killed_run(each, str) is None
        assert not (each / "report.html").exists()


def test_a_run_that_was_most_likely_killed_for_memory(make_run):
    path = make_run("killed", [row(1) | {"memory/peak_resident_gib": 1e6}], finished=False)
    assert read_run(path).error == f"{ENDED_SILENTLY} after step 1"
    record_processes(path, [])
    reason = "most likely killed for memory: 1 rank on its machine x 1000000.00 GiB"
    assert read_run(path).error.startswith(f"{ENDED_SILENTLY} after step 1: {reason}")
    told = report_killed_run(path, lambda: "batch.micro_batch_size=4")
    assert told is not None
    assert told.line.endswith("GiB; batch.micro_batch_size=4")


def test_a_run_that_is_trained_now(make_run):
    path = make_run(lines=[row(1)], finished=False)
    with FileLock(path / ".lock"):
        assert read_run(path).facts["state"] == "running at step 1"
        assert read_run(path, ended=True).state == ENDED_SILENTLY
    assert read_run(path).state == ENDED_SILENTLY


@pytest.mark.parametrize("lines", [[], [{"step": 0, "eval/loss": 9.0}]])
def test_a_run_without_rows_or_with_one(make_run, lines):
    path = make_run(lines=lines, finished=False)
    assert len(list_panels([read_run(path)])) == len(lines)
    assert "</html>" in render_page(encode_runs([path]))


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
    assert read_run(path).state == ENDED_SILENTLY


def test_what_ran(make_run):
    run = read_run(make_run(lines=[row(50), row(100) | {"perf/elapsed_seconds": 150.0}], world_size=4))
    facts = {"model": "llama", "time": "2m30s", "main host": "1 × cpu", "ranks": "4", "commit": "abcdef0123"}
    assert run.facts == {"state": "finished at step 100"} | facts
    assert run.settings["optimizer.learning_rate"] == "0.001"


def test_every_column_has_a_plot(make_run):
    lines = [row(1) | {"own/metric": 1, "perf/samples_per_second": 2.0, "memory/peak_resident_gib": 1.0}]
    panels = list_panels([read_run(make_run(lines=lines))])
    assert sorted(key for _, keys, _ in panels for key in keys) == sorted(set(lines[0]) - {"step"})
    assert [title for title, _, is_main in panels if not is_main] == ["own/metric", "train/tokens_seen"]


def test_each_metric_of_tasks_has_a_plot_with_a_curve_for_each_task(make_run):
    names = ["cloze/acc", "cloze/perplexity", "sums/acc"]
    lines = [{"step": 5, "eval/loss": 2.0} | {f"eval/tasks/{name}": 0.5 for name in names}]
    panels = {
        title: (keys, is_main) for title, keys, is_main in list_panels([read_run(make_run(lines=lines))])
    }
    assert panels["Tasks: acc"] == (["eval/tasks/cloze/acc", "eval/tasks/sums/acc"], True)
    assert panels["Tasks: cloze/perplexity"] == (["eval/tasks/cloze/perplexity"], True)


def write_answers(run, step, answer):
    """Write results as `TaskResults.write` does, with seven documents."""
    samples = [{"prompt": "1 + 1 =", "target": "2", "answer": answer}] * 7
    (run / "tasks").mkdir(exist_ok=True)
    (run / "tasks" / f"step-{step:08d}.json").write_text(
        json.dumps({"tasks": {"sums": {"samples": samples}}})
    )


def test_the_answers_of_the_last_evaluation_are_shown(make_run):
    """Step 30 was given up by a rollback, and its file is still there."""
    run = make_run(lines=[row(10), row(20)])
    for step in (10, 20, 30):
        write_answers(run, step, f"answer {step}")
    expected = {"step": 20, "task": "sums", "prompt": "1 + 1 =", "target": "2", "answer": "answer 20"}
    assert read_run(run).record.tasks == [expected] * 5
    (run / "tasks" / "step-00000020.json").write_text('{"tasks": 3}')
    assert read_run(run).record.tasks == []


def test_what_stands_in_files_is_never_markup(make_run):
    hostile = "</script><script>alert(1)</script><!--"
    lines = [
        row(1) | {f"data/{hostile}_samples": 3},
        event(1, hostile, message=hostile),
        event(1, "sample", text=hostile),
    ]
    page = render_page(encode_runs([make_run("<b>x{{data}}", lines, recipe={"name": hostile})]))
    assert "alert(1)</script>" not in page
    assert page.count("<script") == page.count("</script") == 3
    assert "{{data}}" in page
    assert not re.search(
        r"""(src|href)=["'](?!data:)""", page.partition("<script")[0] + page.rpartition("</script>")[2]
    )
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["runs"][0]["record"]["alerts"][0]["message"] == hostile


@pytest.mark.parametrize(("step", "number"), [(2, 1), (1, 2)])
def test_the_last_sample_is_shown_once(make_run, step, number):
    """A finished run has it in summary.json, and may have said it as an event too."""
    path = make_run(lines=[row(1), row(2), event(step, "sample", text="it wrote this")])
    assert len(read_run(path).record.samples) == number


def test_the_report_of_an_ended_run_raises_nothing_and_has_little_time(make_run, monkeypatch, caplog):
    path = make_run(lines=[row(1)])
    assert write_final_report(path) == path / "report.html"
    assert sorted(each.name for each in path.iterdir() if "report" in each.name) == ["report.html"]
    (path / "report.html").unlink()
    (path / "report.html").mkdir()
    with caplog.at_level(logging.WARNING, "pipeline.monitoring.report"):
        assert write_final_report(path) is None
        assert "report.html is not written" in caplog.text
        assert not list(path.glob("*.partial"))
        monkeypatch.setattr(page, "REPORT_TIMEOUT", 0.05)
        monkeypatch.setattr(page, "read_run", lambda *_, **__: time.sleep(1))
        assert write_final_report(path) is None
        assert format_pipeline_command("report", path) in caplog.text
    (path / "metrics.jsonl").unlink()
    assert write_final_report(path) is None
