"""The console: short plain lines, some seconds apart."""

import io
import re

from monitoring.trackers.test_trackers_composite import build, recipe

from pipeline.config.schema import LogConfig
from pipeline.monitoring.trackers.console import (
    ConsoleTracker,
    eval_lines,
    format_count,
    format_loss,
    format_norm,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def train_row(loss: float = 2.5) -> dict[str, float]:
    return {"train/loss": loss, "train/learning_rate": 2e-4, "perf/step_time_seconds": 1.0}


def plain_tracker(max_steps: int) -> tuple[ConsoleTracker, io.StringIO, Clock]:
    out = io.StringIO()
    clock = Clock()
    return ConsoleTracker(max_steps, file=out, min_interval=5.0, clock=clock), out, clock


def test_plain_lines_are_throttled_but_first_last_and_eval_always_stand():
    tracker, out, clock = plain_tracker(max_steps=20)
    for step in range(1, 21):
        clock.now = float(step)
        tracker.write(step, train_row())
        if step == 8:
            tracker.write(step, {"eval/loss": 2.0, "eval/perplexity": 7.389})
    tracker.close(0)
    heads = [line.split("/")[0] for line in out.getvalue().splitlines()]
    assert heads == ["step  1", "step  6", "eval  8", "step 11", "step 16", "step 20"]


def test_a_run_that_stops_early_still_prints_its_newest_row():
    tracker, out, _ = plain_tracker(max_steps=100)
    for step in (1, 2, 3):
        tracker.write(step, train_row())
    tracker.close(1)
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == ["step   1", "step   3"]


def test_plain_line_shows_the_row_for_humans_and_only_what_is_there():
    tracker, out, _ = plain_tracker(max_steps=2000)
    row = train_row() | {
        "train/grad_norm": 0.5213,
        "perf/tokens_per_second": 12345.6,
        "train/skipped_steps": 0,
    }
    tracker.write(120, row | {"memory/peak_allocated_gib": 5.214, "train/tokens_seen": 10**6})
    assert out.getvalue() == (
        "step  120/2000  loss  2.5000  lr 2.00e-04  grad  0.52   12.3k tok/s  mem   5.2 GiB  31m20s left\n"
    )


def test_time_left_counts_what_happens_between_steps():
    tracker, out, clock = plain_tracker(max_steps=100)
    tracker.write(10, train_row())  # 90 steps of 1 s
    clock.now = 40.0
    tracker.write(20, train_row())  # 10 steps took 40 s: 80 to go at 4 s
    assert re.findall(r"(\S+) left", out.getvalue()) == ["1m30s", "5m20s"]


def test_plain_lines_are_never_wrapped_or_coloured(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    tracker, out, _ = plain_tracker(max_steps=2)
    tracker.write(1, train_row(float("nan")))
    assert out.getvalue().count("\n") == 1
    assert "loss     nan" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_numbers():
    assert [format_loss(x) for x in (2.34567, 0.0, 123456.0)] == ["2.3457", "0.0000", "1.235e+05"]
    assert [format_norm(x) for x in (0.5213, 0.0012, 0.0, 1e6)] == ["0.52", "1.2e-03", "0.00", "1.0e+06"]
    assert [format_count(x) for x in (950, 999.7, 12_345, 1.23e6)] == ["950", "1.0k", "12.3k", "1.2M"]


def test_several_sets_stand_under_each_other():
    row = {
        "eval/loss": 3.0,
        "eval/perplexity": 20.0855,
        "eval/code/loss": 2.5,
        "eval/long_name/loss": 12345.0,
    }
    tracker, out, _ = plain_tracker(max_steps=1000)
    tracker.write(40, row)
    assert out.getvalue().splitlines() == [
        "eval   40/1000  loss  3.0000  perplexity   20.09",
        "          code  loss  2.5000",
        "     long_name  loss 1.234e+04",
    ]


def test_tasks_have_a_line_of_their_own_behind_the_sets():
    row = {
        "eval/loss": 3.0,
        "eval/code/loss": 2.5,
        "eval/tasks/arithmetic/exact_match": 0.42,
        "eval/tasks/cloze/acc": 0.31,
        "eval/tasks/cloze/perplexity": 4.1e11,
    }
    assert eval_lines(40, 1000, row) == [
        "eval   40/1000  loss  3.0000",
        "          code  loss  2.5000",
        "tasks   40/1000  arithmetic exact_match 0.420  cloze acc 0.310 perplexity 4.1e+11",
    ]


def test_a_line_of_tasks_alone_names_the_first_ones():
    (line,) = eval_lines(9, 9, {f"eval/tasks/task{number}/acc": 0.5 for number in range(11)})
    assert line.startswith("tasks 9/9  task0 acc 0.500  task1 acc 0.500")
    assert line.endswith("task7 acc 0.500  and 3 more")


def test_a_quiet_console_has_no_rows(tmp_path, capsys):
    with build(tmp_path, recipe(log=LogConfig(console="warning"))) as trackers:
        trackers.write(1, train_row())
    assert capsys.readouterr().out == ""
