"""What several ranks hold the same of, bit by bit, as digests: where two differ, a memory or a computation is
broken, and no error was raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

KINDS = ("weights", "optimizer state", "gradients")
SMALL = 2**16  # elements


class Replicas:
    """Of one rank; those with the same `key` hold the same.

    Args:
        key: Which part of the model it is.
        weights: That every such rank has, between two steps.
        optimizer: Whose gradients and state every such rank has; None: each has its own.
    """

    def __init__(
        self,
        key: int,
        weights: Callable[[], Iterable[Tensor]],
        optimizer: Optimizer | None,
        device: torch.device,
    ):
        self.key = (key, "" if optimizer is None else _processor(device))
        """Other processors round otherwise, and step such ranks apart."""
        self._weights = weights
        self._optimizer = optimizer
        self._device = device
        self._gradients: Tensor | None = None
        self._is_asked = False
        if optimizer is not None:
            optimizer.register_step_post_hook(lambda *_: self._look_at_gradients())

    def begin(self) -> Tensor:
        """Digests of weights and optimizer state, (2,), int64; the next step's gradients are looked at too.

        Before a step. Reads all of it once; waits for nothing.
        """
        self._gradients, self._is_asked = None, True
        weights, state = {id(p): p for p in self._weights()}, list[Tensor]()
        if self._optimizer is not None:
            own = _parameters_of(self._optimizer)  # in half precision masters, which the model has not
            weights |= {id(p): p for p in own}
            states = [self._optimizer.state.get(p, {}) for p in own]
            state = [each for of in states for _, each in sorted(of.items()) if isinstance(each, Tensor)]
        return torch.stack([digest(weights.values(), self._device), digest(state, self._device)])

    def end(self) -> Tensor:
        """Digest of the gradients that the step was made from, 0-dim, int64; 0: each rank has its own."""
        self._is_asked = False
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        return none if self._gradients is None else self._gradients

    def _look_at_gradients(self) -> None:
        if self._is_asked and self._optimizer is not None:
            gradients = [p.grad for p in _parameters_of(self._optimizer) if p.grad is not None]
            self._gradients = digest(gradients, self._device)


def _processor(device: torch.device) -> str:
    """Whose kernels a rank steps with."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In an order that all ranks have."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def digest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A sum of all bits, 0-dim, int64: no single flipped bit leaves it as it was. Waits for nothing."""
    large: list[Tensor] = []
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:  # all ranks have them in one order
        flat = each.detach().reshape(-1)
        (large if flat.numel() > SMALL else small.setdefault((flat.dtype, flat.device), [])).append(flat)
    # A model has hundreds of small ones, each of which would be several launches.
    sums = [_bits(flat).to(device) for flat in [*large, *map(torch.cat, small.values())] if flat.numel()]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    # Odd factors, so that what changes places between two of them shows.
    odd = torch.arange(1, 2 * len(sums), 2, device=device)
    return (torch.stack(sums) * odd).sum()


def _bits(flat: Tensor) -> Tensor:
    """The sum of a vector's 8-byte words, modulo 2**64, and of what is left at both ends."""
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
