"""A rank's part of the model and optimizer state, read as shards for checkpoints and filled from them.

This module has what all engines share, and the state of engines whose optimizer steps whole parameters: plain
PyTorch and ZeRO 0. Entries of `optimizer.state[p]` keep the optimizer's own names. A checkpoint does not
depend on the split: each value is written once over all ranks, as part of a whole tensor, so a run with any
other split can read it.
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
    """Log one warning that names the parameters without a gradient, if there are any."""
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
    """Record by hooks which parameters get a gradient, until the returned function is called.

    For DeepSpeed engines: they remove gradients from `p.grad` during backward, so `p.grad` does not show
    which parameters had one. Not collective: each rank records its own parameters.

    Returns:
        A function that removes the hooks. It returns the names of the trained parameters that got no
        gradient, in the model's order.
    """
    unused: dict[str, None] = {}
    hooks = []
    for name, p in named_parameters:
        if p.requires_grad:
            unused[name] = None
            hooks.append(p.register_hook(partial(_mark_used, unused, name)))

    def stop_watching() -> list[str]:
        for hook in hooks:
            hook.remove()
        return list(unused)

    return stop_watching


def _mark_used(unused: dict[str, None], name: str, _: Tensor) -> None:
    unused.pop(name, None)


WHOLE_TENSOR: tuple[tuple[Box | None, Box | None], ...] = ((None, None),)
"""Boxes of a tensor that the rank has whole; see TensorPlacement.boxes."""
MODEL_KINDS = (WEIGHT, BUFFER)
"""Kinds of shards that belong to the model; all other kinds are optimizer state."""


@dataclass(frozen=True)
class TensorPlacement:
    """Position of a rank's tensor (a parameter, a part of one, or a buffer) in the whole model."""

    name: str
    """Name of the parameter or buffer in the whole model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    local_shape: tuple[int, ...]
    """Shape of this rank's tensor."""
    boxes: tuple[tuple[Box | None, Box | None], ...] = WHOLE_TENSOR
    """Pairs (box in this rank's tensor, box of the same values in the whole tensor).

    Together they cover this rank's tensor. `None` as a box means the whole of that tensor.
    """
    is_written: bool = True
    """Whether this rank writes the values to a checkpoint; false if another rank writes its copy."""
    is_frozen: bool = False
    """Whether the parameter is not trained."""

    @staticmethod
    def whole(
        name: str, shape: Iterable[int], is_written: bool = True, is_frozen: bool = False
    ) -> TensorPlacement:
        """Return the placement of a tensor that the rank has whole."""
        return TensorPlacement(
            name=name,
            shape=tuple(shape),
            local_shape=tuple(shape),
            boxes=WHOLE_TENSOR,
            is_written=is_written,
            is_frozen=is_frozen,
        )

    def shards(self, kind: str, start: int, tensor: Tensor, to_fill: bool) -> Iterator[Shard]:
        """Yield the shards of a range of values, one for each box that overlaps the range.

        Args:
            kind: Kind of the shards: weight, buffer, gradient, or an entry of the optimizer's state.
            start: Start of the range in this rank's flattened tensor.
            tensor: Values of the range, in any shape.
            to_fill: Whether the caller writes to the shards. If so, values that had to be copied are copied
                back. If not, tensors that another rank writes yield nothing.
        """
        if not (to_fill or self.is_written):
            return
        flat = tensor.detach().reshape(-1)
        for region, runs in self._find_regions(start, len(flat)):
            begin = int(runs[0, 0])
            if len(runs) == 1:
                yield Shard.of(self.name, kind, region, flat[begin : begin + region.length], self.is_frozen)
                continue
            values = torch.empty(region.length, dtype=flat.dtype, device=flat.device)
            copy_runs(flat, values, runs)
            yield Shard.of(self.name, kind, region, values, self.is_frozen)
            if to_fill:
                copy_runs(values, flat, runs[:, [1, 0, 2]])  # back, with source and target swapped
        if to_fill and not tensor.is_contiguous():  # reshape made a copy
            tensor.detach().copy_(flat.view(tensor.shape))

    def _find_regions(self, start: int, length: int) -> Iterator[tuple[Region, Integers]]:
        """Yield (region of the whole tensor, runs) for each box that overlaps the range.

        A run is (offset from the range's start, offset in the region, length). The region is the part of the
        box that is in the range: contiguous values of the flattened box.
        """
        whole_range = Region(self.local_shape, None, start, length)
        for own, whole in self.boxes:
            size = math.prod(self.local_shape if own is None else [stop - start for start, stop in own])
            runs = overlap(whole_range, Region(self.local_shape, own, 0, size))
            if len(runs):
                first = int(runs[0, 1])
                runs[:, 1] -= first
                yield Region(self.shape, whole, first, int(runs[:, 2].sum())), runs


class RankState(Protocol):
    """A rank's part of a model and its optimizer, independent of the split."""

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """Yield this rank's shards, in the same order on all ranks.

        Process each shard before taking the next.

        Args:
            source: Source that the caller fills the shards from. Optimizer state that the source has, and
                that the optimizer lacks, is created first. `None` if the shards are only read; then only
                those that this rank writes are yielded.
        """
        ...

    def gradients(self, stepped_ids: Collection[int]) -> Iterator[Shard]:
        """Yield the gradients before an optimizer's step, each value once over all ranks.

        Args:
            stepped_ids: `id` of each tensor that the optimizer steps.
        """
        ...

    def scalars(self) -> Scalars:
        """Return the optimizer's numbers.

        `optimizer/<key>` is the largest value over all parameters. `optimizer/<key>/<name>` is the value of
        parameter `<name>`, stored only if it differs.
        """
        ...

    def get_masters(self) -> Iterable[Tensor]:
        """Return the master weights: tensors that an optimizer steps instead of the parameters."""
        ...

    def get_stored_gradients(self) -> Iterable[Any]:
        """Return the gradients that are not in a parameter's `grad`, possibly nested in lists and dicts."""
        ...

    def finish_restore(self, scalars: Mapping[str, Any]) -> None:
        """Set the scalars after the shards were filled. Collective.

        Also copies the master weights to the half-precision parameters.
        """
        ...


def split_among_ranks(
    tensors: list[tuple[TensorPlacement, str, Tensor]], replica: tuple[int, int], to_fill: bool
) -> Iterator[Shard]:
    """Yield this rank's share of tensors that are replicated on several ranks.

    The shares have equal numbers of elements, so most tensors lie entirely in one share.

    Args:
        tensors: (placement, kind, values), equal and in the same order on all of these ranks.
        replica: (index of this rank among them, number of ranks).
        to_fill: Whether the caller writes to the shards. If so, all values are yielded on every rank.
    """
    index, count = replica
    total = sum(tensor.numel() for place, _, tensor in tensors if place.is_written)
    begin = total * index // count
    end = total * (index + 1) // count
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
    """Fill this rank's part of model and optimizer from a checkpoint.

    Args:
        state: State to fill.
        source: Checkpoint to read.
        names: Names of all parameters and persistent buffers of the whole model.

    Raises:
        CheckpointError: names or shapes of the checkpoint differ from the model's.
    """
    saved = source.get_shapes()
    _check_names({name for name, kind in saved if kind in MODEL_KINDS}, set(names))
    for shard in state.shards(source):
        assert shard.values is not None
        shape = saved.get((shard.name, shard.kind))
        # Parameters that were frozen or unused so far have no optimizer state in the checkpoint.
        if shape is None and shard.kind not in MODEL_KINDS:
            shard.values.zero_()
            continue
        if shape != shard.region.shape:
            found = "none" if shape is None else f"one of shape {shape}"
            raise CheckpointError(
                f"{shard.name}: the model has a {shard.kind} of shape {shard.region.shape}, and the "
                f"checkpoint has {found}; resume with the model that was trained"
            )
        source.read(shard.name, shard.kind, shard.region, shard.values)
    state.finish_restore(source.scalars)


def _check_names(saved: set[str], expected: set[str]) -> None:
    if saved == expected:
        return
    differences = [
        f"{what} {format_names(sorted(names))}"
        for what, names in (("lacks", expected - saved), ("also has", saved - expected))
        if names
    ]
    raise CheckpointError(
        f"the checkpoint is of another model: it {' and '.join(differences)}; resume with the model that was "
        "trained, or start a new run"
    )


OPTIMIZER_PREFIX = "optimizer/"
"""Prefix of the optimizer's numbers among a checkpoint's scalars; see RankState.scalars."""


class SavedOptimizerState:
    """Knows which optimizer state a checkpoint has for each parameter, and creates missing entries.

    The state consists of tensors, whose shapes are read from the checkpoint, and of numbers.
    """

    def __init__(self, source: ShardSource):
        self._shapes: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for (name, kind), shape in source.get_shapes().items():
            if kind not in MODEL_KINDS:
                self._shapes[name][kind] = shape
        self._keys = {key.split("/")[1] for key in source.scalars if key.startswith(OPTIMIZER_PREFIX)}

    def create_state(
        self, optimizer: torch.optim.Optimizer, stepped: Tensor, places: Iterable[TensorPlacement]
    ) -> None:
        """Create the entries of a tensor's optimizer state that only the checkpoint has.

        Their values are filled later. Does nothing if the checkpoint has no state tensors of these
        parameters, unless the optimizer keeps only numbers.

        Args:
            optimizer: Optimizer that steps the tensor.
            stepped: A parameter, its master weights, or a flat tensor of several parameters.
            places: Placements of the parameters in it. State of a flat tensor has the flat tensor's shape.
        """
        # Shape by kind; `None`: the shape of the stepped tensor.
        wanted = {
            kind: None if shape == place.shape else shape
            for place in places
            for kind, shape in self._shapes.get(place.name, {}).items()
        }
        own = _get_inner_optimizer(optimizer, stepped)
        example = get_state_example(own)
        has_only_numbers = bool(example) and not any(
            _is_state_tensor(key, example[key], stepped) for key in example
        )
        if not wanted and not has_only_numbers:
            return
        state = optimizer.state[stepped]
        missing = self._keys - state.keys() if has_scalar_state(optimizer, stepped) else set()
        for key in missing:
            state[key] = (
                copy.deepcopy(example[key]) if key in example else _make_step_count(own, stepped.device)
            )
        # DeepSpeed's CPU Adam keeps fp32 state of tensors in half precision, unless configured otherwise.
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
    """Return whether the optimizer keeps numbers per tensor, such as `step`. SGD and Muon do not."""
    inner = _get_inner_optimizer(optimizer, stepped)
    return not isinstance(inner, torch.optim.SGD | torch.optim.Muon)


def _get_inner_optimizer(optimizer: torch.optim.Optimizer, stepped: Tensor) -> torch.optim.Optimizer:
    return optimizer.optimizer_of(stepped) if isinstance(optimizer, CombinedOptimizer) else optimizer


def _make_step_count(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor | int:
    """Return a step count of 0 of the type that the optimizer's first step creates.

    torch's optimizers use a tensor, fused ones a tensor on the device, others an int.
    """
    classes = type(optimizer).__mro__[:-2]  # without Optimizer, the base of all, and object
    if not any(each.__module__.startswith("torch.optim") for each in classes):
        return 0
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.zeros((), device=device if on_device else "cpu")


def get_state_tensors(optimizer: torch.optim.Optimizer, stepped: Tensor) -> dict[str, Tensor]:
    """Return the state tensors of a stepped tensor by kind, in the same order on all ranks."""
    state = optimizer.state.get(stepped, {})
    return {key: state[key] for key in sorted(state) if _is_state_tensor(key, state[key], stepped)}


def place_state_tensors(
    optimizer: torch.optim.Optimizer, stepped: Tensor, place: TensorPlacement
) -> Iterable[tuple[TensorPlacement, str, Tensor]]:
    """Yield (placement, kind, values) of one parameter's state tensors.

    A state tensor of another shape than the parameter is taken to be whole.

    Args:
        optimizer: Optimizer that steps the tensor.
        stepped: The parameter, or its master weights.
        place: Placement of the parameter.

    Raises:
        CheckpointError: The parameter is divided, and a state tensor has another shape, so that its part of
            the whole is unknown.
    """
    for kind, values in get_state_tensors(optimizer, stepped).items():
        if values.shape == stepped.shape:
            yield place, kind, values
        elif place.shape == place.local_shape:
            yield TensorPlacement.whole(place.name, values.shape, place.is_written), kind, values
        else:
            raise build_shape_error(kind, place.name)


def get_flat_state_tensors(optimizer: torch.optim.Optimizer, flat: Tensor) -> dict[str, Tensor]:
    """Return the state tensors of a flat tensor of several parameters, by kind.

    Raises:
        CheckpointError: a state tensor has another shape, so that its values belong to no known parameter.
    """
    state_tensors = get_state_tensors(optimizer, flat)
    for kind, values in state_tensors.items():
        if values.shape != flat.shape:
            raise build_shape_error(kind, "parameters in one flat tensor")
    return state_tensors


def build_shape_error(kind: str, name: str) -> CheckpointError:
    """Return the error for optimizer state that a checkpoint cannot assign to parts of a parameter."""
    return CheckpointError(
        f"the optimizer's state {kind!r} of {name} has another shape than the tensor that the optimizer "
        "steps, so a checkpoint of a divided model cannot contain it; use ZeRO stage 0 without tensor "
        "parallelism, or another optimizer"
    )


def _is_state_tensor(key: str, value: Any, stepped: Tensor) -> bool:
    return torch.is_tensor(value) and key != "step" and (value.dim() > 0 or stepped.dim() == 0)


def get_state_scalars(optimizer: torch.optim.Optimizer, stepped: Tensor) -> Scalars:
    """Return the numbers of a stepped tensor's state by key, such as `step`. Synchronizes with the device.

    Raises:
        CheckpointError: an entry is neither a tensor nor a number.
    """
    state = optimizer.state.get(stepped, {})
    scalars: Scalars = {}
    for key, value in state.items():
        if value is None or _is_state_tensor(key, value, stepped):
            continue
        if not torch.is_tensor(value) and not isinstance(value, (bool, int, float)):
            raise CheckpointError(
                f"a checkpoint cannot hold the optimizer's {key}, a {type(value).__name__}; keep only "
                "numbers and tensors in the optimizer's state"
            )
        number = value.item() if torch.is_tensor(value) else value
        scalars[key] = int(number) if float(number).is_integer() else number
    return scalars


def merge_scalars(by_name: Mapping[str, Scalars]) -> Scalars:
    """Return the scalars of several parameters in the form of RankState.scalars.

    That is the largest value of each number, and the values that differ from it with their parameter's name.

    Args:
        by_name: Numbers of each parameter's state, by the parameter's name; see get_state_scalars.
    """
    scalars: Scalars = {}
    for key in sorted({key for each in by_name.values() for key in each}):
        largest = max(each[key] for each in by_name.values() if key in each)
        scalars[OPTIMIZER_PREFIX + key] = largest
        for name, each in by_name.items():
            # A parameter without any state counts as 0.
            if (key in each or not each) and each.get(key, 0) != largest:
                scalars[f"{OPTIMIZER_PREFIX}{key}/{name}"] = each.get(key, 0)
    return scalars


def merge_flat_scalars(flats: Iterable[tuple[torch.optim.Optimizer, Tensor]]) -> Scalars:
    """Return the scalars of flat tensors in the form of RankState.scalars: the largest value of each number.

    Args:
        flats: Pairs of optimizer and flat tensor.
    """
    scalars: Scalars = {}
    for optimizer, flat in flats:
        for key, number in get_state_scalars(optimizer, flat).items():
            scalars[OPTIMIZER_PREFIX + key] = max(number, scalars.get(OPTIMIZER_PREFIX + key, number))
    return scalars


def set_state_scalars(
    optimizer: torch.optim.Optimizer, stepped: Tensor, scalars: Mapping[str, Any], name: str | None = None
) -> None:
    """Set the numbers of a stepped tensor's state, if it has a state.

    Tensors are filled in place, since captured CUDA graphs may refer to them.

    Args:
        optimizer: Optimizer that steps the tensor.
        stepped: A parameter, its master weights, or a flat tensor of several parameters.
        scalars: Numbers in the form of RankState.scalars.
        name: Parameter whose own number is preferred to the largest one; `None` for a flat tensor.
    """
    state = optimizer.state.get(stepped)
    if not state or not has_scalar_state(optimizer, stepped):
        return
    for key in [key for key in scalars if key.startswith(OPTIMIZER_PREFIX) and key.count("/") == 1]:
        short = key.removeprefix(OPTIMIZER_PREFIX)
        number = scalars.get(f"{key}/{name}", scalars[key])
        if _is_state_tensor(short, state.get(short), stepped):  # a 0-dim parameter's state: filled as a shard
            continue
        if torch.is_tensor(state.get(short)):
            state[short].fill_(number)
        else:
            state[short] = number


def replay_step_count(adam: torch.optim.Optimizer, scalars: Mapping[str, Any]) -> None:
    """Replay a checkpoint's number of steps in the C++ object of DeepSpeed's CPU Adam.

    That object updates beta1^t and beta2^t by one multiplication per step. If the step number jumps, it calls
    pow() instead, which rounds differently, so a resumed run would differ from an uninterrupted one. Other
    optimizers keep nothing outside of their state.
    """
    kernel = getattr(adam, "ds_opt_adam", None)
    if kernel is None:
        return
    steps = int(scalars.get(f"{OPTIMIZER_PREFIX}step", 0))
    beta1, beta2 = adam.param_groups[0]["betas"]
    # Learning rate, betas, epsilon, weight decay and bias correction; the kernel takes no keywords.
    options = (0.0, beta1, beta2, 1.0, 0.0, True)
    empty = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):  # tens of microseconds each
        kernel.adam_update(adam.opt_id, step, *options, *empty)  # type: ignore[attr-defined]


Placements = dict[nn.Parameter, TensorPlacement]
"""Placement of each of a rank's parameters."""


def place_whole_parameters(module: nn.Module) -> Placements:
    """Return the placements of a rank that holds the whole model.

    Parameters of an adapter's base are left out, since checkpoints do not contain them.
    """
    return {
        p: TensorPlacement.whole(name, getattr(p, "ds_shape", p.shape), is_frozen=not p.requires_grad)
        for name, p in module.named_parameters()
        if not is_base(p)
    }


def get_persistent_buffers(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the persistent buffers by name, such as BatchNorm's running statistics."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules(prefix=prefix)
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def get_checkpoint_names(module: nn.Module) -> list[str]:
    """Return the names of a whole model's parameters and buffers that a checkpoint contains."""
    parameters = (name for name, p in module.named_parameters() if not is_base(p))
    return [*parameters, *get_persistent_buffers(module)]


def buffer_shards(buffers: Mapping[str, Tensor], is_written: bool, to_fill: bool) -> Iterator[Shard]:
    """Yield the shards of buffers, which each rank has whole.

    Args:
        buffers: Buffers by name.
        is_written: Whether this rank writes them. Only one of the ranks that have them does, since their
            values may differ.
        to_fill: See TensorPlacement.shards.
    """
    for name, buffer in buffers.items():
        yield from TensorPlacement.whole(name, buffer.shape, is_written).shards(BUFFER, 0, buffer, to_fill)


def get_frozen_parameters(places: Placements) -> list[tuple[TensorPlacement, str, Tensor]]:
    """Return the frozen parameters as (placement, kind, values), the form that `split_among_ranks` takes."""
    return [(place, WEIGHT, p) for p, place in places.items() if not p.requires_grad]


class ParameterState:
    """State of an engine whose optimizer steps whole parameters, replicated on several ranks."""

    def __init__(
        self,
        places: Placements,
        buffers: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        replica: tuple[int, int],
        masters: Mapping[nn.Parameter, Tensor],
    ):
        """Store the references.

        Args:
            places: Placement of each parameter, frozen ones too.
            buffers: Persistent buffers by name.
            optimizer: Optimizer that steps the parameters or their master weights.
            replica: (index of this rank, number of ranks) among those that hold the same state. They divide
                the writing.
            masters: Master weights by parameter; empty if the optimizer steps the parameters themselves.
        """
        self._places = places
        self._buffers = buffers
        self._optimizer = optimizer
        self._replica = replica
        self._masters = masters

    def _iterate_trained(self) -> Iterator[tuple[nn.Parameter, TensorPlacement, Tensor]]:
        """Yield (parameter, placement, tensor that the optimizer steps)."""
        for p, place in self._places.items():
            if p.requires_grad:
                yield p, place, self._masters.get(p, p)

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See RankState.shards."""
        saved = None if source is None else SavedOptimizerState(source)
        tensors = get_frozen_parameters(self._places)
        for _, place, stepped in self._iterate_trained():
            if saved is not None:
                saved.create_state(self._optimizer, stepped, [place])
            tensors += [(place, WEIGHT, stepped), *place_state_tensors(self._optimizer, stepped, place)]
        yield from split_among_ranks(tensors, self._replica, to_fill=saved is not None)
        yield from buffer_shards(self._buffers, self._replica[0] == 0, to_fill=saved is not None)

    def gradients(self, stepped_ids: Collection[int]) -> Iterator[Shard]:
        """See RankState.gradients."""
        gradients = [
            (place, GRADIENT, each.grad)
            for _, place, each in self._iterate_trained()
            if id(each) in stepped_ids and each.grad is not None
        ]
        yield from split_among_ranks(gradients, self._replica, to_fill=False)

    def get_masters(self) -> Iterable[Tensor]:
        """See RankState.get_masters."""
        return self._masters.values()

    def get_stored_gradients(self) -> Iterable[Any]:
        """See RankState.get_stored_gradients."""
        return [master.grad for master in self._masters.values()]

    def scalars(self) -> Scalars:
        """See RankState.scalars."""
        with_numbers = [
            each for each in self._iterate_trained() if has_scalar_state(self._optimizer, each[2])
        ]
        return merge_scalars(
            {place.name: get_state_scalars(self._optimizer, tensor) for _, place, tensor in with_numbers}
        )

    @torch.no_grad()
    def finish_restore(self, scalars: Mapping[str, Any]) -> None:
        """See RankState.finish_restore."""
        for p, place, stepped in self._iterate_trained():
            set_state_scalars(self._optimizer, stepped, scalars, place.name)
            if stepped is not p:
                p.copy_(stepped)


@contextmanager
def observe_gradients(
    optimizers: Iterable[Optimizer], state: Callable[[], RankState], take: Callable[[Shard], None]
) -> Iterator[None]:
    """Call `take` with the gradients of the step inside the context, right before the update.

    They are averaged over the batch and clipped, and the loss scale is removed.

    Args:
        optimizers: All optimizers that step the model.
        state: Returns the state that knows the gradients' positions in the whole model.
        take: Receives each shard of a gradient.
    """

    @torch.no_grad()
    def pass_gradients(optimizer: Optimizer, *_: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # The clipping factor: fused kernels divide the gradients by it when they step.
        divisor = getattr(optimizer, "grad_scale", None)
        for shard in state().gradients(stepped):
            assert shard.values is not None
            values = shard.values if divisor is None else shard.values / divisor
            take(replace(shard, values=values))

    with ExitStack() as hooks:
        for optimizer in optimizers:  # registered last, so it runs after the hooks that clip
            hooks.callback(optimizer.register_step_pre_hook(pass_gradients).remove)
        yield
