"""One process holds a run; a job that a launcher starts again waits for the one before to let go of it."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

import pytest
from support.tiny import recipe

from pipeline.config.loading import validate_recipe
from pipeline.errors import CheckpointError
from pipeline.run_directory import open_run_directory

SPLIT = {"data": "tiny", "global_batch_size": 8, "deepspeed": None, "world_size": 1}


def test_a_run_is_held_by_one_process(tmp_path, monkeypatch):
    config = validate_recipe(recipe(run_dir=str(tmp_path / "run")), Path("tiny.yaml"), {})
    is_held, may_end = Event(), Event()

    def before() -> None:
        _, lock = open_run_directory(config, SPLIT)
        is_held.set()
        may_end.wait(60)
        lock.release()

    thread = Thread(target=before)
    thread.start()
    assert is_held.wait(60)
    with pytest.raises(CheckpointError, match="is in use by another process"):
        open_run_directory(config, SPLIT)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    Thread(target=lambda: (may_end.wait(0.3), may_end.set())).start()
    directory, lock = open_run_directory(config, SPLIT)
    assert directory.path == tmp_path / "run"
    lock.release()
    thread.join()
