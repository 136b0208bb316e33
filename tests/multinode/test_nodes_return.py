"""Machines are lost and come back: torchrun goes on with those there are, on the unbroken run's curve."""

from __future__ import annotations

from typing import Any

import pytest
from multinode.elastic import STORIES, recipe, tell
from support.launch import launch, numbers

pytestmark = pytest.mark.slow
EVERY_DAY = {"come back as rank 0"}
"""It loses one, too."""


def stories():
    for story in STORIES:
        marks = [] if story in EVERY_DAY else [pytest.mark.nightly]
        yield pytest.param(story, marks=marks, id=story.replace(" ", "-"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of one process that nothing happens to: plain PyTorch, fp32."""
    folder = tmp_path_factory.mktemp("alone")
    words = ["--config", str(recipe(folder, 0.0)), f"run_dir={folder / 'run'}"]
    done = launch(*words, PYTHONPATH="tests", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return numbers(folder / "run")


@pytest.mark.parametrize("story", stories())
def test_the_run_is_the_unbroken_one(cluster, unbroken, story):
    rows = tell(cluster, story)
    assert [row["step"] for row in rows] == [row["step"] for row in unbroken]
    for row, expected in zip(rows, unbroken, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6), row["step"]
    cluster.wait_until_idle()
