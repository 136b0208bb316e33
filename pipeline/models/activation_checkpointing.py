"""Blocks of a transformers model that recompute their activations in backward instead of keeping them."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # its operator
import transformers
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.errors import ModelError

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


# The transformers whose activation_checkpointing_enable takes `every_n_layers` and `offload`.
OLDEST = (5, 23)


def enable_activation_checkpointing(
    model: PreTrainedModel,
    mode: Literal["none", "full", "selective"] | int,
    offload: bool = False,
) -> None:
    """Set up recomputation on the model's blocks. A number N: blocks 0, N, 2N, ... recompute.

    Args:
        offload: Whether the inputs of blocks that recompute wait in host memory.

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
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModelError(
            f"model.activation_checkpointing needs transformers {oldest} or newer, and "
            f"{transformers.__version__} is installed: pip install 'transformers>={oldest}'"
        )
    every = mode if isinstance(mode, int) else 1
    try:
        model.activation_checkpointing_enable(how, every_n_layers=every, offload=offload)
    except ValueError:
        raise ModelError(
            f"model.activation_checkpointing: transformers cannot recompute the blocks of a "
            f"{model.config.model_type}; use none"
        ) from None


def compute_recomputed_share(model: nn.Module) -> float:
    """Return which part recomputes of the blocks whose parameters are on this rank."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    here = [block for block in blocks if not any(p.is_meta for p in block.parameters())]
    return sum(bool(block.gradient_checkpointing) for block in here) / max(1, len(here))


def _draws(model: PreTrainedModel) -> bool:
    """Return whether a forward may draw random numbers: transformers' own configs say so."""
    if not type(model).__module__.startswith("transformers."):
        return True
    numbers = model.config.get_text_config().to_dict().items()
    said = any(_is_positive(value) for key, value in numbers if re.search("drop|jitter|noise", key))
    return said or any(module.p > 0 for module in model.modules() if isinstance(module, _DropoutNd))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _keep_expensive() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes of a block's forward and of its second run in backward."""
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
