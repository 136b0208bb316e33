"""Buffers that a forward changes are alike on all ranks, whatever their type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.distributed.process_group import Job
from pipeline.engine.replicas import ChangingBuffers


def shared(job: Job, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    module = nn.Module()
    module.register_buffer("values", torch.full(shape, 3 + job.ranks.rank).to(dtype))
    ChangingBuffers(module).share()
    return torch.equal(module.values.float(), torch.full(shape, 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint16, torch.float8_e4m3fn])
def test_all_ranks_have_rank_0s(ranks, dtype):
    for shape in ((), (2, 3)):
        assert all(ranks(2).run(shared, dtype, shape))
