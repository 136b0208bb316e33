"""Memory for the copy of a checkpoint: taken beside training, pinned where it can be. More: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from plain_engine import PlainEngine

from pipeline.checkpoint.catalog import Retention
from pipeline.checkpoint.shard_file import FileLayout, write_file
from pipeline.checkpoint.store import CheckpointStore, Snapshot, _allocate_chunks, stream_shards
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks

# As a run on a GPU goes about it. Where torch has none, it pins nothing, and values lie on the host.
GPU = torch.device("cuda")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin memory")


def store_of(folder, device):
    return CheckpointStore(folder, Retention(keep_last=3), Job(Ranks(0, 0, 1, 1), device), "plain PyTorch")


@no_gpu
def test_what_cannot_be_pinned_is_pageable(tmp_path, caplog):
    engine = PlainEngine(0, 1, seed=4)
    layout = FileLayout.of(engine.shards())
    first = write_file(tmp_path / "live", layout, stream_shards(layout, engine.shards()))
    snapshot = Snapshot(layout, GPU)
    snapshot.fill(engine.shards())
    engine.forget()
    assert write_file(tmp_path / "later", layout, snapshot.views()) == first
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("copying checkpoints to host memory takes longer: ")
    assert "of this memory cannot be pinned: " in line


def test_what_was_pinned_stays_where_no_more_can_be(monkeypatch):
    """Torch keeps pinned memory that is let go: other memory for the same bytes would come on top."""
    taken = []
    empty = torch.empty

    def limited(size, dtype, pin_memory):
        if pin_memory and taken:
            raise RuntimeError("no more")
        taken.append((size, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", limited)
    assert [len(chunk) for chunk in _allocate_chunks([3, 5, 2], is_pinned=True)] == [3, 5, 2]
    assert taken == [(3, True), (5, False), (2, False)]


@no_gpu
def test_saves_take_the_memory_that_was_prepared(tmp_path):
    store = store_of(tmp_path, GPU)
    engine = PlainEngine(0, 1, seed=4)
    store.prepare(engine)
    prepared = store._reusable.snapshot
    assert prepared is not None
    for step in (1, 2):
        assert store.save(engine, {"global_step": step}).problem is None
        assert store._reusable.snapshot is prepared
        assert engine.waits == [prepared.hold_device] * step  # the next step waits for the copy
    store.prepare(engine)
    assert store._reusable.snapshot is prepared
    store.close()
    engine.forget()
    store_of(tmp_path, GPU).resume(engine)
    assert engine.is_model_of(4)


@no_gpu
def test_nothing_is_prepared_where_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.checkpoint.store.available_memory", lambda: 100)
    store = store_of(tmp_path, GPU)
    engine = PlainEngine(0, 1)
    store.prepare(engine)
    assert store._reusable.snapshot is None
    assert store.save(engine, {"global_step": 1}).write_seconds is not None  # streamed, while training stands
    assert engine.waits == []
    store.close()


def test_on_a_cpu_memory_is_taken_by_the_first_save(tmp_path):
    store = store_of(tmp_path, torch.device("cpu"))
    store.prepare(PlainEngine(0, 1))
    assert store._reusable.snapshot is None
    store.close()
