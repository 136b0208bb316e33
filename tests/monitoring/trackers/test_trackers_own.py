"""A tracker of the user's own by import path, and trackers that fail or never come back."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from monitoring.trackers.test_trackers_composite import build, recipe
from support.corrupted_data import ALONE, train
from support.launch import DIGITS, ROOT, launch, run_directories, write_recipe
from trackers_of_tests import ReadsTheRecord, Recorded

from pipeline.config.schema import LogConfig, TrackerConfig
from pipeline.errors import ConfigError
from pipeline.monitoring.events import Event
from pipeline.monitoring.trackers import check_trackers
from pipeline.monitoring.trackers.interface import OptionalTracker, Trackers
from pipeline.monitoring.trackers.jsonl import MetricsFileError, read_metrics

EVENT = Event("loss_spike", "the loss is 9")


def own(name: str, **args) -> LogConfig:
    return LogConfig(trackers=[TrackerConfig(kind=f"trackers_of_tests:{name}", args=args)])


def test_it_is_given_the_run_its_args_and_everything_that_is_written(tmp_path: Path):
    Recorded.calls = []
    with build(tmp_path, recipe(log=own("Recorded", server="http://x")), start_step=2) as trackers:
        trackers.write(3, {"train/loss": 1.5})
        trackers.tell(3, EVENT)
    assert Recorded.calls == [
        ("made", tmp_path, 2, {}, "http://x"),
        ("write", 3, {"train/loss": 1.5}),
        ("tell", 3, EVENT),
        ("close", 0),
    ]


@pytest.mark.parametrize(
    ("at", "why"),
    [
        *((at, "ConnectionError: no answer") for at in ("open", "write", "tell", "close")),
        ("exit", "SystemExit: 3"),
    ],
)
def test_one_that_fails_is_dropped_with_one_line_and_the_others_have_everything(tmp_path, caplog, at, why):
    """A run that its scheduler starts again at night does not end since a server is down."""
    log = LogConfig(trackers=[*own("Failing", at=at).trackers, *own("Recorded", server="x").trackers])
    Recorded.calls = []
    with build(tmp_path, recipe(log=log)) as trackers:
        for step in (1, 2):
            trackers.write(step, {"train/loss": 1.0})
            trackers.tell(step, EVENT)
    dropped = [each.message for each in caplog.records if "dropped" in each.message]
    assert dropped == [f"trackers_of_tests:Failing is dropped ({why}); the run continues without it"]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [call[0] for call in Recorded.calls] == ["made", *["write", "tell"] * 2, "close"]


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (own("Recordd"), "has no 'Recordd'; did you mean 'Recorded'?"),
        (own("Recorded"), "missing a required argument: 'server'"),
        (own("Recorded", server="x", more=1), "unexpected keyword argument 'more'"),
        (own("Half"), "has no tell and no close; a tracker needs write"),
        (
            LogConfig(trackers=[TrackerConfig(kind="no_such_module:Tracker")]),
            "there is no module 'no_such_module'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_an_error_before_anything_is_built(log, says):
    with pytest.raises(ConfigError) as caught:
        check_trackers(recipe(log=log))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_makes_no_sink_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="make_nothing has no write and no tell and no close"):
        build(tmp_path, recipe(log=own("make_nothing")))


def test_the_record_alone_ends_a_run():
    class Full:
        def write(self, step, row):
            raise MetricsFileError("full")

        def tell(self, step, event):
            pass

        def close(self, exit_code):
            pass

    Trackers([OptionalTracker(Full(), "another")]).write(1, {})
    with pytest.raises(MetricsFileError):
        Trackers([Full()]).write(1, {})


def test_why_a_run_failed_is_told_to_every_sink_but_not_twice_to_the_console(tmp_path: Path, caplog):
    Recorded.calls = []
    trackers = build(tmp_path, recipe(log=own("Recorded", server="x")))
    trackers.write(4, {"train/loss": 1.0})
    with pytest.raises(ConfigError), trackers:
        raise ConfigError("the loss\nis infinite")
    event = Event("run_failed", "the loss is infinite", level="error")
    assert Recorded.calls[2:] == [("tell", 4, event), ("close", 1)]
    assert '"event": "run_failed"' in (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert "infinite" not in caplog.text


@pytest.mark.parametrize("end", [None, KeyboardInterrupt()])
def test_a_run_that_ends_otherwise_has_not_failed(tmp_path: Path, end):
    try:
        with build(tmp_path, recipe()) as trackers:
            trackers.write(1, {"train/loss": 1.0})
            if end is not None:
                raise end
    except KeyboardInterrupt:
        pass
    assert "run_failed" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_example_of_the_docs_calls_mlflow_as_one_run(tmp_path: Path, monkeypatch):
    """Names and arguments as MLflow's documentation has them; MLflow itself is not installed here."""
    calls: list[tuple[str, tuple, dict]] = []

    def call(name):
        def noted(*arguments, **named):
            calls.append((name, arguments, named))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

        return noted

    names = [
        "set_tracking_uri",
        "set_experiment",
        "start_run",
        "log_dict",
        "log_metrics",
        "set_tag",
        "end_run",
    ]
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**{name: call(name) for name in names}))
    page = (ROOT / "docs" / "how-to" / "watching.md").read_text()
    made: dict = {}
    (example,) = (code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "class" in code)
    exec(example, made)
    for start_step in (0, 5):
        tracker = made["MLflow"](tmp_path, start_step, {"recipe": {}}, uri="http://x", experiment="e")
        tracker.write(start_step + 1, {"train/loss": 1.0, "train/grad_norm": math.inf})
        tracker.tell(start_step + 1, EVENT)
        tracker.close(143)
    assert [name for name, _, _ in calls].count("log_dict") == 1
    starts = [named for name, _, named in calls if name == "start_run"]
    assert [each["run_id"] for each in starts] == [None, "abc"]
    assert ("log_metrics", ({"train/loss": 1.0},), {"step": 1}) in calls
    assert ("end_run", ("KILLED",), {}) in calls


@pytest.mark.slow
def test_a_job_ends_without_the_trackers_that_block(tmp_path):
    own = [
        {"kind": "trackers_of_tests:Blocked", "args": {"at": at, "close_seconds": 1}}
        for at in ("write", "close")
    ]
    recipe = write_recipe(tmp_path, **DIGITS, log={"trackers": own})
    result = launch("--config", str(recipe), PYTHONPATH=str(Path(__file__).parent))
    assert result.returncode == 0, result.stderr
    said = [line for line in (result.stdout + result.stderr).splitlines() if "is dropped" in line]
    assert len(said) == 2, said
    assert "it did not take its last" in said[0]
    assert "it did not close within 1 s" in said[1]
    (run,) = run_directories(tmp_path)
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 11))
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 4, 8, 10]
    assert (run / "summary.json").exists()


@pytest.mark.slow
def test_the_time_of_a_run_has_nothing_of_a_sink_that_blocks(tmp_path):
    """It is summed up while the tracker is in its first `write`, and before anything is waited for."""
    ReadsTheRecord.seen = []
    log = {"trackers": [{"kind": "trackers_of_tests:ReadsTheRecord"}]}
    train(ALONE, None, str(tmp_path), {}, max_steps=3, log=log)
    assert set(ReadsTheRecord.seen) == {"summed up", "closed"}
    assert ReadsTheRecord.seen[-1] == "closed"
