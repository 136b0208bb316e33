"""How many blocks recompute their activations, so that what the others keep for backward fits into a budget.

Measured once, of the first block that trains; no number of a run depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
