"""A snapshot of what lies on a GPU: pinned, beside what the device is at (python -m pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.shard_file import FileLayout, write_file
from pipeline.checkpoint.shards import Region, Shard
from pipeline.checkpoint.store import CHUNK_BYTES, Snapshot, stream_shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = [3, CHUNK_BYTES // 2, 1000]  # over more than one chunk, the second at an odd place
DTYPES = [torch.bool, torch.float32, torch.bfloat16]
CYCLES = 1_000_000_000  # half a second of the device


@pytest.fixture
def tensors():
    made = [torch.randn(n, device="cuda").to(dtype) for n, dtype in zip(LENGTHS, DTYPES, strict=True)]
    torch.cuda.synchronize()
    return made


def shards_of(tensors, kind="weight"):
    for n, tensor in enumerate(tensors):
        yield Shard.of(f"p{n}", kind, Region((len(tensor),), None, 0, len(tensor)), tensor)


def snapshot_of(layout):
    snapshot = Snapshot(layout, torch.device("cuda", 0))
    assert all(chunk.is_pinned() for chunk in snapshot._chunks.result())
    return snapshot


def check(snapshot, layout, live, expected, path, kind="weight"):
    assert write_file(path, layout, snapshot.views()) == live
    read = load_file(path)
    for n, tensor in enumerate(expected):
        assert torch.equal(read[f"{kind}/p{n}/0"], tensor)


def test_a_step_behind_the_copy_changes_nothing_of_it(tmp_path, tensors):
    expected = [tensor.cpu() for tensor in tensors]
    layout = FileLayout.of(shards_of(tensors))
    live = write_file(tmp_path / "live", layout, stream_shards(layout, shards_of(tensors)))
    snapshot = snapshot_of(layout)
    for turn in range(2):  # the buffers are used again
        for tensor, value in zip(tensors, expected, strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(CYCLES)  # the save's own step is still at work
            snapshot.fill(shards_of(tensors))
            assert not snapshot._copied.query(), "the host waited for the copy"
            snapshot.hold_device()
            for tensor in tensors:
                tensor.zero_()  # what the next step does
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check(snapshot, layout, live, expected, tmp_path / f"later{turn}")


def test_forward_and_backward_run_beside_the_copy(tensors):
    snapshot = snapshot_of(FileLayout.of(shards_of(tensors)))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        snapshot.fill(shards_of(tensors))  # behind that stream alone
    begun = torch.cuda.Event()
    begun.record()  # on the main stream, as a forward is
    begun.synchronize()
    assert not snapshot._copied.query()
    snapshot.hold_device()
    held = torch.cuda.Event()
    held.record()
    assert not held.query()
    held.synchronize()
    assert snapshot._copied.query()


def test_buffers_may_change_at_once(tmp_path, tensors):
    expected = [tensor.cpu() for tensor in tensors]
    layout = FileLayout.of(shards_of(tensors, "buffer"))
    live = write_file(tmp_path / "live", layout, stream_shards(layout, shards_of(tensors, "buffer")))
    snapshot = snapshot_of(layout)
    snapshot.fill(shards_of(tensors, "buffer"))
    for tensor in tensors:
        tensor.zero_()  # what the next forward does
    check(snapshot, layout, live, expected, tmp_path / "later", "buffer")


def test_what_nobody_holds_any_longer_is_copied_as_it_was(tmp_path, tensors):
    """An engine copies what lies in pieces, and lets go of it; its memory is soon another tensor's."""
    expected = [tensor.cpu() for tensor in tensors]
    layout = FileLayout.of(shards_of(tensors))
    live = write_file(tmp_path / "live", layout, stream_shards(layout, shards_of(tensors)))
    snapshot = snapshot_of(layout)
    with torch.cuda.stream(stream := torch.cuda.Stream()):
        snapshot._stream = stream
        torch.cuda._sleep(CYCLES)  # copies come late
    snapshot.fill(shards_of(tensor.clone() for tensor in tensors))
    for tensor in tensors:
        for _ in range(4):
            torch.zeros_like(tensor)
    check(snapshot, layout, live, expected, tmp_path / "later")
