"""Which parameters took no part in a step: DDP breaks on them, DeepSpeed trains on in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor, nn

from pipeline.errors import listed

log = logging.getLogger(__name__)


def warn_of_unused(names: Sequence[str]) -> None:
    """One line, where there are any."""
    if names:
        log.warning(
            "%d parameter%s took no part in the first step and will not be trained: %s; freeze them "
            "(requires_grad_(False)) or remove them",
            len(names),
            "s" * (len(names) > 1),
            listed(names),
        )


def without_gradient(module: nn.Module) -> list[str]:
    """Names of the parameters that require a gradient and have none."""
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


class GradientWatch:
    """Notes which parameters get a gradient, until it is asked; then its hooks are gone.

    For engines that take the gradients away as they come (DeepSpeed), so that p.grad says nothing. Hooks of
    one step cost a Python call a parameter and micro-batch. No collective: each rank knows its own.

    Args:
        named_parameters: Those that require no gradient are left out.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]):
        trained = {name: p for name, p in named_parameters if p.requires_grad}
        self._unused = dict.fromkeys(trained)
        self._hooks = [p.register_hook(partial(self._note, name)) for name, p in trained.items()]

    def _note(self, name: str, gradient: Tensor) -> None:
        self._unused.pop(name, None)

    def unused(self) -> list[str]:
        """Names of the parameters without a gradient so far, in the model's order."""
        for hook in self._hooks:
            hook.remove()
        return list(self._unused)
