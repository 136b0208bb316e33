"""One process holds a run; a job that a launcher starts again waits for the one before to let go of it."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from threading import Event, Thread

import pytest
import yaml
from support.tiny import recipe

from pipeline.config.loading import ConfigFile, parse_override, set_dotted
from pipeline.config.recipe import validate_recipe
from pipeline.errors import CheckpointError
from pipeline.training.run_directory import open_run_directory

SPLIT = {"data": "tiny", "global_batch_size": 8, "deepspeed": None, "world_size": 1}


def test_a_run_is_held_by_one_process(tmp_path, monkeypatch):
    config = validate_recipe(ConfigFile(Path("tiny.yaml"), recipe(run_dir=str(tmp_path / "run"))))
    is_held = Event()
    may_end = Event()

    def before() -> None:
        _, lock = open_run_directory(config, SPLIT)
        is_held.set()
        may_end.wait(300)
        lock.release()

    thread = Thread(target=before)
    thread.start()
    assert is_held.wait(300)
    with pytest.raises(CheckpointError, match="is in use by another process"):
        open_run_directory(config, SPLIT)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    Thread(target=lambda: (may_end.wait(0.3), may_end.set())).start()
    directory, lock = open_run_directory(config, SPLIT)
    assert directory == tmp_path / "run"
    lock.release()
    thread.join()


def configured(folder: Path, **changes):
    tree = recipe(name="trial", runs_dir=str(folder / "my runs"), **changes)
    return validate_recipe(ConfigFile(Path("tiny.yaml"), tree))


def left(folder: Path, *, finished: bool = False, **changes) -> Path:
    """A run with a checkpoint, as it is left behind."""
    directory, lock = open_run_directory(configured(folder, **changes), SPLIT)
    (directory / "checkpoints" / "step-00000005").mkdir(parents=True)
    (directory / "checkpoints" / "step-00000005" / "manifest.json").touch()
    if finished:
        (directory / "summary.json").write_text("{}")
    lock.release()
    return directory


def test_a_run_of_before_there_was_some_key_goes_on(tmp_path):
    before = left(tmp_path)
    written = yaml.safe_load((before / "recipe.yaml").read_text())
    for section, key in (("optimizer", "kind"), ("optimizer", "momentum"), ("schedule", "kind")):
        del written[section][key]
    written["log"]["sinks"] = written["log"].pop("trackers")  # the name that this key had
    (before / "recipe.yaml").write_text(yaml.safe_dump(written))
    directory, lock = open_run_directory(configured(tmp_path), SPLIT)
    lock.release()
    assert directory == before


SGD = {"optimizer": {"kind": "sgd", "learning_rate": 0.003, "max_grad_norm": 0.5}}
RATE = {"optimizer": {"learning_rate": 0.5}}


@pytest.mark.parametrize(
    ("then", "now", "split", "said"),
    [
        ({}, {}, {"global_batch_size": 4}, "batch.global_batch_size was 8, is 4; to resume that one: "),
        ({"seed": 3}, {}, {}, "seed was 3, is 0; to resume that one: seed=3"),
        ({"seed": 3}, {}, {"global_batch_size": 4}, "seed=3 batch.global_batch_size=8"),
        (
            {},
            {},
            {"data": "other"},
            "its data was different; to resume that one: restore the files it was trained on",
        ),
        (RATE, {}, {}, "optimizer.learning_rate was 0.5, is 0.003"),
        ({}, SGD, {}, "is sgd; to resume that one: 'optimizer.kind=\"adamw\"'"),
        ({"max_steps": 3, "finished": True}, {}, {}, "max_steps was 3, is 8; to resume that one: run_dir='"),
        ({"seed": 3, "finished": True}, {}, {}, None),
        ({"finished": True}, {}, {}, None),
        ({"seed": 3, "log": {"every": 2}, "eval": {"every": 3, "max_samples": 4}}, {}, {}, None),
    ],
)
def test_a_run_that_is_left_behind_is_told_with_what_goes_on_with_it(
    tmp_path, caplog, then, now, split, said
):
    before = left(tmp_path, **then)
    directory, lock = open_run_directory(configured(tmp_path, **now), SPLIT | split)
    lock.release()
    assert directory != before
    told = [line for line in caplog.messages if "to resume that one" in line]
    assert bool(told) == (said is not None)
    finished = [line for line in caplog.messages if " is finished; to continue that one: run_dir='" in line]
    assert bool(finished) == (then == {"finished": True} and not now and not split)
    if said is not None:
        assert told[0].startswith(f"this is a new run; {before}, at step 5, differs: ")
        assert said in told[0]


def test_the_override_that_is_told_goes_on_with_the_run(tmp_path, caplog):
    odd = {"log": {"every": 2}, "schedule": {"warmup": 2, "kind": "linear"}}
    before = left(tmp_path, **odd)
    _, lock = open_run_directory(configured(tmp_path, log={"every": 3}), SPLIT)
    lock.release()
    (told,) = [line for line in caplog.messages if "to resume that one" in line]
    tree = recipe(name="trial", runs_dir=str(tmp_path / "my runs"), log={"every": 3})
    for override in shlex.split(told.partition("to resume that one: ")[2]):
        if not override.startswith("run_dir="):
            set_dotted(tree, *parse_override(override), "command line")
    shutil.rmtree(before / "checkpoints")
    directory, lock = open_run_directory(validate_recipe(ConfigFile(Path("tiny.yaml"), tree)), SPLIT)
    lock.release()
    assert directory == before


@pytest.mark.parametrize(
    "now",
    [
        {"log": {"price_per_device_hour": 2.5}},
        {"log": {"trackers": [{"kind": "my_trackers:MLflow"}]}},
        {"model": recipe()["model"] | {"attention": "sdpa", "fp8": "tensorwise"}},
    ],
)
def test_a_run_goes_on_where_the_curve_does_not_depend_on_what_changed(tmp_path, now):
    before = left(tmp_path)
    directory, lock = open_run_directory(configured(tmp_path, **now), SPLIT)
    lock.release()
    assert directory == before
