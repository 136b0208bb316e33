"""What a rank holds where torch's optimizer steps whole parameters: plain PyTorch, and ZeRO 0 in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engine.fragments import BUFFER, MOMENTS, WEIGHT, Scalars
from pipeline.engine.held import Held, Part, shared_out

ADAM_STEP = "adam_step"


@dataclass(frozen=True)
class Named:
    """A parameter on this rank, and what it is in the whole model."""

    name: str
    parameter: nn.Parameter
    part: Part
    is_written: bool
    """False: ranks of other parts or stages hold a copy, and one of them writes."""

    def held(self, kind: str, start: int, values: Tensor) -> Held:
        """A stretch of its values, or of a moment's."""
        return Held(self.name, kind, self.part, start, values.detach(), self.is_written)


def whole_parameters(module: nn.Module) -> list[Named]:
    """Of a rank that holds the whole model."""
    return [
        Named(name, p, Part.all_of(getattr(p, "ds_shape", p.shape)), True)
        for name, p in module.named_parameters()
    ]


def kept_buffers(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The buffers that belong to the model's weights (BatchNorm's statistics), by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules(prefix=prefix)
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def names_of(module: nn.Module) -> list[str]:
    """Of all that a checkpoint keeps of a whole model."""
    return [*(name for name, _ in module.named_parameters()), *kept_buffers(module)]


def held_buffers(buffers: Mapping[str, Tensor], is_written: bool) -> Iterator[Held]:
    """Buffers lie whole on each rank; where they may differ, one rank's are kept."""
    for name, buffer in buffers.items():
        yield Held(name, BUFFER, Part.all_of(buffer.shape), 0, buffer, is_written)


def moments(optimizer: torch.optim.Optimizer, stepped: Tensor, make: bool) -> dict[str, Tensor]:
    """Adam's moments of what the optimizer steps, by kind; none where they are neither there nor made."""
    state = optimizer.state.get(stepped)
    if not state:
        if not make:
            return {}
        state = optimizer.state[stepped]
        state["step"] = _no_steps(optimizer, stepped.device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(stepped, memory_format=torch.preserve_format).detach()
    return {kind: state[kind] for kind in MOMENTS}


def _no_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor | int:
    """As the first step would make it: DeepSpeed counts in Python, torch's fused kernels on the device."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return 0
    return torch.zeros((), device=device if optimizer.defaults["fused"] else "cpu")


def steps_taken(optimizer: torch.optim.Optimizer, stepped: Tensor) -> int:
    """Adam's steps so far. Waits for the device."""
    return int(optimizer.state.get(stepped, {}).get("step", 0))


def set_steps(optimizer: torch.optim.Optimizer, stepped: Tensor, steps: int) -> None:
    """In place where it is a tensor: graphs and other groups may hold it."""
    state = optimizer.state[stepped]
    if torch.is_tensor(state["step"]):
        state["step"].fill_(steps)
    else:
        state["step"] = steps


class ParameterState:
    """Adam's state parameter by parameter, the same on all ranks of `sharers`."""

    def __init__(
        self,
        named: list[Named],
        buffers: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        sharers: tuple[int, int],
        masters: Mapping[nn.Parameter, Tensor],
    ):
        """Says what lies where.

        Args:
            sharers: (index, count) of the ranks that hold the same and share out the writing.
            masters: What the optimizer steps in place of a parameter; empty where it steps parameters.
        """
        self._named = named
        self._buffers = buffers
        self._optimizer = optimizer
        self._sharers = sharers
        self._masters = masters

    def _stepped(self) -> Iterator[tuple[Named, Tensor]]:
        for each in self._named:
            if each.parameter.requires_grad:
                yield each, self._masters.get(each.parameter, each.parameter)

    def held(self, to_fill: bool) -> Iterator[Held]:
        """See State.held."""
        frozen = [
            each.held(WEIGHT, 0, each.parameter) for each in self._named if not each.parameter.requires_grad
        ]
        yield from shared_out([*frozen, *self._trained(to_fill)], *self._sharers)
        yield from held_buffers(self._buffers, self._sharers[0] == 0)

    def _trained(self, to_fill: bool) -> Iterator[Held]:
        for each, stepped in self._stepped():
            yield each.held(WEIGHT, 0, stepped)
            for kind, values in moments(self._optimizer, stepped, to_fill).items():
                yield each.held(kind, 0, values)

    def steps(self) -> Scalars:
        """See State.steps."""
        taken = {each.name: steps_taken(self._optimizer, stepped) for each, stepped in self._stepped()}
        most = max(taken.values(), default=0)
        others = {f"{ADAM_STEP}/{name}": steps for name, steps in taken.items() if steps != most}
        return {ADAM_STEP: most, **others}

    @torch.no_grad()
    def settle(self, scalars: Mapping[str, Any]) -> None:
        """See State.settle."""
        for each, stepped in self._stepped():
            steps = scalars.get(f"{ADAM_STEP}/{each.name}", scalars[ADAM_STEP])
            set_steps(self._optimizer, stepped, int(steps))
            if stepped is not each.parameter:
                each.parameter.copy_(stepped)
