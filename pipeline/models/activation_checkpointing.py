"""Recomputation of activations in backward, block by block, in models of transformers."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn._varlen_attn
import transformers
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.errors import ModelError, summarize_error

# Operations whose results the mode `selective` saves in forward instead of recomputing them. They take most
# of a block's time, while the results of its other operations take most of its memory.
SAVED_OPERATIONS = {
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


# The first version whose activation_checkpointing_enable takes `every_n_layers` and `offload`.
MIN_TRANSFORMERS_VERSION = (5, 23)


def enable_activation_checkpointing(
    model: PreTrainedModel,
    mode: Literal["none", "full", "selective"] | int,
    offload: bool = False,
) -> None:
    """Make the model's blocks recompute their activations in backward, instead of saving them in forward.

    Args:
        model: The model, changed in place.
        mode: The recipe's `model.activation_checkpointing`. `none` changes nothing, `full` recomputes every
            block, and `selective` recomputes every block except for SAVED_OPERATIONS. With a number N, only
            blocks 0, N, 2N, ... recompute.
        offload: Whether blocks that recompute save their inputs in host memory.

    Raises:
        ModelError: transformers cannot recompute this architecture, or transformers is too old.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {
        "use_reentrant": False,  # the reentrant variant does not support keyword arguments
        # Saving and restoring the states of random number generators costs time in every block.
        "preserve_rng_state": _draws_random_numbers(model),
    }
    if mode == "selective":
        options["context_fn"] = _build_selective_modes
    if tuple(map(int, transformers.__version__.split(".")[:2])) < MIN_TRANSFORMERS_VERSION:
        oldest = ".".join(map(str, MIN_TRANSFORMERS_VERSION))
        raise ModelError(
            f"model.activation_checkpointing needs transformers {oldest} or newer, and "
            f"{transformers.__version__} is installed: pip install 'transformers>={oldest}'"
        )
    every_n_layers = mode if isinstance(mode, int) else 1
    try:
        model.activation_checkpointing_enable(options, every_n_layers=every_n_layers, offload=offload)
    except ValueError as error:
        raise ModelError(
            f"model.activation_checkpointing is {mode}, but transformers cannot recompute the blocks of a "
            f"{model.config.model_type} ({summarize_error(error)}); set model.activation_checkpointing=none"
        ) from error


def compute_recomputed_share(model: nn.Module) -> float:
    """Return the share of this rank's blocks that recompute, from 0 to 1; 0 without blocks.

    Blocks of other pipeline stages have their parameters on the meta device, and are left out.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    local_blocks = [block for block in blocks if not any(p.is_meta for p in block.parameters())]
    num_recomputing = sum(bool(block.gradient_checkpointing) for block in local_blocks)
    return num_recomputing / max(1, len(local_blocks))


def _draws_random_numbers(model: PreTrainedModel) -> bool:
    """Return whether a forward may draw random numbers, according to the model's config and its layers.

    A class that is not part of transformers may draw them without a field in its config or a dropout layer.
    """
    if not type(model).__module__.startswith("transformers."):
        return True
    fields = model.config.get_text_config().to_dict().items()
    rates = [value for key, value in fields if re.search("drop|jitter|noise", key)]
    if any(_is_positive(rate) for rate in rates):
        return True
    return any(module.p > 0 for module in model.modules() if isinstance(module, _DropoutNd))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _build_selective_modes() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the dispatch modes for a block's forward and for its recomputation in backward."""
    forward_mode, recomputation_mode = create_selective_checkpoint_contexts(list(SAVED_OPERATIONS))
    return _SavedOperationMode(forward_mode), _SavedOperationMode(recomputation_mode)


class _SavedOperationMode(TorchDispatchMode):
    """Shows torch's mode for selective checkpointing only the operations in SAVED_OPERATIONS.

    torch's mode requires the recomputation to repeat every operation that it saw in forward. Under ZeRO-3 the
    recomputation does not repeat all: parameters gathered ahead in forward are gathered at another place in
    backward.

    Args:
        mode: One of the two modes of torch's create_selective_checkpoint_contexts.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, as torch's own mode does."""
        return True

    @property
    def ac_graph_id(self) -> int | None:
        """Id of the block, with which torch.compile marks every operation; `None` if not compiling."""
        return self._mode.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, number: int) -> None:
        self._mode.ac_graph_id = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # While torch.compile traces, torch's mode marks every operation as saved or recomputed.
        if func in SAVED_OPERATIONS or get_proxy_mode() is not None:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
