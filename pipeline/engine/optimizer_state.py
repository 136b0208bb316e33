"""What an optimizer keeps of what it steps, `optimizer.state[p]`: tensors and numbers, by their own names."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.state import MODEL, Place
from pipeline.errors import CheckpointError
from pipeline.optim import SeveralOptimizers
from pipeline.own_optimizer import state_example
from pipeline.shards import Scalars, ShardSource

PREFIX = "optimizer/"
OLD_STEP = "adam_step"  # what stands for optimizer/step in checkpoints of format 1


class SavedState:
    """What a checkpoint has of an optimizer: its tensors' shapes by parameter, and its numbers."""

    def __init__(self, source: ShardSource):
        self._shapes: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for (name, kind), shape in source.names().items():
            if kind not in MODEL:
                self._shapes[name][kind] = shape
        self._keys = {key.split("/")[1] for key in named_by_us(source.scalars) if key.startswith(PREFIX)}

    def make(self, optimizer: torch.optim.Optimizer, stepped: Tensor, places: Iterable[Place]) -> None:
        """Makes what the optimizer has not yet, to be filled. Nothing where the checkpoint has nothing.

        Args:
            stepped: What the optimizer steps: a parameter, its master, or a flat tensor of several.
            places: Of the parameters in it; a flat tensor's state is shaped like the tensor.
        """
        wanted = {
            kind: None if shape == place.shape else shape
            for place in places
            for kind, shape in self._shapes.get(place.name, {}).items()
        }
        own = _own(optimizer, stepped)
        example = state_example(own)
        counts_alone = bool(example) and not any(_is_tensor(key, example[key], stepped) for key in example)
        if not wanted and not counts_alone:
            return
        state = optimizer.state[stepped]
        for key in self._keys - state.keys() if has_numbers(optimizer, stepped) else ():
            state[key] = copy.deepcopy(example[key]) if key in example else _no_steps(own, stepped.device)
        # DeepSpeed's CPU Adam keeps fp32 of what it steps in half precision, where it is not told otherwise.
        is_fp32 = getattr(own, "fp32_optimizer_states", False)
        for kind in sorted(wanted.keys() - state.keys()):
            shape = wanted[kind]
            dtype = torch.float32 if is_fp32 else getattr(example.get(kind), "dtype", stepped.dtype)
            state[kind] = (
                torch.zeros_like(stepped, dtype=dtype, memory_format=torch.preserve_format).detach()
                if shape is None
                else torch.zeros(shape, dtype=dtype, device=stepped.device)
            )


def has_numbers(optimizer: torch.optim.Optimizer, stepped: Tensor) -> bool:
    """Whether it keeps numbers of it, such as `step`; torch's SGD and Muon do not."""
    return not isinstance(_own(optimizer, stepped), torch.optim.SGD | torch.optim.Muon)


def _own(optimizer: torch.optim.Optimizer, stepped: Tensor) -> torch.optim.Optimizer:
    return optimizer.of(stepped) if isinstance(optimizer, SeveralOptimizers) else optimizer


def _no_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor | int:
    """As the first step would make it: torch counts in tensors, its fused kernels on the device."""
    if not any(base.__module__.startswith("torch.optim") for base in type(optimizer).__mro__[:-2]):
        return 0
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.zeros((), device=device if on_device else "cpu")


def tensors(optimizer: torch.optim.Optimizer, stepped: Tensor) -> dict[str, Tensor]:
    """kind -> tensor of what is kept of it, in an order that all ranks have."""
    state = optimizer.state.get(stepped, {})
    return {key: state[key] for key in sorted(state) if _is_tensor(key, state[key], stepped)}


def whole_tensors(
    optimizer: torch.optim.Optimizer, stepped: Tensor, place: Place
) -> Iterable[tuple[Place, str, Tensor]]:
    """What is kept of one parameter, and where it lies: of another shape than the parameter, it is whole.

    Raises:
        CheckpointError: the parameter is cut, and a tensor's part of the whole is not known.
    """
    for kind, values in tensors(optimizer, stepped).items():
        if values.shape == stepped.shape:
            yield place, kind, values
        elif place.shape == place.own_shape:
            yield Place.all_of(place.name, values.shape, place.is_written), kind, values
        else:
            raise unlike(kind, place.name)


def flat_tensors(optimizer: torch.optim.Optimizer, flat: Tensor) -> dict[str, Tensor]:
    """As `tensors`, of a flat tensor with several parameters in it.

    Raises:
        CheckpointError: one is not shaped like the flat tensor: whose values it has is not known.
    """
    found = tensors(optimizer, flat)
    for kind, values in found.items():
        if values.shape != flat.shape:
            raise unlike(kind, "parameters in one flat tensor")
    return found


def unlike(kind: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer keeps a {kind} of {name} that is not shaped like what it steps, "
        "which a checkpoint of a divided model cannot hold; use ZeRO stage 0 without tensor parallelism, or "
        "another optimizer"
    )


def _is_tensor(key: str, value: Any, stepped: Tensor) -> bool:
    return torch.is_tensor(value) and key != "step" and (value.dim() > 0 or stepped.dim() == 0)


def numbers(optimizer: torch.optim.Optimizer, stepped: Tensor) -> Scalars:
    """key -> number, such as `step`. Waits for the device."""
    state = optimizer.state.get(stepped, {})
    found: Scalars = {}
    for key, value in state.items():
        if value is None or _is_tensor(key, value, stepped):
            continue
        if not torch.is_tensor(value) and not isinstance(value, (bool, int, float)):
            raise CheckpointError(f"a checkpoint cannot keep the optimizer's {key}: {type(value).__name__}")
        number = value.item() if torch.is_tensor(value) else value
        found[key] = int(number) if float(number).is_integer() else number
    return found


def common_numbers(by_name: Mapping[str, Scalars]) -> Scalars:
    """Of several: the most of each number, and by name what is another one. As State.scalars has them."""
    scalars: Scalars = {}
    for key in sorted({key for each in by_name.values() for key in each}):
        most = max(each[key] for each in by_name.values() if key in each)
        scalars[PREFIX + key] = most
        others = {name: each.get(key, 0) for name, each in by_name.items() if key in each or not each}
        scalars |= {f"{PREFIX}{key}/{name}": number for name, number in others.items() if number != most}
    return scalars


def flat_numbers(flats: Iterable[tuple[torch.optim.Optimizer, Tensor]]) -> Scalars:
    """As State.scalars, of flat tensors and what steps them: the most of each number."""
    scalars: Scalars = {}
    for optimizer, flat in flats:
        for key, number in numbers(optimizer, flat).items():
            scalars[PREFIX + key] = max(number, scalars.get(PREFIX + key, number))
    return scalars


def set_numbers(
    optimizer: torch.optim.Optimizer, stepped: Tensor, scalars: Mapping[str, Any], name: str | None = None
) -> None:
    """In place where one is a tensor: graphs and other groups may hold it. Nothing where no state is."""
    state = optimizer.state.get(stepped)
    if not state or not has_numbers(optimizer, stepped):
        return
    scalars = named_by_us(scalars)
    for key in [key for key in scalars if key.startswith(PREFIX) and key.count("/") == 1]:
        short = key.removeprefix(PREFIX)
        number = scalars.get(f"{key}/{name}", scalars[key])
        if _is_tensor(short, state.get(short), stepped):  # of a parameter of one value: it was filled
            continue
        if torch.is_tensor(state.get(short)):
            state[short].fill_(number)
        else:
            state[short] = number


def take_steps_again(adam: torch.optim.Optimizer, scalars: Mapping[str, Any]) -> None:
    """Brings what DeepSpeed's CPU Adam counts outside of its state to a checkpoint's number of steps; other
    optimizers count nothing there.

    It multiplies the powers of the betas up, a factor a step. Computed at once, as it does for a step that
    does not follow its last one, they are rounded differently, and the resumed run leaves the unbroken one.
    """
    kernel = getattr(adam, "ds_opt_adam", None)
    if kernel is None:
        return
    steps = int(named_by_us(scalars).get(f"{PREFIX}step", 0))
    beta1, beta2 = adam.param_groups[0]["betas"]
    nothing = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):  # tens of microseconds each
        kernel.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *nothing)  # type: ignore[attr-defined]


def named_by_us(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's scalars, where those of format 1 knew Adam's steps alone."""
    return {
        f"{PREFIX}step{key.removeprefix(OLD_STEP)}" if key.split("/")[0] == OLD_STEP else key: value
        for key, value in scalars.items()
    }
