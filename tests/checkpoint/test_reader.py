"""A checkpoint that one division of the work wrote is read by any other."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_engine import PlainEngine, whole_region
from support.checkpoints import write_checkpoint

from pipeline.checkpoint.manifest import Manifest, read_manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.shards import Region
from pipeline.errors import CheckpointError

DIVISIONS = st.tuples(st.integers(1, 5), st.sampled_from(["values", "columns"]))


@settings(deadline=None, max_examples=20)
@given(DIVISIONS, DIVISIONS)
def test_any_division_reads_any_other(before, after):
    with tempfile.TemporaryDirectory() as name:
        folder, (world_size, by) = Path(name), after
        write_checkpoint(folder, [PlainEngine(r, before[0], before[1], seed=7) for r in range(before[0])])
        for rank in range(world_size):
            engine = PlainEngine(rank, world_size, by, seed=1)
            with CheckpointReader(read_manifest(folder)) as reader:
                engine.restore(reader)
            assert engine.is_model_of(7)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_stretch_in_any_dtype(data):
    with tempfile.TemporaryDirectory() as name:
        engines = [PlainEngine(rank, 3, "columns") for rank in range(3)]
        manifest = write_checkpoint(Path(name), engines)
        start = data.draw(st.integers(0, 66))
        region = Region((11, 6), None, start, data.draw(st.integers(0, 66 - start)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        # Every second value of a larger tensor: nothing beside them may be touched.
        base = torch.full((2 * region.length,), 5.0, dtype=dtype)
        out = base[::2] if data.draw(st.booleans()) else torch.empty(region.length, dtype=dtype)
        with CheckpointReader(manifest) as reader:
            reader.read("embed.weight", "weight", region, out)
        assert torch.equal(out, engines[0].expected(("embed.weight", "weight"), region).to(dtype))
        assert (base[1::2] == 5.0).all()


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.checkpoint.reader.MAX_OPEN_FILES", 2)
    layout_of = Manifest.layout_of
    laid_out = []

    def noted(manifest, file):
        laid_out.append(file.name)
        return layout_of(manifest, file)

    monkeypatch.setattr(Manifest, "layout_of", noted)
    write_checkpoint(tmp_path, [PlainEngine(rank, 5, seed=7) for rank in range(5)])
    engine = PlainEngine(0, 1, "columns", seed=1)
    with CheckpointReader(read_manifest(tmp_path)) as reader:
        for _ in range(3):
            engine.restore(reader)
            assert len(reader._descriptors) <= 2
    assert sorted(laid_out) == [f"rank-{rank:05d}.safetensors" for rank in range(5)]
    assert engine.is_model_of(7)


def test_what_is_missing_is_named(tmp_path):
    manifest = write_checkpoint(tmp_path, [PlainEngine(rank, 2) for rank in range(2)])
    (tmp_path / "rank-00001.safetensors").unlink()
    with CheckpointReader(manifest) as reader:
        PlainEngine(0, 2).restore(reader)  # all of its own is there
        with pytest.raises(CheckpointError) as caught:
            PlainEngine(1, 2).restore(reader)
        for word in ("rank-00001.safetensors", "embed.weight", "rank 1 wrote it on node1"):
            assert word in str(caught.value)
        with pytest.raises(CheckpointError, match="no weight of tail"):
            reader.read("tail", "weight", whole_region((2,)), torch.empty(2))
        with pytest.raises(CheckpointError, match=r"shape \[11, 6\], and in this model shape \[12, 6\]"):
            reader.read("embed.weight", "weight", whole_region((12, 6)), torch.empty(72))


def test_a_file_cut_short_is_named(tmp_path):
    manifest = write_checkpoint(tmp_path, [PlainEngine(0, 1)])
    path = tmp_path / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with CheckpointReader(manifest) as reader, pytest.raises(CheckpointError, match="of head"):
        PlainEngine(0, 1).restore(reader)
