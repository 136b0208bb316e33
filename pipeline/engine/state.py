"""What a rank holds of the whole model and its optimizer, whoever divided it, and how it is filled again.

Here is what all engines share and what holds where the optimizer steps whole parameters: plain PyTorch, and
ZeRO 0. What an optimizer keeps of a tensor, `optimizer.state[p]`, has the optimizer's own names.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.checkpoint.shards import (
    BUFFER,
    GRADIENT,
    WEIGHT,
    Box,
    Integers,
    Region,
    Scalars,
    Shard,
    ShardSource,
    copy_runs,
    overlap,
)
from pipeline.engine.optim import CombinedOptimizer, get_state_example
from pipeline.errors import CheckpointError, format_names
from pipeline.models.adapters import is_base

log = logging.getLogger(__name__)


def warn_of_unused_parameters(names: Sequence[str]) -> None:
    """Warn in one line of the parameters that took no part, if there are any."""
    if names:
        log.warning(
            "%d parameter%s took no part in the first step and will not be trained: %s; freeze them "
            "(requires_grad_(False)) or remove them",
            len(names),
            "s" * (len(names) > 1),
            format_names(names),
        )


def names_without_gradient(module: nn.Module) -> list[str]:
    """Return the names of the parameters that require a gradient and have none."""
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


def watch_gradients(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Callable[[], list[str]]:
    """Note which parameters get a gradient, by hooks, until the returned function is called.

    For engines that take the gradients away as they come (DeepSpeed), so that p.grad says nothing. No
    collective: each rank knows its own.

    Returns:
        A function that removes the hooks, and returns the names of trained parameters without a gradient so
        far, in the model's order.
    """
    unused: dict[str, None] = {}
    hooks = []
    for name, p in named_parameters:
        if p.requires_grad:
            unused[name] = None
            hooks.append(p.register_hook(partial(_forget, unused, name)))

    def end() -> list[str]:
        for hook in hooks:
            hook.remove()
        return list(unused)

    return end


def _forget(unused: dict[str, None], name: str, _: Tensor) -> None:
    unused.pop(name, None)


# The boxes of a parameter that is not cut.
WHOLE_TENSOR: tuple[tuple[Box | None, Box | None], ...] = ((None, None),)
MODEL_KINDS = (WEIGHT, BUFFER)


@dataclass(frozen=True)
class TensorPlacement:
    """Which values of the whole model a tensor of this rank has: a parameter or part of one, or a buffer."""

    name: str
    """In the whole model."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    own_shape: tuple[int, ...]
    boxes: tuple[tuple[Box | None, Box | None], ...] = WHOLE_TENSOR
    """(box of the rank's own tensor, the box of the whole one that it is); together all of the own one."""
    is_written: bool = True
    """False: a copy that another rank writes."""
    is_frozen: bool = False

    @staticmethod
    def whole(
        name: str, shape: Iterable[int], is_written: bool = True, is_frozen: bool = False
    ) -> TensorPlacement:
        """Return the place of a tensor that the rank has whole."""
        return TensorPlacement(
            name=name,
            shape=tuple(shape),
            own_shape=tuple(shape),
            boxes=WHOLE_TENSOR,
            is_written=is_written,
            is_frozen=is_frozen,
        )

    def shards(self, kind: str, start: int, tensor: Tensor, to_fill: bool) -> Iterator[Shard]:
        """Yield a stretch of its values, or of an optimizer's state of them: a shard for each box it meets.

        Args:
            start: Of the stretch, in the rank's own flattened tensor.
            tensor: The values; any shape.
            to_fill: Shards are written to, and values that had to be copied go back. Else nothing comes of
                what another rank writes.
        """
        if not (to_fill or self.is_written):
            return
        flat = tensor.detach().reshape(-1)
        for region, runs in self._regions(start, len(flat)):
            begin = int(runs[0, 0])
            if len(runs) == 1:
                yield Shard.of(self.name, kind, region, flat[begin : begin + region.length], self.is_frozen)
                continue
            values = torch.empty(region.length, dtype=flat.dtype, device=flat.device)
            copy_runs(flat, values, runs)
            yield Shard.of(self.name, kind, region, values, self.is_frozen)
            if to_fill:
                copy_runs(values, flat, runs[:, [1, 0, 2]])
        if to_fill and not tensor.is_contiguous():  # flat was a copy
            tensor.detach().copy_(flat.view(tensor.shape))

    def _regions(self, start: int, length: int) -> Iterator[tuple[Region, Integers]]:
        """Yield the stretch box by box: the region of the whole tensor, and the runs.

        A run is (offset from the stretch's start, offset in the region, length). What a box holds of a
        stretch is a stretch of the box.
        """
        stretch = Region(self.own_shape, None, start, length)
        for own, whole in self.boxes:
            size = math.prod(self.own_shape if own is None else [stop - start for start, stop in own])
            runs = overlap(stretch, Region(self.own_shape, own, 0, size))
            if len(runs):
                first = int(runs[0, 1])
                runs[:, 1] -= first
                yield Region(self.shape, whole, first, int(runs[:, 2].sum())), runs


class RankState(Protocol):
    """A model and its optimizer, however they are divided."""

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """Yield what lies on this rank, in an order that all ranks have. Take it in order.

        Args:
            source: What the values will be filled with: of the optimizer's state, what it has is made.
                None: nothing is filled, and only what this rank writes is given.
        """
        ...

    def gradients(self, stepped: Collection[int]) -> Iterator[Shard]:
        """Yield each value once over all ranks, where an optimizer is about to step.

        Args:
            stepped: `id` of what it steps.
        """
        ...

    def scalars(self) -> Scalars:
        """Return `optimizer/<key>`, and `optimizer/<key>/<name>` of each parameter with another number."""
        ...

    def get_masters(self) -> Iterable[Tensor]:
        """Return the tensors that an optimizer steps in the place of parameters."""
        ...

    def get_stored_gradients(self) -> Iterable[Any]:
        """Return the gradients that lie elsewhere than in `grad` of a parameter, maybe in lists and dicts."""
        ...

    def finish_restore(self, scalars: Mapping[str, Any]) -> None:
        """Set the scalars after filling, and the copies in half precision from the masters. Collective."""
        ...


def split_among_ranks(
    tensors: list[tuple[TensorPlacement, str, Tensor]], sharers: tuple[int, int], to_fill: bool
) -> Iterator[Shard]:
    """Yield this rank's part of what several ranks hold alike: even parts, most tensors by one rank.

    Args:
        tensors: (place, kind, values): the same on all of them, in one order.
        sharers: (which of them this rank is, how many they are).
    """
    index, count = sharers
    total = sum(tensor.numel() for place, _, tensor in tensors if place.is_written)
    begin, end = total * index // count, total * (index + 1) // count
    offset = 0
    for place, kind, tensor in tensors:
        if to_fill:
            yield from place.shards(kind, 0, tensor, to_fill)
        elif place.is_written:
            size = tensor.numel()
            first, last = (min(max(at - offset, 0), size) for at in (begin, end))
            yield from place.shards(kind, first, tensor.detach().reshape(-1)[first:last], to_fill)
            offset += size


def restore_state(state: RankState, source: ShardSource, names: Iterable[str]) -> None:
    """See EngineState.restore.

    Args:
        names: All parameters and kept buffers of the whole model.

    Raises:
        CheckpointError: the source has others, or other shapes.
    """
    saved = source.names()
    _check_names({name for name, kind in saved if kind in MODEL_KINDS}, set(names))
    for shard in state.shards(source):
        assert shard.values is not None
        shape = saved.get((shard.name, shard.kind))
        if shape is None and shard.kind not in MODEL_KINDS:  # frozen or unused until now
            shard.values.zero_()
            continue
        if shape != shard.region.shape:
            raise CheckpointError(
                f"{shard.name}: the checkpoint has {'none' if shape is None else f'shape {shape}'} of kind "
                f"{shard.kind}, the model has shape {shard.region.shape}; resume with the model that was "
                "trained"
            )
        source.read(shard.name, shard.kind, shard.region, shard.values)
    state.finish_restore(source.scalars)


def _check_names(there: set[str], expected: set[str]) -> None:
    if there == expected:
        return
    told = [
        f"{what} {format_names(sorted(names))}"
        for what, names in (("lacks", expected - there), ("has besides", there - expected))
        if names
    ]
    raise CheckpointError(
        f"the checkpoint is of another model: it {' and '.join(told)}; resume with the model that was "
        "trained, or start a new run"
    )


OPTIMIZER_PREFIX = "optimizer/"


class SavedOptimizerState:
    """What a checkpoint has of an optimizer: its tensors' shapes by parameter, and its numbers."""

    def __init__(self, source: ShardSource):
        self._shapes: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for (name, kind), shape in source.names().items():
            if kind not in MODEL_KINDS:
                self._shapes[name][kind] = shape
        self._keys = {key.split("/")[1] for key in source.scalars if key.startswith(OPTIMIZER_PREFIX)}

    def make(
        self, optimizer: torch.optim.Optimizer, stepped: Tensor, places: Iterable[TensorPlacement]
    ) -> None:
        """Make the state that the optimizer does not have yet, to be filled. Nothing if the checkpoint has
        none.

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
        example = get_state_example(own)
        counts_alone = bool(example) and not any(_is_tensor(key, example[key], stepped) for key in example)
        if not wanted and not counts_alone:
            return
        state = optimizer.state[stepped]
        for key in self._keys - state.keys() if has_scalar_state(optimizer, stepped) else ():
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


def has_scalar_state(optimizer: torch.optim.Optimizer, stepped: Tensor) -> bool:
    """Return whether the optimizer keeps numbers of a tensor, such as `step`; torch's SGD and Muon do not."""
    return not isinstance(_own(optimizer, stepped), torch.optim.SGD | torch.optim.Muon)


def _own(optimizer: torch.optim.Optimizer, stepped: Tensor) -> torch.optim.Optimizer:
    return optimizer.optimizer_of(stepped) if isinstance(optimizer, CombinedOptimizer) else optimizer


def _no_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor | int:
    """Return a count of 0 as the first step makes it: torch's is a tensor, fused kernels' on the device."""
    if not any(base.__module__.startswith("torch.optim") for base in type(optimizer).__mro__[:-2]):
        return 0
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.zeros((), device=device if on_device else "cpu")


def get_state_tensors(optimizer: torch.optim.Optimizer, stepped: Tensor) -> dict[str, Tensor]:
    """Return kind -> tensor of the state of a stepped tensor, in an order that all ranks have."""
    state = optimizer.state.get(stepped, {})
    return {key: state[key] for key in sorted(state) if _is_tensor(key, state[key], stepped)}


def place_state_tensors(
    optimizer: torch.optim.Optimizer, stepped: Tensor, place: TensorPlacement
) -> Iterable[tuple[TensorPlacement, str, Tensor]]:
    """Yield one parameter's state and where it lies. A tensor of another shape than the parameter is whole.

    Raises:
        CheckpointError: the parameter is cut, and a tensor's part of the whole is not known.
    """
    for kind, values in get_state_tensors(optimizer, stepped).items():
        if values.shape == stepped.shape:
            yield place, kind, values
        elif place.shape == place.own_shape:
            yield TensorPlacement.whole(place.name, values.shape, place.is_written), kind, values
        else:
            raise build_shape_error(kind, place.name)


def get_flat_state_tensors(optimizer: torch.optim.Optimizer, flat: Tensor) -> dict[str, Tensor]:
    """Return the same as `tensors` of a flat tensor with several parameters in it.

    Raises:
        CheckpointError: one is not shaped like the flat tensor: whose values it has is not known.
    """
    found = get_state_tensors(optimizer, flat)
    for kind, values in found.items():
        if values.shape != flat.shape:
            raise build_shape_error(kind, "parameters in one flat tensor")
    return found


def build_shape_error(kind: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer keeps a {kind} of {name} that is not shaped like what it steps, "
        "which a checkpoint of a divided model cannot hold; use ZeRO stage 0 without tensor parallelism, or "
        "another optimizer"
    )


def _is_tensor(key: str, value: Any, stepped: Tensor) -> bool:
    return torch.is_tensor(value) and key != "step" and (value.dim() > 0 or stepped.dim() == 0)


def get_state_scalars(optimizer: torch.optim.Optimizer, stepped: Tensor) -> Scalars:
    """Return key -> number of a stepped tensor's state, such as `step`. Waits for the device."""
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


def merge_scalars(by_name: Mapping[str, Scalars]) -> Scalars:
    """Return the largest of each number, and by name the numbers that differ, as RankState.scalars has them."""
    scalars: Scalars = {}
    for key in sorted({key for each in by_name.values() for key in each}):
        most = max(each[key] for each in by_name.values() if key in each)
        scalars[OPTIMIZER_PREFIX + key] = most
        others = {name: each.get(key, 0) for name, each in by_name.items() if key in each or not each}
        scalars |= {
            f"{OPTIMIZER_PREFIX}{key}/{name}": number for name, number in others.items() if number != most
        }
    return scalars


def merge_flat_scalars(flats: Iterable[tuple[torch.optim.Optimizer, Tensor]]) -> Scalars:
    """Return the largest of each number of flat tensors and their optimizers, as RankState.scalars has them."""
    scalars: Scalars = {}
    for optimizer, flat in flats:
        for key, number in get_state_scalars(optimizer, flat).items():
            scalars[OPTIMIZER_PREFIX + key] = max(number, scalars.get(OPTIMIZER_PREFIX + key, number))
    return scalars


def set_state_scalars(
    optimizer: torch.optim.Optimizer, stepped: Tensor, scalars: Mapping[str, Any], name: str | None = None
) -> None:
    """Set the numbers of a stepped tensor's state, if there is one; tensors in place, as graphs may hold
    them.
    """
    state = optimizer.state.get(stepped)
    if not state or not has_scalar_state(optimizer, stepped):
        return
    for key in [key for key in scalars if key.startswith(OPTIMIZER_PREFIX) and key.count("/") == 1]:
        short = key.removeprefix(OPTIMIZER_PREFIX)
        number = scalars.get(f"{key}/{name}", scalars[key])
        if _is_tensor(short, state.get(short), stepped):  # of a parameter of one value: it was filled
            continue
        if torch.is_tensor(state.get(short)):
            state[short].fill_(number)
        else:
            state[short] = number


def replay_step_count(adam: torch.optim.Optimizer, scalars: Mapping[str, Any]) -> None:
    """Bring what DeepSpeed's CPU Adam counts outside of its state to a checkpoint's number of steps.

    Other optimizers count nothing there.

    It multiplies the powers of the betas up, a factor a step. Computed at once, as it does for a step that
    does not follow its last one, they are rounded differently, and the resumed run leaves the unbroken one.
    """
    kernel = getattr(adam, "ds_opt_adam", None)
    if kernel is None:
        return
    steps = int(scalars.get(f"{OPTIMIZER_PREFIX}step", 0))
    beta1, beta2 = adam.param_groups[0]["betas"]
    nothing = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):  # tens of microseconds each
        kernel.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *nothing)  # type: ignore[attr-defined]


Placements = dict[nn.Parameter, TensorPlacement]


def place_whole_parameters(module: nn.Module) -> Placements:
    """Return the places on a rank that holds the whole model, without an adapter's base, which no checkpoint
    has.
    """
    return {
        p: TensorPlacement.whole(name, getattr(p, "ds_shape", p.shape), is_frozen=not p.requires_grad)
        for name, p in module.named_parameters()
        if not is_base(p)
    }


def get_persistent_buffers(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return by name the buffers that belong to the model's weights (BatchNorm's statistics)."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules(prefix=prefix)
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def get_checkpoint_names(module: nn.Module) -> list[str]:
    """Return the names of all that a checkpoint keeps of a whole model."""
    parameters = (name for name, p in module.named_parameters() if not is_base(p))
    return [*parameters, *get_persistent_buffers(module)]


def buffer_shards(buffers: Mapping[str, Tensor], is_written: bool, to_fill: bool) -> Iterator[Shard]:
    """Yield the shards of buffers, which lie whole on each rank. Where they differ, one rank's are kept."""
    for name, buffer in buffers.items():
        yield from TensorPlacement.whole(name, buffer.shape, is_written).shards(BUFFER, 0, buffer, to_fill)


def get_frozen_parameters(places: Placements) -> list[tuple[TensorPlacement, str, Tensor]]:
    """Return the parameters that no optimizer steps, as `shared_out` takes them."""
    return [(place, WEIGHT, p) for p, place in places.items() if not p.requires_grad]


class ParameterState:
    """The optimizer's state parameter by parameter, the same on all ranks of `sharers`."""

    def __init__(
        self,
        places: Placements,
        buffers: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        sharers: tuple[int, int],
        masters: Mapping[nn.Parameter, Tensor],
    ):
        """Note where everything lies.

        Args:
            sharers: (index, count) of the ranks that hold the same and share out the writing.
            masters: What the optimizer steps in place of a parameter; empty where it steps parameters.
        """
        self._places = places
        self._buffers = buffers
        self._optimizer = optimizer
        self._sharers = sharers
        self._masters = masters

    def _stepped(self) -> Iterator[tuple[nn.Parameter, TensorPlacement, Tensor]]:
        for p, place in self._places.items():
            if p.requires_grad:
                yield p, place, self._masters.get(p, p)

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See RankState.shards."""
        saved = None if source is None else SavedOptimizerState(source)
        held = get_frozen_parameters(self._places)
        for _, place, stepped in self._stepped():
            if saved is not None:
                saved.make(self._optimizer, stepped, [place])
            held += [(place, WEIGHT, stepped), *place_state_tensors(self._optimizer, stepped, place)]
        yield from split_among_ranks(held, self._sharers, to_fill=saved is not None)
        yield from buffer_shards(self._buffers, self._sharers[0] == 0, to_fill=saved is not None)

    def gradients(self, stepped: Collection[int]) -> Iterator[Shard]:
        """See RankState.gradients."""
        held = [
            (place, GRADIENT, each.grad)
            for _, place, each in self._stepped()
            if id(each) in stepped and each.grad is not None
        ]
        yield from split_among_ranks(held, self._sharers, to_fill=False)

    def get_masters(self) -> Iterable[Tensor]:
        """See RankState.get_masters."""
        return self._masters.values()

    def get_stored_gradients(self) -> Iterable[Any]:
        """See RankState.get_stored_gradients."""
        return [master.grad for master in self._masters.values()]

    def scalars(self) -> Scalars:
        """See RankState.scalars."""
        counted = [each for each in self._stepped() if has_scalar_state(self._optimizer, each[2])]
        return merge_scalars(
            {place.name: get_state_scalars(self._optimizer, tensor) for _, place, tensor in counted}
        )

    @torch.no_grad()
    def finish_restore(self, scalars: Mapping[str, Any]) -> None:
        """See RankState.finish_restore."""
        for p, place, stepped in self._stepped():
            set_state_scalars(self._optimizer, stepped, scalars, place.name)
            if stepped is not p:
                p.copy_(stepped)


@contextmanager
def observe_gradients(
    optimizers: Iterable[Optimizer], state: Callable[[], RankState], take: Callable[[Shard], None]
) -> Iterator[None]:
    """Call `take` with what moves the weights in a step inside it: averaged over the batch, unscaled,
    clipped.

    Args:
        optimizers: All that step the model.
        state: Where their gradients lie in the whole model.
    """

    @torch.no_grad()
    def look(optimizer: Optimizer, *_: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        clipped_by = getattr(optimizer, "grad_scale", None)  # which the kernel divides by
        for shard in state().gradients(stepped):
            assert shard.values is not None
            values = shard.values if clipped_by is None else shard.values / clipped_by
            take(replace(shard, values=values))

    with ExitStack() as hooks:
        for optimizer in optimizers:  # behind the hooks that clip
            hooks.callback(optimizer.register_step_pre_hook(look).remove)
        yield
