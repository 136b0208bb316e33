"""Digests of the tensors that are equal bit for bit on several ranks.

If two digests differ, a device's memory or computation is broken although no error was raised. The tensors
are read between backward and update: the weights are those that the step used, the gradients are reduced.

Digested in every `watch.compare_every`-th step:
    - weights, frozen ones too
    - under `ddp` and ZeRO 0 also masters, optimizer state and reduced gradients

Digested in every step, and compared in every `watch.compare_every`-th:
    - weights that each update copies from their masters: at ZeRO 1 and 2, and at ZeRO 0 in half precision.
      A flipped bit in them spoils one step's gradient on all ranks, and the update removes the evidence.

Not digested, since only one rank has them or the ranks' values differ:
    - masters, optimizer state and reduced gradients at ZeRO 1 and 2, everything at ZeRO 3
    - gradients before their reduction, activations and buffers

A digest is a sum of 8-byte words, which is computed at the speed of memory. Any single flipped bit changes it
by a power of two, so it is always found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.models.batch_norm import is_sync_batch_norm

DIGEST_KINDS = ("weights", "optimizer state", "gradients", "weights")
"""Kind of tensors of each digest. The last digest covers all steps since the last comparison."""
HISTORY_INDEX = len(DIGEST_KINDS) - 1
SMALL_TENSOR_ELEMENTS = 2**16  # tensors up to this size are concatenated before they are summed
_ODD = 0x9E3779B97F4A7C15 - 2**64  # an odd factor with well-mixed bits, as int64


class ReplicaDigests:
    """Computes digests of a rank's replicated tensors. Ranks with equal `key` have equal tensors.

    Args:
        key: Number of the rank's part of the model.
        weights: Returns the module's parameters.
        optimizer: Optimizer that steps the weights or their masters.
        device: Device of the digests.
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
        """Identification of ranks with equal tensors.

        It contains the processor's name if ranks step replicated weights, since processors round differently.
        """
        self._weights = weights
        self._optimizer = optimizer
        self._device = device
        self._is_sharded = is_sharded
        self._rewritten = rewritten
        self._is_due = self._is_compared = False
        self._digests: list[Tensor] = []
        self._history = self._next_history = torch.zeros((), dtype=torch.int64, device=device)
        optimizer.register_step_pre_hook(lambda *_: self._digest_once())

    def begin(self, is_compared: bool) -> None:
        """Prepare for a step.

        Args:
            is_compared: Whether `end` returns digests.
        """
        self._is_due = True
        self._is_compared = is_compared
        self._next_history = self._history

    def end(self) -> Tensor | None:
        """Return the digests of the step, or `None` if it is not compared.

        The result has one value for each of DIGEST_KINDS, int64. Does not wait for the device.
        """
        self._digest_once()  # DeepSpeed does not call the optimizer in an fp16 step that overflows
        self._history = self._next_history
        if not self._is_compared:
            return None
        digests = torch.stack([*self._digests, self._history])
        self._history = torch.zeros_like(self._history)
        return digests

    @torch.no_grad()
    def _digest_once(self) -> None:
        """Compute the digests on the first call of a step, before its update."""
        if not self._is_due:
            return
        self._is_due = False
        rewritten = self._rewritten()
        if rewritten:
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
    """Return the name of the GPU, or the instruction set of the CPU, that computes a rank's steps."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def mix_digests(history: Tensor, new: Tensor) -> Tensor:
    """Return a digest of a history and a new digest.

    Two histories that differ stay different when equal digests are added. A plain sum would lose a highest
    bit that is flipped in an even number of steps.
    """
    product = (history + new) * _ODD
    return product ^ ((product >> 32) & 0xFFFFFFFF)


@torch.no_grad()
def digest_tensors(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a digest of all bits, 0-dim, int64. Any single flipped bit changes it.

    Does not wait for the device.
    """
    large: list[Tensor] = []
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:  # in the same order on all ranks
        flat = each.detach().reshape(-1)
        (
            large if flat.numel() > SMALL_TENSOR_ELEMENTS else small.setdefault((flat.dtype, flat.device), [])
        ).append(flat)
    # A model has hundreds of small tensors, and each would cost several launches.
    sums = [_bits(flat).to(device) for flat in [*large, *map(torch.cat, small.values())] if flat.numel()]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    # Different odd factors, so that values swapped between two tensors change the digest.
    odd = torch.arange(1, 2 * len(sums), 2, device=device)
    return (torch.stack(sums) * odd).sum()


def _bits(flat: Tensor) -> Tensor:
    """Return the sum of a vector's 8-byte words modulo 2**64, plus the single bytes left at both ends."""
    size = flat.element_size()
    if flat.is_complex():
        return _bits(torch.view_as_real(flat).reshape(-1))
    words = 8 // size
    first = -flat.storage_offset() % words  # torch can view only aligned words as int64
    last = first + (flat.numel() - first) // words * words
    if last <= first:
        return flat.view(torch.uint8).sum(dtype=torch.int64)
    total = flat[first:last].view(torch.int64).sum()
    if last - first == flat.numel():
        return total
    return total + torch.cat([flat[:first], flat[last:]]).view(torch.uint8).sum(dtype=torch.int64)


BUCKET_BYTES = 2**28
# Dtypes that gloo and NCCL send. Tensors of others (16-bit integers, fp8) are sent as bytes.
SENDABLE_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class BufferBroadcast:
    """Sends rank 0's buffers to all ranks after each step.

    DistributedDataParallel would send them before the next forward. Because they are sent after the step,
    evaluation, checkpoint and a resumed run see the same values. Buffers of synchronised batch normalisation
    are equal on all ranks and not sent, nor are non-persistent buffers, which may differ between ranks.
    """

    def __init__(self, module: nn.Module):
        """Store the buffers' modules and names, since a module may replace the tensors later."""
        self._places = [
            (layer, name)
            for layer in module.modules()
            if not is_sync_batch_norm(layer)
            for name in layer._buffers
            if name not in layer._non_persistent_buffers_set
        ]

    def broadcast(self) -> None:
        """Send rank 0's buffers to all ranks. Collective. Does not wait for the device."""
        buffers = [buffer for layer, name in self._places if (buffer := layer._buffers[name]) is not None]
        tensors = [
            buffer if buffer.dtype in SENDABLE_DTYPES else buffer.view(-1).view(torch.uint8)
            for buffer in buffers
        ]
        world = dist.group.WORLD if dist.is_initialized() else None
        if tensors and world is not None and world.size() > 1:
            dist._broadcast_coalesced(world, tensors, BUCKET_BYTES, 0)  # type: ignore[attr-defined]
