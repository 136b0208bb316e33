"""Blocks of a transformers model that recompute their activations in backward instead of keeping them.

How many do may follow from a budget for what the others keep. It is measured once, of the first block that
trains; no number of a run depends on it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # its operator
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.errors import ModelError
from pipeline.files import GIB

log = logging.getLogger(__name__)


class ActivationBudget:
    """Decides in the first training forward, after one block, which of the blocks recompute."""

    def __init__(self, blocks: Sequence[nn.Module], budget: float):
        """
        Args:
            blocks: They recompute where their `gradient_checkpointing` says so, which is set here.
            budget: Bytes that a rank's blocks may keep of one micro-batch.
        """
        self._blocks, self._budget = blocks, budget
        self._passed: dict[int, int] = {}
        """Storage -> bytes of what the measured block is given: others hold it as well."""
        self._kept: dict[int, int] = {}
        """The same of what it keeps for backward besides."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._measured: nn.Module | None = None
        self._handles = []
        for block in blocks:
            block.gradient_checkpointing = False  # type: ignore[assignment]
            self._handles += [
                block.register_forward_pre_hook(self._before, with_kwargs=True),
                block.register_forward_hook(self._after, always_call=True),
            ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not (block.training and torch.is_grad_enabled()) or self._measured is not None:
            return
        self._measured = block
        self._passed = _storages(tree_leaves((args, kwargs)))
        self._input = next(each for each in tree_leaves((args, kwargs)) if torch.is_tensor(each))
        self._hooks.__enter__()

    def _keep(self, tensor: Tensor) -> Tensor:
        assert self._measured is not None
        there = self._passed | _storages(list(self._measured.parameters()))  # ZeRO 3's come and go
        self._kept |= {at: size for at, size in _storages([tensor]).items() if at not in there}
        return tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, block: nn.Module, _: Any, output: Any) -> None:
        if block is not self._measured:
            return
        self._hooks.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        if output is not None:  # else the forward has failed
            self._decide(block)

    def _decide(self, measured: nn.Module) -> None:
        own = sum(self._kept.values())
        taken = self._input.nbytes  # which every block keeps, recomputed or not
        blocks = [b for b in self._blocks if not any(p.is_meta for p in b.parameters())]  # this stage's
        room = self._budget - len(blocks) * taken
        keeping = min(len(blocks), max(0, int(room / max(own, 1))))
        if dist.is_initialized() and any(hasattr(p, "ds_id") for p in measured.parameters()):
            # A recomputed block of ZeRO 3 gathers its parameters once more, on all ranks or on none.
            number = torch.tensor(keeping, device=self._input.device)
            dist.all_reduce(number, dist.ReduceOp.MIN)
            keeping = int(number)
        # The last ones keep theirs: backward begins with them, and has freed them when others recompute.
        for index, block in enumerate(blocks):
            block.gradient_checkpointing = index < len(blocks) - keeping  # type: ignore[assignment]
        log.info(
            "model.activation_budget_gib: %d of %d blocks recompute; one keeps %.3f GiB, its input %.3f GiB",
            len(blocks) - keeping,
            len(blocks),
            own / GIB,
            taken / GIB,
        )
        self._passed, self._kept = {}, {}
        del self._input


def _storages(tensors: list[Any]) -> dict[int, int]:
    held = [each.untyped_storage() for each in tensors if torch.is_tensor(each)]
    return {storage.data_ptr(): storage.nbytes() for storage in held}


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
    """Set up recomputation on the model's blocks. A number N: blocks 0, N, 2N, ... recompute.

    Args:
        budget_gib: With `full`: what the blocks may keep, so that only as many recompute as must.
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
    every = mode if isinstance(mode, int) else 1
    try:
        model.activation_checkpointing_enable(how, every_n_layers=every, offload=offload)
    except ValueError:
        raise ModelError(
            f"model.activation_checkpointing: transformers cannot recompute the blocks of a "
            f"{model.config.model_type}; use none"
        ) from None
    if budget_gib is not None:
        ActivationBudget(_blocks_of(model), budget_gib * GIB)


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def share_recomputed(model: nn.Module) -> float:
    """Return which part recomputes of the blocks whose parameters are on this rank."""
    here = [block for block in _blocks_of(model) if not any(p.is_meta for p in block.parameters())]
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
