"""Computes digests of the tensors that are equal bit for bit on several ranks, and sends rank 0's buffers.

If the digests of two ranks differ, a device's memory or computation is broken although no error was raised.
The tensors are read between backward and update: the weights are those that the step used, and the gradients
are reduced.

Digested in every `watch.compare_every`-th step:
    - weights, frozen ones too
    - under `ddp` and ZeRO 0 also masters, optimizer state and reduced gradients

Digested in every step, and compared in every `watch.compare_every`-th:
    - weights that each update copies from their masters: at ZeRO 1 and 2, and at ZeRO 0 in half precision.
      A flipped bit in them spoils one step's gradient on all ranks, and the update removes the evidence.

Not digested, since only one rank has them or the ranks' values differ:
    - masters, optimizer state and reduced gradients at ZeRO 1 and 2, everything at ZeRO 3
    - gradients before their reduction, activations and buffers

A digest adds up 8-byte words, which takes no longer than reading the memory. A flipped bit changes the sum of
its vector by a power of two, and all factors are odd, so a single flip always changes the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.models.batch_norm import is_sync_batch_norm

DIGEST_KINDS = ("weights", "optimizer state", "gradients", "weights")
"""Tensors of each digest. The first has weights and masters at the compared step. The fourth has the weights
that updates copy from masters, at each step since the previous comparison."""
HISTORY_INDEX = len(DIGEST_KINDS) - 1
"""Index of the digest of all steps since the last comparison."""
SMALL_TENSOR_ELEMENTS = 2**16  # tensors up to this size are concatenated before they are summed
_ODD = 0x9E3779B97F4A7C15 - 2**64  # an odd factor with well-mixed bits, as int64


class ReplicaDigests:
    """Computes digests of a rank's replicated tensors.

    Ranks whose attribute `key` is equal have equal tensors.

    Args:
        part: Number of the rank's part of the model, the same for ranks with the same part.
        weights: Returns the module's parameters.
        optimizer: Optimizer that steps the weights or their masters.
        device: Device of the digests.
        is_sharded: Whether each rank has its own share of gradients, masters and optimizer state.
        rewritten: Returns the weights that each update copies from their masters.
    """

    def __init__(
        self,
        part: int,
        weights: Callable[[], Iterable[Tensor]],
        optimizer: Optimizer,
        device: torch.device,
        *,
        is_sharded: bool = False,
        rewritten: Callable[[], Sequence[Tensor]] = tuple,
    ):
        self.key = (part, "" if is_sharded else _get_processor_name(device))
        """Part of the model and name of the processor; ranks with equal keys have equal tensors.

        The name matters if every rank updates all weights itself, since processors round differently.
        Otherwise it is empty.
        """
        self._weights = weights
        self._optimizer = optimizer
        self._device = device
        self._is_sharded = is_sharded
        self._rewritten = rewritten
        self._is_due = False  # whether the digests of this step are still to be computed
        self._is_compared = False
        self._digests: list[Tensor] = []
        self._history = torch.zeros((), dtype=torch.int64, device=device)  # of all steps since a comparison
        self._next_history = self._history  # with this step; `begin` discards it if the step is repeated
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

        The result has one value for each of DIGEST_KINDS, int64, on the device. Does not synchronize with the
        device.
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
        stepped: list[Tensor] = []  # the replicated tensors that the optimizer steps: weights or masters
        if not self._is_sharded:
            stepped = [p for group in self._optimizer.param_groups for p in group["params"]]
        weights = {id(p): p for p in [*self._weights(), *stepped]}
        state_tensors = [
            value
            for p in stepped
            for _, value in sorted(self._optimizer.state.get(p, {}).items())
            if isinstance(value, Tensor)
        ]
        gradients = [p.grad for p in stepped if p.grad is not None]
        kinds = (weights.values(), state_tensors, gradients)  # in the order of DIGEST_KINDS
        self._digests = [digest_tensors(tensors, self._device) for tensors in kinds]


def _get_processor_name(device: torch.device) -> str:
    """Return the name of the GPU, or the instruction set of the CPU, that computes a rank's steps."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def mix_digests(history: Tensor, new: Tensor) -> Tensor:
    """Return a digest of a history and a new digest.

    If two histories differ and equal digests are added to both, the results differ. In a plain sum, a flip
    of the highest bit in one step would be cancelled by the same flip in another step.

    Args:
        history: Digest of earlier steps, 0-dim, int64.
        new: Digest of a step, 0-dim, int64.
    """
    product = (history + new) * _ODD
    return product ^ ((product >> 32) & 0xFFFFFFFF)


@torch.no_grad()
def digest_tensors(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a digest of all bits, 0-dim, int64. Any single flipped bit changes it.

    Does not synchronize with the device.

    Args:
        tensors: Tensors in the same order on all ranks.
        device: Device of the digest.
    """
    large: list[Tensor] = []
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.numel() > SMALL_TENSOR_ELEMENTS:
            large.append(flat)
        else:
            small.setdefault((flat.dtype, flat.device), []).append(flat)
    # A model has hundreds of small tensors. One by one, each would cost several launches.
    vectors = [*large, *map(torch.cat, small.values())]
    sums = [_sum_bits(vector).to(device) for vector in vectors if vector.numel()]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    # Different odd factors, so that values swapped between two vectors change the digest. Swaps inside of one
    # are not found.
    factors = torch.arange(1, 2 * len(sums), 2, device=device)
    return (torch.stack(sums) * factors).sum()


def _sum_bits(flat: Tensor) -> Tensor:
    """Return the sum of a vector's 8-byte words modulo 2**64, plus the single bytes left at both ends."""
    size = flat.element_size()
    if flat.is_complex():
        return _sum_bits(torch.view_as_real(flat).reshape(-1))
    elements_per_word = 8 // size
    first = -flat.storage_offset() % elements_per_word  # torch can view only aligned words as int64
    last = first + (flat.numel() - first) // elements_per_word * elements_per_word
    if last <= first:
        return flat.view(torch.uint8).sum(dtype=torch.int64)
    total = flat[first:last].view(torch.int64).sum()
    if last - first == flat.numel():
        return total
    return total + torch.cat([flat[:first], flat[last:]]).view(torch.uint8).sum(dtype=torch.int64)


BUCKET_BYTES = 2**28  # buffers are sent in messages of up to this size
# Dtypes that gloo and NCCL send. Tensors of other dtypes (16-bit integers, fp8) are sent as bytes.
SENDABLE_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class BufferBroadcast:
    """Sends rank 0's buffers to all ranks after each step.

    DistributedDataParallel would send them before the next forward. Because they are sent after the step,
    evaluation, checkpoint and a resumed run see the same values.

    Two kinds of buffers are not sent: those of synchronised batch normalisation, which are equal on all
    ranks, and non-persistent ones, which may differ between ranks.
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
        """Send rank 0's buffers to all ranks. Collective. Does not synchronize with the device."""
        tensors = []
        for layer, name in self._places:
            buffer = layer._buffers[name]
            if buffer is not None:
                is_sendable = buffer.dtype in SENDABLE_DTYPES
                tensors.append(buffer if is_sendable else buffer.view(-1).view(torch.uint8))
        world = dist.group.WORLD if dist.is_initialized() else None
        if tensors and world is not None and world.size() > 1:
            dist._broadcast_coalesced(world, tensors, BUCKET_BYTES, 0)  # type: ignore[attr-defined]
