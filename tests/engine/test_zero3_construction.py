"""A model's __init__ may use weights that are sharded by then."""

from __future__ import annotations

import pytest
import torch
from support.model_with_buffer import measure_buffer_and_losses
from torch import nn

from pipeline.distributed.process_group import Job

pytestmark = pytest.mark.slow


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(20, 20, bias=False) for _ in range(3))
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight)
            self.third.weight.copy_(self.first.weight + self.second.weight)


def whole_weights(job: Job, limit: int) -> list[torch.Tensor]:
    from pipeline.engine import zero3
    from pipeline.engine.deepspeed_base import start_deepspeed
    from pipeline.engine.deepspeed_patches import restore_torch_linear

    start_deepspeed(job)
    deepspeed = {
        "train_batch_size": job.ranks.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
    }
    sharding = zero3.Zero3Sharding(deepspeed, torch.float32)
    known = zero3._GatherOnUse.MAX_ELEMENTS
    zero3._GatherOnUse.MAX_ELEMENTS = limit
    try:
        torch.manual_seed(3)
        with sharding.construct():
            model = Copied()
    finally:
        zero3._GatherOnUse.MAX_ELEMENTS = known
    found = []
    for parameter in model.parameters():
        with sharding.gather([parameter]):
            found.append(parameter.data.clone())
    restore_torch_linear()  # an engine would do so when it is closed
    return found


def test_two_weights_of_one_operation_are_whole_together(ranks):
    """Also where memory is to hold fewer: the operation's own are not sharded again before it."""
    for limit in (100, 10**9):
        for first, second, third in ranks(2).run(whole_weights, limit):
            assert first.abs().sum() > 0
            assert torch.equal(second, first)
            assert torch.equal(third, first + second)


@pytest.mark.nightly
def test_a_buffer_in_a_forward_gives_the_curve_of_a_whole_model(ranks):
    (*here, whole), (*there, sharded) = (
        ranks(1).run(measure_buffer_and_losses, stage)[0] for stage in (2, 3)
    )
    assert here == there == ["cpu", torch.float32]
    assert sharded == pytest.approx(whole, rel=1e-3)
