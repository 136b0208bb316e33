"""Written files are read by safetensors, in one pass, one shard at a time; refusals are OSErrors."""

from __future__ import annotations

import json
import resource
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_engine import whole_region
from safetensors import safe_open

from pipeline.checkpoint.shard_file import DTYPES, FileLayout, LayoutChangedError, write_file
from pipeline.checkpoint.shards import Region, Shard
from pipeline.checkpoint.store import Snapshot, stream_shards

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def shards(draw):
    made = []
    for _ in range(draw(st.integers(0, 6))):
        length = draw(st.integers(0, 40))
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        values = torch.randint(0, 2 if dtype is torch.bool else 100, (length, 2), generator=generator)
        tensor = values.to(dtype)[:, 0] if draw(st.booleans()) else values[:, 0].to(dtype)
        region = Region((length,), None, 0, length)
        made.append(Shard.of(draw(NAMES), draw(st.sampled_from(["weight", "exp_avg"])), region, tensor))
    return made


def sum_of(layout, content: bytes) -> str:
    """A file's checksum: of its header, and of what lies before each shard and the shard's own sum."""
    whole = xxhash.xxh3_128()
    at = 0
    for slot, offset in zip(layout.shards, layout.offsets, strict=True):
        own = xxhash.xxh3_64_digest(content[offset : offset + slot.num_bytes])
        whole.update(content[at:offset] + own)
        at = offset + slot.num_bytes
    whole.update(content[at:])
    return whole.hexdigest()


@settings(deadline=None, max_examples=60)
@given(shards())
def test_safetensors_reads_what_was_written(made):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        layout = FileLayout.of(made)
        written = write_file(path, layout, stream_shards(layout, iter(made)))
        content = path.read_bytes()
        assert written.xxh3_128 == sum_of(layout, content)
        assert len(content) == layout.num_bytes
        with safe_open(path, "pt") as opened:
            entries = json.loads(layout.header[8:])
            keys = [key for key in entries if not key.startswith(("__metadata__", "padding/"))]
            assert set(opened.keys()) == entries.keys() - {"__metadata__"}
            for key, shard, offset, own in zip(keys, made, layout.offsets, written.shards, strict=True):
                assert key.startswith(f"{shard.kind}/{shard.name}/")
                assert torch.equal(opened.get_tensor(key), shard.values)
                assert opened.get_tensor(key).dtype == shard.values.dtype
                end = offset + shard.values.numel() * shard.values.element_size()
                assert own == xxhash.xxh3_64_hexdigest(content[offset:end])
                assert offset % shard.values.element_size() == 0


@settings(deadline=None, max_examples=30)
@given(shards())
def test_a_snapshot_writes_the_same_file(made):
    with tempfile.TemporaryDirectory() as folder:
        live = Path(folder) / "a"
        later = Path(folder) / "b"
        layout = FileLayout.of(made)
        first = write_file(live, layout, stream_shards(layout, iter(made)))
        snapshot = Snapshot(layout, torch.device("cpu"))
        for _ in range(2):  # the buffers are used again
            snapshot.fill(iter(made))
        for shard in made:
            shard.values.zero_()
        assert write_file(later, layout, snapshot.views()) == first
        assert live.read_bytes() == later.read_bytes()


@pytest.mark.slow
def test_a_snapshot_of_several_chunks_and_a_file_of_several_blocks(tmp_path):
    tensor = torch.arange(90_000_000, dtype=torch.uint8)
    region = Region((90_000_000,), None, 0, 90_000_000)
    made = [Shard.of("a", "weight", Region((3,), None, 0, 3), torch.ones(3, dtype=torch.uint8))]
    made.append(Shard.of("b", "weight", region, tensor))
    layout = FileLayout.of(made)
    snapshot = Snapshot(layout, torch.device("cpu"))
    snapshot.fill(iter(made))
    written = write_file(tmp_path / "a", layout, snapshot.views())
    assert written.xxh3_128 == sum_of(layout, (tmp_path / "a").read_bytes())
    assert written.shards[1] == xxhash.xxh3_64_hexdigest(tensor.numpy().data)


def test_one_shard_is_in_memory_at_a_time(tmp_path):
    alive = weakref.WeakSet()
    most = []

    def fetched():
        for n in range(20):
            tensor = torch.full((1000,), float(n))
            alive.add(tensor)
            most.append(len(alive))
            shard = Shard.of(f"p{n}", "weight", Region((1000,), None, 0, 1000), tensor)
            del tensor
            yield shard
            del shard

    layout = FileLayout.of(fetched())
    most.clear()
    write_file(tmp_path / "a", layout, stream_shards(layout, fetched()))
    assert len(most) == 20
    assert max(most) <= 2  # the one being written, and its successor


@pytest.mark.parametrize("change", ["fewer", "more", "longer", "renamed"])
def test_other_shards_than_laid_out_are_noticed(tmp_path, change):
    made = [Shard.of(name, "weight", whole_region((4,)), torch.zeros(4)) for name in "ab"]
    layout = FileLayout.of(made)
    if change == "fewer":
        made.pop()
    if change == "more":
        made.append(made[0])
    if change == "longer":
        made[1] = Shard.of("b", "weight", whole_region((5,)), torch.zeros(5))
    if change == "renamed":
        made[1] = replace(made[1], name="c")
    with pytest.raises(LayoutChangedError):
        write_file(tmp_path / "a", layout, stream_shards(layout, iter(made)))
    with pytest.raises(LayoutChangedError):
        Snapshot(layout, torch.device("cpu")).fill(iter(made))


def test_a_file_that_may_not_grow_is_an_oserror(tmp_path):
    made = [Shard.of("a", "weight", whole_region((100_000,)), torch.zeros(100_000))]
    layout = FileLayout.of(made)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_file(tmp_path / "a", layout, stream_shards(layout, iter(made)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "a").stat().st_size == 150_000  # the system took a part: a short write
