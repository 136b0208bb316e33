"""Recomputation of activations in backward, block by block, in models of transformers."""

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

# Operations whose results `selective` keeps. Matrix products and attention take most of a block's time, and
# the rest of the block takes most of its memory.
EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,  # fp8 products, as torch.compile sees them
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    # Attention of packed rows on a GPU.
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._efficient_attention_forward.default,
}


# The first version of transformers whose activation_checkpointing_enable takes `every_n_layers` and
# `offload`.
OLDEST_TRANSFORMERS = (5, 23)


def enable_activation_checkpointing(
    model: PreTrainedModel,
    mode: Literal["none", "full", "selective"] | int,
    offload: bool = False,
) -> None:
    """Let the model's blocks recompute their activations in backward.

    Args:
        model: The model, changed in place.
        mode: The recipe's `model.activation_checkpointing`. With a number N, blocks 0, N, 2N, ... recompute.
        offload: Whether the inputs of blocks that recompute are kept in host memory.

    Raises:
        ModelError: transformers cannot recompute this architecture, or it is too old.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {
        "use_reentrant": False,  # the reentrant kind loses arguments passed by name
        # Reading and restoring the generators costs time in every block, so it is done only if needed.
        "preserve_rng_state": _draws_random_numbers(model),
    }
    if mode == "selective":
        options["context_fn"] = _build_selective_modes
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ModelError(
            f"model.activation_checkpointing needs transformers {oldest} or newer, and "
            f"{transformers.__version__} is installed: pip install 'transformers>={oldest}'"
        )
    every = mode if isinstance(mode, int) else 1
    try:
        model.activation_checkpointing_enable(options, every_n_layers=every, offload=offload)
    except ValueError:
        raise ModelError(
            f"model.activation_checkpointing: transformers cannot recompute the blocks of a "
            f"{model.config.model_type}; set model.activation_checkpointing=none"
        ) from None


def compute_recomputed_share(model: nn.Module) -> float:
    """Return the share of blocks that recompute, among those whose parameters are on this rank."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    own = [block for block in blocks if not any(p.is_meta for p in block.parameters())]
    return sum(bool(block.gradient_checkpointing) for block in own) / max(1, len(own))


def _draws_random_numbers(model: PreTrainedModel) -> bool:
    """Return whether a forward may draw random numbers, according to transformers' config and the layers."""
    if not type(model).__module__.startswith("transformers."):
        return True
    fields = model.config.get_text_config().to_dict().items()
    is_configured = any(_is_positive(value) for key, value in fields if re.search("drop|jitter|noise", key))
    return is_configured or any(module.p > 0 for module in model.modules() if isinstance(module, _DropoutNd))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _build_selective_modes() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the dispatch modes for a block's forward and for its recomputation in backward."""
    forward, recomputation = create_selective_checkpoint_contexts(list(EXPENSIVE))
    return _ExpensiveOperationMode(forward), _ExpensiveOperationMode(recomputation)


class _ExpensiveOperationMode(TorchDispatchMode):
    """Passes only the expensive operations to torch's mode.

    torch requires the recomputation to repeat the forward operation by operation. Under ZeRO-3 it does not:
    parameters gathered ahead in the forward are gathered at another place in backward.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return the answer of torch's own mode."""
        return True

    @property
    def ac_graph_id(self) -> int | None:
        """Number of the block, with which torch.compile marks every operation."""
        return self._mode.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, number: int) -> None:
        self._mode.ac_graph_id = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EXPENSIVE or get_proxy_mode() is not None:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
