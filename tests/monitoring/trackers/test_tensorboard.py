"""TensorBoard shows what metrics.jsonl has, also after a rollback, a resume and a kill."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
from monitoring.trackers.test_trackers_composite import build, recipe
from support.corrupted_data import ALONE, BATCH, train

from pipeline.config.schema import LogConfig
from pipeline.monitoring.events import CORRUPTION, Event
from pipeline.monitoring.trackers.jsonl import iterate_record

pytestmark = pytest.mark.slow
# The one that the server has, whose plug-ins keep scalars as tensors too.
accumulators = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")


def shown(run: Path) -> Counter[tuple]:
    """Points and texts, read as TensorBoard reads them."""
    events = accumulators.EventAccumulator(str(run / "tensorboard"), {"tensors": 0})
    events.Reload()
    found: list[tuple] = []
    for tag in events.Tags()["tensors"]:
        name = tag.removeprefix("events/").removesuffix("/text_summary")
        for each in events.Tensors(tag):
            found.append((name, each.step, *each.tensor_proto.string_val))
    return Counter(found)


def recorded(run: Path) -> Counter[tuple]:
    found: list[tuple] = []
    for line in iterate_record(run / "metrics.jsonl"):
        step = line["step"]
        if "event" in line:
            event = Event(line["event"], line["message"], line.get("advice", ""))
            found.append((event.name, step, event.line.encode()))
        else:
            found += [(key, step) for key in line if key != "step"]
    return Counter(found)


def test_what_a_rollback_and_a_resume_take_back_is_not_shown(tmp_path):
    poison = {7 * BATCH: math.nan}
    changes = {
        "max_steps": 12,
        "checkpoint": {"every": 3, "keep_last": 9},
        "watch": {"on_nonfinite": "rollback", "rollback_steps": 1},
        "log": {"tensorboard": True},
    }
    train(ALONE, None, str(tmp_path), poison, **changes)
    found = shown(tmp_path)
    assert found == recorded(tmp_path)
    assert [step for name, step, *_ in found if name == "rollback"] == [6]
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")
    train(ALONE, None, str(tmp_path), poison, **changes)  # from step 9
    assert shown(tmp_path) == recorded(tmp_path)


@pytest.mark.parametrize("redo_evaluation", [False, True])
def test_of_the_step_that_a_run_goes_on_from_it_shows_what_the_record_has(tmp_path, redo_evaluation):
    config = recipe(log=LogConfig(tensorboard=True))
    with build(tmp_path, config) as trackers:
        for step in (1, 2, 3):
            trackers.write(step, {"train/loss": 1.0})
            trackers.write(step, {"eval/loss": 2.0})
            trackers.tell(step, Event(CORRUPTION, f"bits differ at step {step}"))
    with build(tmp_path, config, start_step=2, redo_evaluation=redo_evaluation) as trackers:
        if redo_evaluation:
            trackers.write(2, {"eval/loss": 3.0})
        trackers.write(3, {"train/loss": 1.0})
    assert shown(tmp_path) == recorded(tmp_path)
    assert max(shown(tmp_path).values()) == 1


def test_every_row_is_on_the_disk_before_the_next(tmp_path):
    """A kill would lose those of the last two minutes."""
    with build(tmp_path, recipe(log=LogConfig(tensorboard=True))) as trackers:
        thread = trackers._trackers[1]
        for step in (1, 2):
            trackers.write(step, {"train/loss": 1.0})
        thread._calls.join()
        assert shown(tmp_path) == recorded(tmp_path)
