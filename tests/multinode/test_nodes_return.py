"""Machines are lost and come back: torchrun goes on with those there are, on the unbroken run's curve."""

from __future__ import annotations

from typing import Any

import pytest
from multinode.elastic import PATIENCE, STORIES, recipe, tell
from multinode.launchers import torchrun
from support.launch import launch, numbers, write_recipe
from support.poisoned import events

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


@pytest.mark.nightly
def test_a_machine_that_computes_wrong_numbers_leaves(cluster):
    """A bit flips on node3 before step 7; the other two go on without it, from step 4."""
    words = write_recipe(
        cluster.shared,
        max_steps=20,
        model={"kind": "support.faults:on_a_broken_machine", "args": {"at": 7}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        batch={"global_batch_size": 12},
        checkpoint={"every": 4, "keep_last": 9},
        watch={"compare_every": 5, "on_corruption": "leave"},
    )
    run, hosts = cluster.shared / "run", cluster.hosts[:3]
    jobs = {}
    for host in hosts:
        broken = {"BROKEN_MACHINE": "1"} if host == "node3" else {}
        given = ["--config", str(words), f"run_dir={run}"]
        (jobs[host],) = torchrun(cluster, [host], *given, nodes="2:3", endpoint="node1", **broken)
    for host in hosts[:2]:
        assert jobs[host].wait(PATIENCE) == 0, jobs[host].text
    assert jobs["node3"].wait(PATIENCE) == 1, jobs["node3"].text
    (told,) = events(run, "corruption")
    assert (told["leaves"], told["step"], told["from_step"]) == ("node3", 4, 10)
    assert f"going on with {run} from step-00000004" in jobs["node1"].text + jobs["node2"].text
    assert numbers(run)[-1]["step"] == 20
    cluster.wait_until_idle()
