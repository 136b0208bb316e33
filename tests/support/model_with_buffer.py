"""A custom model that reads a buffer in its forward pass, as routers and normalisations do."""

from __future__ import annotations

import torch
from support.tiny import VOCABULARY, deepspeed_json, make_engine, recipe, token_bundle, train_curve
from torch import Tensor, nn

from pipeline.distributed.process_group import Job


class ModelWithBuffer(nn.Module):
    """Predicts tokens from embeddings to which it adds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)
        self.register_buffer("bias", torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids) + self.bias)


def measure_buffer_and_losses(job: Job, stage: int) -> tuple[str, torch.dtype, list[float]]:
    """Train eight steps at a ZeRO stage in bf16.

    Returns:
        Device type and dtype of the buffer in the engine, and the loss of each step.
    """
    tree = recipe(
        model={"kind": "support.model_with_buffer:ModelWithBuffer"},
        objective={"kind": "causal_lm"},
        batch={"micro_batch_size": 16},
        optimizer={"learning_rate": 0.1},
    )
    split = deepspeed_json(stage, "bf16")
    engine = make_engine(job, tree, split, token_bundle())
    bias = engine.module.bias
    engine.close()
    return bias.device.type, bias.dtype, [loss for loss, _ in train_curve(job, tree, split, 8)]
