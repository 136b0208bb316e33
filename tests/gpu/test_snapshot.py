"""A snapshot of what lies on a GPU: pinned, complete when it returns (python -m pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.shard_file import Layout, write_file
from pipeline.checkpoint.snapshot import CHUNK, Snapshot, streamed
from pipeline.shards import Region, Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_values_may_change_as_soon_as_the_snapshot_is_taken(tmp_path):
    device = torch.device("cuda", 0)
    lengths = [3, CHUNK // 2, 1000]  # over more than one chunk, the second at an odd place
    dtypes = [torch.bool, torch.float32, torch.bfloat16]
    tensors = [torch.randn(n, device=device).to(dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
    expected = [tensor.cpu() for tensor in tensors]

    def shards():
        for n, tensor in enumerate(tensors):
            yield Shard.of(f"p{n}", "weight", Region((len(tensor),), None, 0, len(tensor)), tensor)

    layout = Layout.of(shards())
    live = write_file(tmp_path / "live", layout, streamed(layout, shards()))
    snapshot = Snapshot(layout, device)
    assert all(chunk.is_pinned() for chunk in snapshot._chunks)
    snapshot.fill(shards())
    for tensor in tensors:
        tensor.zero_()
    assert write_file(tmp_path / "later", layout, snapshot.views()) == live
    read = load_file(tmp_path / "later")
    for n, tensor in enumerate(expected):
        assert torch.equal(read[f"weight/p{n}/0"], tensor)
