"""Which blocks of a transformers model recompute their activations in backward instead of keeping them."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.errors import ModelError

# What `selective` keeps: matrix products and attention are most of a block's time, and the rest of it is
# most of its memory.
EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def checkpoint_activations(model: PreTrainedModel, mode: Literal["none", "full", "selective"] | int) -> None:
    """Sets it up on the model's blocks. A number N: blocks 0, N, 2N, ... recompute.

    Raises:
        ModelError: transformers cannot do this for the architecture.
    """
    if mode == "none":
        return
    how: dict[str, Any] = {"use_reentrant": False}  # the reentrant kind loses arguments passed by name
    if mode == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_expensive)
    # The newer name, where transformers has it; the older one warns there.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable(how)
    except ValueError:
        raise ModelError(
            f"model.activation_checkpointing: transformers cannot recompute the blocks of a "
            f"{model.config.model_type}; use none"
        ) from None
    every = mode if isinstance(mode, int) else 1
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for index, block in enumerate(blocks):
        block.gradient_checkpointing = index % every == 0


def _keep_expensive(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
