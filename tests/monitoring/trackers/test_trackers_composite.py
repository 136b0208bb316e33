"""Several trackers as one, and what `build_trackers` opens."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.data_schema import DigitsDataConfig
from pipeline.config.model_schema import CNNConfig
from pipeline.config.schema import RunConfig, WandbConfig
from pipeline.monitoring.events import Event
from pipeline.monitoring.trackers import TRACKERS, TrackerKind, build_trackers, check_trackers
from pipeline.monitoring.trackers.interface import Trackers
from pipeline.monitoring.trackers.jsonl import MetricsFileError


class Recorder:
    def __init__(self, failure: Exception | None = None):
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.events: list[tuple[int, Event]] = []
        self.closed_with: list[int] = []
        self.failure = failure

    def write(self, step, row):
        self.rows.append((step, dict(row)))

    def tell(self, step, event):
        self.events.append((step, event))

    def close(self, exit_code):
        self.closed_with.append(exit_code)
        if self.failure:
            raise self.failure


def recipe(**sections) -> RunConfig:
    return RunConfig(
        max_steps=4,
        model=CNNConfig(kind="cnn"),
        data=DigitsDataConfig(kind="digits"),
        wandb=WandbConfig(mode="disabled"),
        **sections,
    )


def build(run_dir: Path, config: RunConfig, **how) -> Trackers:
    given = {"is_main_process": True, "start_step": 0, "max_steps": 4, "run_config": {}} | how
    return build_trackers(config, run_dir=run_dir, **given)


def test_exit_code_is_0_normally_and_1_after_an_exception():
    first = Recorder()
    second = Recorder()
    with Trackers([first]) as trackers:
        trackers.write(1, {"train/loss": 1.0})
    with pytest.raises(KeyboardInterrupt), Trackers([second]):
        raise KeyboardInterrupt
    assert (first.rows, first.closed_with, second.closed_with) == ([(1, {"train/loss": 1.0})], [0], [1])


def test_a_sink_that_fails_to_close_keeps_no_other_open():
    trackers = [Recorder(), Recorder(MetricsFileError("full")), Recorder(OSError("gone")), Recorder()]
    with pytest.raises((MetricsFileError, OSError)), Trackers(trackers):
        pass
    assert [tracker.closed_with for tracker in trackers] == [[0]] * 4


def test_a_failure_to_close_does_not_hide_why_the_run_ended():
    with pytest.raises(ZeroDivisionError), Trackers([Recorder(MetricsFileError("full"))]):
        raise ZeroDivisionError


def test_other_ranks_write_nothing(tmp_path: Path):
    with build(tmp_path, recipe(), is_main_process=False) as trackers:
        trackers.write(1, {"train/loss": 1.0})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_importing_the_trackers_loads_neither_torch_nor_wandb():
    program = (
        "import sys, pipeline.monitoring.trackers; "
        "assert not {'torch', 'wandb', 'tensorboard'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_entry_of_the_table_is_checked_and_opened(tmp_path, monkeypatch):
    checked = []
    recorder = Recorder()
    monkeypatch.setitem(TRACKERS, "log.recorder", TrackerKind(lambda run: [recorder], checked.append))
    config = recipe()
    check_trackers(config)
    assert checked == [config]
    with build(tmp_path, config) as trackers:
        trackers.write(1, {"train/loss": 2.0})
    assert recorder.rows == [(1, {"train/loss": 2.0})]
    assert recorder.closed_with == [0]
