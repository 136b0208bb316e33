"""Where the first infinite or NaN number of a step comes from: found by hooks, in a step done once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.data.batches import on_host
from pipeline.data.extents import place_of
from pipeline.objectives import Batch, LossSum, Objective
from pipeline.objectives.wrapped import WrappedObjective

SHOWN = 8  # samples that a line names


class Found(NamedTuple):
    """The first of a rank. They sort: what comes first in a step is the smallest."""

    is_backward: bool
    micro_batch: int
    order: int
    """Of the modules and gradients of the micro-batch."""
    turn: int
    """Of ranks at the same place: the last stage of a pipeline begins a backward."""
    rank: int
    where: str
    samples: str
    """By source and index; empty: not known."""


class FirstNonFinite:
    """Looks at what every module gives, at the loss, and at every gradient, while its hooks are there.

    Each look waits for the device. What has an input that is not finite itself is not the first.

    Args:
        module: This rank's, without any wrapper.
        micro_batches: Of the step.
        rank: This one.
    """

    def __init__(self, module: nn.Module, micro_batches: Sequence[Batch], rank: int):
        self._module = module
        self._micro_batches = micro_batches
        self._rank = rank
        self._number = -1
        self._order = 0
        self.found: Found | None = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside it a step is done."""
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(self._module.register_forward_pre_hook(self._begin).remove)
            for layer, name in _names_in_the_whole(self._module).items():
                hook = layer.register_forward_hook(partial(self._forward, name), with_kwargs=True)
                stack.callback(hook.remove)
                for own, p in layer.named_parameters(name, recurse=False):
                    if p.requires_grad:
                        stack.callback(p.register_hook(partial(self._backward, own)).remove)
            yield

    def seen_by(self, objective: Objective) -> Objective:
        """The objective, its losses looked at."""
        return _Looking(objective, self)

    def _begin(self, *_: Any) -> None:
        self._number, self._order = self._number + 1, 0

    def lost(self, loss: LossSum) -> None:
        """After its objective."""
        if not bool(loss.minimised.isfinite().all()):
            self._note(False, "the loss", None)

    def _forward(self, name: str, layer: nn.Module, given: Any, named: Any, output: Any) -> None:
        self._order += 1
        if self.found is not None or _is_finite(output) or not _is_finite((given, named)):
            return
        wrong = [own for own, p in layer.named_parameters(recurse=False) if not _is_finite(p)]
        where = f"what {name or 'the model'} ({type(layer).__name__}) gives"
        if wrong:
            where = f"the weights of {name} ({', '.join(wrong)})"
        self._note(False, f"{where}, in forward", output)

    def _backward(self, name: str, gradient: Tensor) -> None:
        self._order += 1
        if self.found is None and not _is_finite(gradient):
            self._note(True, f"the gradient of {name}, in backward", None)

    def _note(self, is_backward: bool, where: str, output: Any) -> None:
        if self.found is None:
            turn, number = -self._rank if is_backward else self._rank, max(self._number, 0)
            samples = self._samples(output)
            self.found = Found(is_backward, number, self._order, turn, self._rank, where, samples)

    def _samples(self, output: Any) -> str:
        """Those whose rows of a module's output are not finite; all of the micro-batch where it has none."""
        number = min(max(self._number, 0), len(self._micro_batches) - 1)
        reading = getattr(on_host(self._micro_batches[number]), "reading", None)
        if reading is None:
            return ""
        indices = list(reading.indices)
        if isinstance(output, Tensor) and output.ndim > 0 and len(output) == len(indices):
            rows = ~output.detach().isfinite().reshape(len(output), -1).all(dim=1)
            indices = [index for index, is_bad in zip(indices, rows.tolist(), strict=True) if is_bad]
        places = [place_of(index, reading.sources) for index in indices[:SHOWN]]
        named = ", ".join(f"{source} {own}" if source else str(own) for source, own in places)
        return named + (" ..." if len(indices) > SHOWN else "")


class _Looking(WrappedObjective):
    """An objective that is looked at."""

    def __init__(self, objective: Objective, first: FirstNonFinite):
        super().__init__(objective)
        self._first = first

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        loss = super().__call__(model, batch)
        self._first.lost(loss)
        return loss


def _names_in_the_whole(module: nn.Module) -> dict[nn.Module, str]:
    """Each module's name; in a stage of a pipeline that of the whole model."""
    from pipeline.models.staging import Layer  # and transformers with it, whose import takes long

    names = {layer: name for name, layer in module.named_modules()}
    for layer in module.modules():
        if isinstance(layer, Layer):
            names |= {part: name for name, part in layer.part.named_modules(prefix=layer.name)}
    return names


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, (tuple, list)):
        return all(map(_is_finite, value))
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return True
