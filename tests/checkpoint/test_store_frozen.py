"""Frozen parameters are written once: later checkpoints have the same file and need no earlier one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity.measure import ALONE
from plain_engine import PlainEngine
from support.checkpoint_stores import make_store
from support.checkpoints import verify
from support.resume_across_splits import SPLITS, Run, make_recipe, run_on_split

from pipeline.checkpoint.catalog import Retention, read_complete_manifest
from pipeline.checkpoint.shards import Region, Shard
from pipeline.checkpoint.store import CheckpointStore
from pipeline.distributed.process_group import Job
from pipeline.errors import CheckpointError

FROZEN = "rank-00000.frozen.safetensors"


class Frozen(PlainEngine):
    """Its embedding is not trained: of the same seed at every step."""

    def shards(self) -> Iterator[Shard]:
        for shard in super().shards():
            yield replace(shard, is_frozen=shard.title == "weight of embed.weight")


def store_of(folder: Path, job: Job = ALONE) -> CheckpointStore:
    return CheckpointStore(folder, Retention(keep_last=1), job, "a test")


def test_it_is_the_same_file_in_every_checkpoint(tmp_path):
    store = store_of(tmp_path)
    engine = Frozen(0, 1, seed=4)
    files = set()
    for step, wait in enumerate((False, False, True, True, False), 1):
        engine.held[2][2].add_(1)  # of a layer that is trained
        assert store.save(engine, {"global_step": step}, wait).problem is None
        store.wait()
        assert os.listdir(tmp_path) == [f"step-{step:08d}"]
        assert verify(tmp_path / f"step-{step:08d}") == []
        files.add((tmp_path / f"step-{step:08d}" / FROZEN).stat().st_ino)
    assert len(files) == 1
    resumed = Frozen(0, 1, seed=4)
    resumed.forget()
    assert store_of(tmp_path).resume(resumed) == {"global_step": 5}
    assert all(a.equal(b) for (*_, a), (*_, b) in zip(resumed.held, engine.held, strict=True))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("what", ["other values", "no links", "gone"])
def test_where_it_is_not_the_same_it_is_written(tmp_path, monkeypatch, what, wait):
    store = store_of(tmp_path)
    engine = Frozen(0, 1)
    store.save(engine, {"global_step": 1}, wait)
    store.wait()
    before = (tmp_path / "step-00000001" / FROZEN).stat().st_ino
    if what == "other values":
        engine.held[0][2].add_(1)
    elif what == "gone":
        (tmp_path / "step-00000001" / FROZEN).rename(tmp_path / "kept")
    else:

        def link(*_):
            raise OSError("Operation not supported")

        monkeypatch.setattr(os, "link", link)
    assert store.save(engine, {"global_step": 2}, wait).problem is None
    store.wait()
    assert [done.problem for done in store.poll()] == [None] * (0 if wait else 2)
    assert verify(tmp_path / "step-00000002") == []
    assert (tmp_path / "step-00000002" / FROZEN).stat().st_ino != before


@pytest.mark.parametrize("wait", [True, False])
def test_no_room_is_asked_for_what_is_linked(tmp_path, monkeypatch, wait):
    store = store_of(tmp_path)
    engine = Frozen(0, 1)
    engine.held.insert(
        0, (("embed.weight", "weight"), Region((200_000,), None, 0, 200_000), torch.ones(200_000))
    )
    del engine.held[1]
    assert store.save(engine, {"global_step": 1}, wait).problem is None
    store.wait()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20_000))
    assert store.save(engine, {"global_step": 2}, wait).problem is None
    store.close()
    assert "20 KiB free" in store_of(tmp_path).save(engine, {"global_step": 3}, wait).problem


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_trained_may_change_beside_it(tmp_path, wait):
    """Other shards than in the save before, seen when it was linked or copied already."""
    store = store_of(tmp_path)
    engine = Frozen(0, 1)
    store.save(engine, {"global_step": 1}, wait)
    engine.held = [each for each in engine.held if each[0] != ("norm.bias", "weight")]
    assert store.save(engine, {"global_step": 2}, wait).problem is None
    store.wait()
    assert [done.problem for done in store.poll()] == [None] * (0 if wait else 2)
    assert verify(tmp_path / "step-00000002") == []


def test_a_copy_that_lacks_it_says_so_in_one_line(tmp_path):
    store_of(tmp_path).save(Frozen(0, 1), {"global_step": 1}, wait=True)
    (tmp_path / "step-00000001" / FROZEN).unlink()
    with pytest.raises(CheckpointError, match=f"{FROZEN}: missing; written on ") as caught:
        read_complete_manifest(tmp_path / "step-00000001")
    assert "\n" not in str(caught.value)


def saved_twice(job: Job, recipe, split, folder: str):
    """(titles of what is frozen on this rank, whether it comes first, inodes of the frozen files)."""
    run = Run(job, recipe, split)
    shards = list(run.engine.shards())
    frozen = [shard.is_frozen for shard in shards]
    store = make_store(folder, job)
    for step in (1, 2):
        run.train(step - 1, step)
        assert store.save(run.engine, {"global_step": step}, wait=step == 2).problem is None
    store.close()
    name = f"rank-{job.ranks.rank:05d}.frozen.safetensors"
    paths = [Path(folder) / f"step-0000000{step}" / name for step in (1, 2)]
    inodes = [path.stat().st_ino for path in paths if path.exists()]
    titles = {shard.title for shard in shards if shard.is_frozen}
    return titles, frozen == sorted(frozen, reverse=True), inodes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "zero1", "zero3"])
def test_engines_say_what_is_frozen_first(ranks, tmp_path, name):
    model = {"kind": "engine.test_state:odd", "args": {"width": 16, "channels_last": False}}
    results = run_on_split(ranks, SPLITS[name], saved_twice, make_recipe(model), str(tmp_path))
    assert set.union(*(titles for titles, *_ in results)) == {
        "weight of frozen.weight",
        "weight of frozen.bias",
    }
    for titles, comes_first, inodes in results:
        assert comes_first
        assert len(inodes) == 2 * bool(titles)
        assert len(set(inodes)) <= 1
    assert verify(tmp_path / "step-00000002") == []
