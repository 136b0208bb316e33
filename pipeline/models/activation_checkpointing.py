"""Which blocks of a transformers model recompute their activations in backward instead of keeping them."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # its operator
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.errors import ModelError
from pipeline.files import GIB
from pipeline.models.activation_budget import ActivationBudget
from pipeline.models.activation_offload import InputsOnHost

# What `selective` keeps: matrix products and attention are most of a block's time, and the rest of it is
# most of its memory.
EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,  # of fp8, as torch.compile sees it
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    # Packed rows on a GPU.
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._efficient_attention_forward.default,
}


def checkpoint_activations(
    model: PreTrainedModel,
    mode: Literal["none", "full", "selective"] | int,
    budget_gib: float | None = None,
    offload: bool = False,
) -> None:
    """Sets it up on the model's blocks. A number N: blocks 0, N, 2N, ... recompute.

    Args:
        budget_gib: With `full`: what the blocks may keep, so that only as many recompute as must.
        offload: The inputs of blocks that recompute wait in host memory.

    Raises:
        ModelError: transformers cannot do this for the architecture.
    """
    if mode == "none":
        return
    # The reentrant kind loses arguments passed by name. Where no random number is drawn, none is kept: the
    # state of the generators is read and set again for every block.
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": _draws(model)}
    if mode == "selective":
        how["context_fn"] = _keep_expensive
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
    if offload:
        inputs = InputsOnHost()
        for block in blocks:
            block._gradient_checkpointing_func = inputs.wrap(block._gradient_checkpointing_func)
    if budget_gib is not None:
        ActivationBudget(blocks, budget_gib * GIB)


def share_recomputed(model: nn.Module) -> float:
    """Of the blocks whose parameters are here, those that recompute."""
    blocks = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    here = [block for block in blocks if not any(p.is_meta for p in block.parameters())]
    return sum(block.gradient_checkpointing for block in here) / max(1, len(here))


def _draws(model: PreTrainedModel) -> bool:
    """Whether a forward may draw random numbers: code from elsewhere may, transformers' own says so."""
    if not type(model).__module__.startswith("transformers."):
        return True
    numbers = model.config.get_text_config().to_dict().items()
    said = any(_is_positive(value) for key, value in numbers if re.search("drop|jitter|noise", key))
    return said or any(module.p > 0 for module in model.modules() if isinstance(module, _DropoutNd))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _keep_expensive() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For a block's forward, and for its second run in backward."""
    forward, again = create_selective_checkpoint_contexts(list(EXPENSIVE))
    return _Expensive(forward), _Expensive(again)


class _Expensive(TorchDispatchMode):
    """Shows torch's mode the expensive operations alone.

    torch wants the second run to be the first one, operation by operation, and ZeRO-3's is not: parameters
    gathered ahead in the forward are gathered elsewhere in backward.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own mode."""
        return True

    @property
    def ac_graph_id(self) -> int | None:
        """torch.compile's number of the block; it marks every operation with it."""
        return self._mode.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, number: int) -> None:
        self._mode.ac_graph_id = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EXPENSIVE or get_proxy_mode() is not None:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
