"""Digests of the tensors that several ranks hold bit for bit alike.

Where two digests differ, a memory or a computation is broken, and no error was raised. The tensors are read
between backward and update: the weights are still those that the step used, and the gradients are reduced.

Compared in every `watch.compare_every`-th step:
    - weights, frozen ones too
    - under `ddp` and ZeRO 0 also masters, optimizer state and reduced gradients

Compared in every step, with the result read in every `watch.compare_every`-th:
    - weights that each update copies from their masters: at ZeRO 1 and 2, and at ZeRO 0 in half precision.
      A flipped bit in them spoils one step's gradient on all ranks, and the update removes it.

Not compared, since one rank alone holds them or the ranks' values differ:
    - masters, optimizer state and reduced gradients at ZeRO 1 and 2, everything at ZeRO 3
    - gradients before their reduction, activations and buffers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.models.batch_norm import is_sync_batch_norm

DIGEST_KINDS = ("weights", "optimizer state", "gradients", "weights")
"""What each digest is of. The last one is of all steps since the last comparison."""
HISTORY_INDEX = len(DIGEST_KINDS) - 1
SMALL_TENSOR_ELEMENTS = 2**16  # elements
_ODD = 0x9E3779B97F4A7C15 - 2**64


class ReplicaDigests:
    """Digests of one rank's replicated tensors. Ranks with equal `key` hold the same ones.

    Args:
        key: Which part of the model it is.
        weights: Returns the module's parameters.
        optimizer: Steps the weights or their masters.
        is_sharded: Whether each rank has its own share of gradients, masters and optimizer state.
        rewritten: Returns the weights that each update copies from their masters.
    """

    def __init__(
        self,
        key: int,
        weights: Callable[[], Iterable[Tensor]],
        optimizer: Optimizer,
        device: torch.device,
        *,
        is_sharded: bool = False,
        rewritten: Callable[[], Sequence[Tensor]] = tuple,
    ):
        self.key = (key, "" if is_sharded else _processor(device))
        """Other processors round otherwise, and step such ranks apart."""
        self._weights = weights
        self._optimizer = optimizer
        self._device = device
        self._is_sharded = is_sharded
        self._rewritten = rewritten
        self._is_due = self._is_compared = False
        self._digests: list[Tensor] = []
        self._history = self._next_history = torch.zeros((), dtype=torch.int64, device=device)
        optimizer.register_step_pre_hook(lambda *_: self._look())

    def begin(self, is_compared: bool) -> None:
        """Prepare for a step.

        Args:
            is_compared: Whether `end` returns digests.
        """
        self._is_due, self._is_compared, self._next_history = True, is_compared, self._history

    def end(self) -> Tensor | None:
        """Return the digests of the step, one of each of KINDS, int64, or None.

        Waits for nothing.
        """
        self._look()  # DeepSpeed does not call the optimizer in an fp16 step that overflows
        self._history = self._next_history
        if not self._is_compared:
            return None
        digests = torch.stack([*self._digests, self._history])
        self._history = torch.zeros_like(self._history)
        return digests

    @torch.no_grad()
    def _look(self) -> None:
        """Read the tensors once a step, before its update."""
        if not self._is_due:
            return
        self._is_due = False
        if rewritten := self._rewritten():
            self._next_history = mix_digests(self._history, digest_tensors(rewritten, self._device))
        if not self._is_compared:
            return
        own = (
            [] if self._is_sharded else [p for group in self._optimizer.param_groups for p in group["params"]]
        )
        weights = {id(p): p for p in [*self._weights(), *own]}  # in half precision `own` are masters
        states = [self._optimizer.state.get(p, {}) for p in own]
        state = [each for of in states for _, each in sorted(of.items()) if isinstance(each, Tensor)]
        gradients = [p.grad for p in own if p.grad is not None]
        self._digests = [digest_tensors(each, self._device) for each in (weights.values(), state, gradients)]


def _processor(device: torch.device) -> str:
    """Return the kind of processor whose kernels a rank steps with."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def mix_digests(history: Tensor, new: Tensor) -> Tensor:
    """Return a digest of both. Two histories that once differ do not become equal by a digest that is equal.

    A sum would lose the highest bit that is flipped in an even number of steps.
    """
    product = (history + new) * _ODD
    return product ^ ((product >> 32) & 0xFFFFFFFF)


@torch.no_grad()
def digest_tensors(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a sum of all bits, 0-dim, int64, which any single flipped bit changes. Waits for nothing."""
    large: list[Tensor] = []
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:  # all ranks have them in one order
        flat = each.detach().reshape(-1)
        (
            large if flat.numel() > SMALL_TENSOR_ELEMENTS else small.setdefault((flat.dtype, flat.device), [])
        ).append(flat)
    # A model has hundreds of small ones, each of which would be several launches.
    sums = [_bits(flat).to(device) for flat in [*large, *map(torch.cat, small.values())] if flat.numel()]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    # Odd factors, so that what changes places between two of them shows.
    odd = torch.arange(1, 2 * len(sums), 2, device=device)
    return (torch.stack(sums) * odd).sum()


def _bits(flat: Tensor) -> Tensor:
    """Return the sum of a vector's 8-byte words, modulo 2**64, and of what is left at both ends."""
    size = flat.element_size()
    if flat.is_complex():
        return _bits(torch.view_as_real(flat).reshape(-1))
    words = 8 // size
    first = -flat.storage_offset() % words  # torch views no word that begins elsewhere
    last = first + (flat.numel() - first) // words * words
    if last <= first:
        return flat.view(torch.uint8).sum(dtype=torch.int64)
    total = flat[first:last].view(torch.int64).sum()
    if last - first == flat.numel():
        return total
    return total + torch.cat([flat[:first], flat[last:]]).view(torch.uint8).sum(dtype=torch.int64)


BUCKET_BYTES = 2**28
# What gloo and NCCL send; of other types (16-bit integers, fp8) the bytes go.
SENT = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class BufferBroadcast:
    """After a step rank 0's are everybody's, as DistributedDataParallel has it before the next one.

    So evaluation, checkpoint and a run that goes on see the same values. Synchronised batch normalisation has
    equal ones already, and what is in no checkpoint is each rank's own.
    """

    def __init__(self, module: nn.Module):
        """Note where the buffers are; a module may put another tensor there later."""
        self._places = [
            (layer, name)
            for layer in module.modules()
            if not is_sync_batch_norm(layer)
            for name in layer._buffers
            if name not in layer._non_persistent_buffers_set
        ]

    def broadcast(self) -> None:
        """Send rank 0's buffers to all ranks. Collective. No host sync."""
        buffers = [buffer for layer, name in self._places if (buffer := layer._buffers[name]) is not None]
        tensors = [
            buffer if buffer.dtype in SENT else buffer.view(-1).view(torch.uint8) for buffer in buffers
        ]
        everyone = dist.group.WORLD if dist.is_initialized() else None
        if tensors and everyone is not None and everyone.size() > 1:
            dist._broadcast_coalesced(everyone, tensors, BUCKET_BYTES, 0)  # type: ignore[attr-defined]
