"""A model of one's own with a buffer in its forward, as routers and normalisations have."""

from __future__ import annotations

import torch
from support.tiny import VOCABULARY, deepspeed_json, make_engine, recipe, token_bundle, train_curve
from torch import Tensor, nn

from pipeline.distributed.process_group import Job


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)
        self.register_buffer("bias", torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids) + self.bias)


def buffer_and_curve(job: Job, stage: int) -> tuple[str, torch.dtype, list[float]]:
    """(device and dtype of the buffer in the engine, losses of some steps)."""
    tree = recipe(
        model={"kind": "support.buffered:Buffered"},
        objective={"kind": "causal_lm"},
        batch={"micro_batch_size": 16},
        optimizer={"learning_rate": 0.1},
    )
    split = deepspeed_json(stage, "bf16")
    engine = make_engine(job, tree, split, token_bundle())
    bias = engine.module.bias
    engine.close()
    return bias.device.type, bias.dtype, [loss for loss, _ in train_curve(job, tree, split, 8)]
