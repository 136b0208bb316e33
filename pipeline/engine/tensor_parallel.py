"""What DeepSpeed's AutoTP needs beside itself: whole logits, and a norm that counts every part once.

Matrices are cut over the ranks of a tensor group as transformers' plan says; norms and embeddings (and an
output layer tied to one) lie whole on each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from deepspeed.utils import groups
from torch import Tensor, nn

from pipeline.errors import ModelError


def complete_tensor_section(config: dict[str, Any], model: nn.Module) -> None:
    """Keeps logits whole on every rank: objectives read them, and tied embeddings would be cut.

    Raises:
        ModelError: nothing says which of the model's matrices to cut, and how.
    """
    section = config["tensor_parallel"]
    section["vocab_parallel_lm_head"] = False
    stated = "partition_config" in section or "preset_model" in section
    # Without a plan DeepSpeed guesses by names, and refuses GPT-2's transposed matrices.
    if not stated and _get_hf_tp_plan(model) is None:
        name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ModelError(
            f"tensor_parallel: transformers has no tensor-parallel plan for {name}; use "
            "zero_optimization.stage 3, or say what to cut in tensor_parallel.partition_config"
        )


def clip_and_guard_parts(optimizer: torch.optim.Optimizer, is_part: list[bool], max_norm: float) -> Tensor:
    """torch_engine.clip_and_guard over a tensor group: parts are added up, whole parameters count once.

    Args:
        is_part: Of each of the optimizer's parameters, whether this rank holds a part of it.

    Returns:
        The global gradient norm before clipping, 0-dim. Collective; no host sync.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_first = groups.get_tensor_model_parallel_rank() == 0
    counted = [
        p.grad
        for p, part in zip(parameters, is_part, strict=True)
        if p.grad is not None and (part or is_first)
    ]
    square = torch.nn.utils.get_total_norm(counted).square()
    dist.all_reduce(square, group=groups.get_tensor_model_parallel_group())
    norm = square.sqrt()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    return norm
