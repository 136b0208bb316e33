"""Calls a model with its part of a batch, and finds logits or a loss in what it returns.

The recipe's list `model.inputs` says which entries go to the model, or else its forward's signature.

Layers and losses are looked at in the first call of training and of evaluation. What an entry of the batch
indexes there is checked in each later batch, on the host: on a GPU such an error would end the process.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import Parameter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.data.batches import FIELD_PREFIX, IGNORE_INDEX, find_bad_value, format_batch, iter_tensors
from pipeline.errors import DataError, ModelError
from pipeline.models.document_attention import BOUNDS_KEY
from pipeline.models.embeddings import NOISE_KEYS
from pipeline.models.transformers_facts import is_transformers_model
from pipeline.objectives.interface import TARGET_KEYS, Batch, GlobalBatch, get_vocabulary_part

log = logging.getLogger(__name__)


def get_logits(output: Any) -> Tensor:
    """Return the logits of what a model returned: a tensor, `.logits`, `["logits"]`, or first in a tuple.

    Raises:
        ModelError: There are none.
    """
    logits = _found(output, "logits")
    if logits is not None and logits.dim() > 0:
        return logits
    if logits is not None or _found(output, "loss") is not None:
        raise ModelError(
            "the model returned its own loss, and the objective wants logits; to train on that loss write "
            "objective.kind: model_loss"
        )
    raise ModelError(
        f"the model returned {describe_output(output)}; expected logits: a tensor, .logits, ['logits'], or the "
        "first of a tuple"
    )


def get_loss(output: Any) -> Tensor:
    """Return the loss of what a model returned: a tensor, `.loss`, `["loss"]`, or first in a tuple.

    Raises:
        ModelError: There is none, or it is no mean (it has more than one dimension).
    """
    loss = _found(output, "loss")
    if loss is None or loss.dim() > 1:
        raise ModelError(
            f"objective.kind is model_loss, and the model returned {describe_output(output)}; expected the mean "
            "loss of its samples: a 0-dim tensor, .loss, ['loss'], or the first of a tuple"
        )
    return loss


def _found(output: Any, name: str) -> Tensor | None:
    if isinstance(output, Mapping):
        found = output.get(name)
    elif hasattr(output, name):
        found = getattr(output, name)
    else:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
    return found if isinstance(found, Tensor) else None


def describe_output(output: Any) -> str:
    """Describe what a model or a function returned, for a message."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class CallPlan:
    """How a batch is handed to a model."""

    positional: tuple[str, ...]
    """Entries that go in by position."""
    named: tuple[tuple[str, str], ...]
    """(argument, entry) of those that go in by name."""
    is_spread: bool = False
    """Whether the first entry, a tuple, goes in as several arguments."""

    @cached_property
    def entries(self) -> frozenset[str]:
        """The entries that go to the model."""
        return frozenset(self.positional) | {entry for _, entry in self.named}


class ModelCall:
    """Calls a model with its part of a batch.

    Without a list: tensors that the forward has an argument for go in by name, `inputs` (or the only tensor
    that is no target) in the place of the first argument that is left. Targets are kept from it.

    Args:
        stated: The recipe's list `model.inputs`: by name where the forward has an argument of that name, the
            others by position, in this order.
        with_targets: Whether the model computes its own loss: targets go in as well, under a name of the
            forward's that means the same, or behind the inputs.
        kept: Further entries that no model is given.
    """

    def __init__(
        self, stated: Sequence[str] | None = None, *, with_targets: bool = False, kept: Sequence[str] = ()
    ) -> None:
        self._stated = stated
        self._kept = (BOUNDS_KEY, NOISE_KEYS, *kept)
        self._with_targets = with_targets
        self._known: WeakKeyDictionary[nn.Module, dict[Any, CallPlan]] = WeakKeyDictionary()
        self._checks = FirstCallChecks()

    def entries(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """Return the entries of the batch that go to the model."""
        return self._planned(model, batch).entries

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the model's output.

        Raises:
            ModelError: The model's forward cannot be called with the batch, or one of its layers.
            DataError: See FirstCallChecks.around.
        """
        call = self._planned(model, batch)
        values = [batch[entry] for entry in call.positional]
        if call.is_spread:
            values = [*values[0], *values[1:]]
        named = {argument: batch[entry] for argument, entry in call.named}
        with self._checks.around(unwrap_model(model), batch):
            return model(*values, **named)

    def _planned(self, model: Callable[..., Any], batch: Batch) -> CallPlan:
        widths = {key: _width(value) for key, value in batch.items()}
        if not isinstance(model, nn.Module):
            return self._plan(model, batch, widths)
        known = self._known.setdefault(model, {})
        key = tuple(widths.items())
        if key not in known:
            known[key] = self._plan(model, batch, widths)
        return known[key]

    def _plan(self, model: Callable[..., Any], batch: Batch, widths: dict[str, int]) -> CallPlan:
        own = unwrap_model(model)
        forward = own.forward if isinstance(own, nn.Module) else own
        try:
            signature = inspect.signature(forward)
        except ValueError:  # written in C
            signature = inspect.signature(lambda *values, **named: None)
        plan = _Plan(signature, {key: n for key, n in widths.items() if key not in self._kept})
        if self._stated is None:
            call = plan.by_signature(self._with_targets)
        elif absent := [key for key in self._stated if key not in batch]:
            raise ModelError(f"model.inputs: the batch has no {absent[0]!r}, but {format_batch(batch)}")
        else:
            call = plan.by_list(self._stated)
        if BOUNDS_KEY in batch and is_transformers_model(own) and plan.takes_any_name:
            call = replace(call, named=(*call.named, (BOUNDS_KEY, BOUNDS_KEY)))
        try:
            places = len(call.positional) + (widths[call.positional[0]] - 1 if call.is_spread else 0)
            signature.bind(*[None] * places, **dict.fromkeys(argument for argument, _ in call.named))
        except TypeError as misfit:
            raise ModelError(self._misfit(own, signature, batch, call, misfit)) from None
        if NOISE_KEYS in batch and is_transformers_model(own):  # a hook takes them before the forward
            call = replace(call, named=(*call.named, (NOISE_KEYS, NOISE_KEYS)))
        return call

    def _misfit(
        self, own: Any, signature: inspect.Signature, batch: Batch, call: CallPlan, misfit: TypeError
    ) -> str:
        kept = set(batch) & set(TARGET_KEYS) & set(signature.parameters) - call.entries
        if kept and not self._with_targets and self._stated is None:
            return (
                f"the model's forward wants {min(kept)}; targets go to the objective, unless the model "
                "computes its own loss: objective.kind: model_loss (or name all that goes to the model in "
                "model.inputs)"
            )
        name = f"{type(own).__name__}.forward" if isinstance(own, nn.Module) else "the model"
        arguments = ", ".join(map(str, signature.parameters))
        return (
            f"{name}({arguments}) does not fit the batch: {misfit}; the batch has {format_batch(batch)}. "
            "Rename what the data set gives (tensors, arrays or numbers: a list of anything else goes to no "
            "model by itself), or name what goes to the model, in that order: model.inputs=[...]"
        )


class _Plan:
    """One forward's signature against the entries of one kind of batch.

    Args:
        widths: See _width, of each entry.
    """

    def __init__(self, signature: inspect.Signature, widths: dict[str, int]) -> None:
        parameters = list(signature.parameters.values())
        self._widths = widths
        self._names = [p.name for p in parameters if p.kind in BY_NAME]
        self._places = [p for p in parameters if p.kind in BY_POSITION]
        self.takes_any_name = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        self._takes_any_number = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)

    def by_signature(self, with_targets: bool) -> CallPlan:
        """Return the call that the forward's own arguments ask for."""
        rest = [key for key, width in self._widths.items() if width]
        if not with_targets:
            rest = [key for key in rest if key not in TARGET_KEYS]
        named = {key: key for key in rest if key in self._names}
        rest = [key for key in rest if key not in named]
        for key in [key for key in rest if key in TARGET_KEYS]:  # labels for label, as transformers has it
            alike = [name for name in TARGET_KEYS if name in self._names and name not in named]
            if alike:
                named[alike[0]] = key
                rest.remove(key)
        free = [p for p in self._places if p.name not in named]
        wanted = [p for p in free if p.default is Parameter.empty]
        if self.takes_any_name and (len(rest) > 1 or not self._takes_any_number) and not wanted:
            return CallPlan((), tuple((named | {key: key for key in rest}).items()))
        inputs = [key for key in rest if key not in TARGET_KEYS and not key.startswith(FIELD_PREFIX)]
        if "inputs" in inputs:
            given = ["inputs"]
        else:  # a lone one where the forward still wants one: nothing else it could be
            given = inputs if len(inputs) == 1 and (wanted or not named) else []
        if with_targets and (given or not inputs):
            given = given + [key for key in rest if key not in inputs]
        if not self._takes_any_number:
            given = given[: len(free)]
        if self.takes_any_name:
            named |= {key: key for key in rest if key not in given}
        return self._placed(given, named)

    def by_list(self, stated: Sequence[str]) -> CallPlan:
        """Return the call that the recipe's list asks for."""
        named = {key: key for key in stated if key in self._names}
        rest = [key for key in stated if key not in named]
        if self.takes_any_name and not self._takes_any_number:
            free = [p for p in self._places if p.name not in named]
            named |= {key: key for key in rest[len(free) :]}
            rest = rest[: len(free)]
        return self._placed(rest, named)

    def _placed(self, entries: Sequence[str], named: dict[str, str]) -> CallPlan:
        """Put entries in the places that are left: by position where these come first, else by name."""
        free = [p.name for p in self._places if p.name not in named]
        width = self._widths[entries[0]] if entries else 0
        is_spread = width > 1 and (self._takes_any_number or len(free) >= width)
        if is_spread or free[: len(entries)] == [p.name for p in self._places[: len(entries)]]:
            return CallPlan(tuple(entries), tuple(named.items()), is_spread)
        named = named | dict(zip(free, entries, strict=False))
        return CallPlan(tuple(entries[len(free) :]), tuple(named.items()))


def _width(value: Any) -> int:
    """Return 0 of what holds no tensor, n of a tuple or list of n > 1 that holds some, else 1."""
    if isinstance(value, Tensor):
        return 1
    if not any(True for _ in iter_tensors(value)):
        return 0
    return len(value) if isinstance(value, (tuple, list)) and len(value) > 1 else 1


class BaseObjective:
    """What all objectives have: the way to the model."""

    means: Mapping[str, tuple[str, str]] = {}
    targets: Sequence[str] = TARGET_KEYS
    weighted: Mapping[str, float] = {}
    _is_first_count = True

    def __init__(self, call: ModelCall | None = None) -> None:
        self._call = call or ModelCall()

    def inputs(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """See Objective.inputs."""
        return self._call.entries(model, batch)

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective.prepare_step: nothing."""

    def _warn_of_none(self, count: Tensor, name: str) -> None:
        """Warn if the first count is 0: of labels that are all left out nothing is learned."""
        self._is_first_count = False
        if not count:
            log.warning(
                "no label of the first micro-batch counts: all of %r are %d; if that holds for all of the "
                "data, nothing is learned",
                name,
                IGNORE_INDEX,
            )


def unwrap_model(model: Callable[..., Any]) -> Any:
    """Return the user's module inside an engine's wrappers, which have `module` and take any arguments."""
    while isinstance(inner := getattr(model, "module", None), nn.Module) and _takes_anything(model):
        model = inner
    return getattr(model, "_orig_mod", model)  # torch.compile's


def _takes_anything(model: Any) -> bool:
    kinds = {p.kind for p in inspect.signature(getattr(model, "forward", model)).parameters.values()}
    return kinds == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


@dataclass(frozen=True)
class IndexRange:
    """What indices point into: the rows of an embedding, or the classes of a loss."""

    size: int
    owner: str
    """In words: `embed, Embedding(...), has 3 rows`."""
    ignored: int | None = None
    """Number that is allowed besides."""

    @property
    def expected(self) -> str:
        """The owner, and the numbers that it takes."""
        return f"{self.owner}: expected 0 to {self.size - 1}"


def are_probabilities(scores: Tensor) -> bool | None:
    """Return whether scores (..., C) look like probabilities; `None` of too few. Waits for the device."""
    if scores.shape[-1] < 2 or not scores.numel():
        return False
    scores = scores.detach()
    has_sum_one = bool(((scores.sum(-1) - 1).abs() < 0.01).all())
    if not (has_sum_one and bool(scores.min() >= 0)):  # NaN is neither
        return False
    return True if scores[..., 0].numel() > 1 else None  # logits of one row do once in 400 times


PROBABILITIES = (
    "the model's outputs are probabilities (0 or more, of sum 1), and a cross entropy takes logits, of which "
    "it computes the softmax itself: leave the model's softmax out, or return the logarithm of its outputs"
)


class IndexChecks:
    """The ranges that entries of a batch index, learned in a first call."""

    def __init__(self) -> None:
        self._by_entry: dict[str, IndexRange] = {}

    def note(self, batch: Batch, indices: Tensor, found: IndexRange) -> None:
        """Check indices, and remember which entry of the batch they are; the smallest range counts.

        Raises:
            DataError: One is out of range.
        """
        names = [
            name
            for name, value in batch.items()
            if isinstance(value, Tensor)
            and (indices is value or (indices._base is value and indices.numel() == value.numel()))
        ]
        if len(names) == 1 and (names[0] not in self._by_entry or found.size < self._by_entry[names[0]].size):
            self._by_entry[names[0]] = found
        self.check(batch)
        counted = indices if found.ignored is None else indices[indices != found.ignored]
        if not counted.numel():
            return
        lowest, highest = int(counted.min()), int(counted.max())
        if lowest < 0 or highest >= found.size:
            raise DataError(f"indices are {lowest} to {highest}, and {found.expected}")

    def check(self, batch: Batch) -> None:
        """Raise a DataError if an entry that is known has a number out of its range."""
        for name, known in self._by_entry.items():
            if (wrong := find_bad_value(batch, name, known.size, known.ignored)) is not None:
                raise DataError(f"{name!r} has {wrong.value}, and {known.expected}{wrong.sample}")


class FirstCallChecks:
    """Checks of the first call of a model (or a loss) in training, and of the first in evaluation."""

    def __init__(self) -> None:
        self._by_mode: dict[bool, IndexChecks] = {}

    @contextmanager
    def around(self, model: Any, batch: Batch) -> Iterator[LossChecks | None]:
        """Inside, what does not fit is an error that names it. Waits for the device in first calls alone.

        Only torch's own layers are checked: a subclass may take something else. Compiled blocks are left
        out: a hook would be compiled in.

        Args:
            model: The user's own module, without wrappers.

        Yields:
            The checks of the losses inside; `None` if this is no first call.

        Raises:
            ModelError: A layer's input is not what it takes.
            DataError: A label or an index is out of range.
        """
        if not isinstance(model, nn.Module):
            yield None
            return
        if model.training in self._by_mode:
            self._by_mode[model.training].check(batch)
            yield None
            return
        indices = self._by_mode[model.training] = IndexChecks()
        layers = dict(model.named_modules())
        if any(layer._compiled_call_impl is not None for layer in layers.values()):
            yield None
            return
        blocks = [layer for layer in layers.values() if "forward" in vars(layer)]  # compiled, each as one
        inside = {id(layer) for block in blocks for layer in block.modules()}
        hooks = [
            layer.register_forward_pre_hook(partial(_check_layer, name, batch, indices))
            for name, layer in layers.items()
            if id(layer) not in inside
        ]
        losses = LossChecks(batch, indices)
        for block in blocks:  # what is compiled under a mode would be compiled once more without it
            hooks.append(block.register_forward_pre_hook(lambda *_: losses.__exit__(None, None, None)))
            hooks.append(block.register_forward_hook(lambda *_: _enter(losses), always_call=True))
        try:
            with losses:
                yield losses
        finally:
            for hook in hooks:
                hook.remove()


def _enter(mode: TorchFunctionMode) -> None:
    mode.__enter__()


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # a synchronised one has more values
INPUT_WIDTHS = {
    nn.Linear: ("in_features", -1),
    nn.LSTM: ("input_size", -1),
    nn.GRU: ("input_size", -1),
    nn.RNN: ("input_size", -1),
    nn.Conv1d: ("in_channels", -2),
    nn.Conv2d: ("in_channels", -3),
    nn.Conv3d: ("in_channels", -4),
}
"""Layer -> its attribute with the width that it takes, and the dimension of the input that has it."""


def _check_layer(
    name: str, batch: Batch, indices: IndexChecks, layer: nn.Module, given: tuple[Any, ...]
) -> None:
    if not given or not isinstance(x := given[0], Tensor):
        return
    named = f"{name or 'the model'}, {type(layer).__name__}({layer.extra_repr()}),"
    if (problem := _misfit(layer, x)) is not None:
        dtype = str(x.dtype).removeprefix("torch.")
        raise ModelError(f"model: {named} is given {dtype} of shape {tuple(x.shape)}; {problem}")
    # An embedding of which a rank has some words finds nothing for the others.
    is_table = type(layer) is nn.Embedding or get_vocabulary_part(layer) is not None
    rows = getattr(layer, "num_embeddings", None) if is_table else None
    if rows is not None:
        indices.note(batch, x, IndexRange(rows, f"{named} has {rows} rows"))


def _misfit(layer: Any, x: Tensor) -> str | None:
    """Return what a layer of torch's expects if it cannot take its input."""
    if type(layer) is nn.Embedding:
        return (
            "expected integers: make them such in the data set, as x.long()"
            if x.is_floating_point()
            else None
        )
    if type(layer) in BATCH_NORMS:
        takes_statistics = layer.training or layer.running_mean is None
        if takes_statistics and x.dim() > 1 and x.numel() == x.shape[1] == layer.num_features:
            return "one value a channel has no variance: raise batch.micro_batch_size"
        return None
    if type(layer) not in INPUT_WIDTHS:
        return None
    if not x.is_floating_point() and not x.is_complex():
        return "expected floating-point numbers: make them such in the data set, as x.float()"
    attribute, dimension = INPUT_WIDTHS[type(layer)]
    width = getattr(layer, attribute)
    if x.dim() >= -dimension and x.shape[dimension] == width:
        return None
    return f"expected {attribute} {width} in dimension {dimension}"


class LossChecks(TorchFunctionMode):
    """Looks at what losses are called with, wherever they are called."""

    def __init__(self, batch: Batch, indices: IndexChecks) -> None:
        super().__init__()
        self._batch = batch
        self._indices = indices
        self._means: list[tuple[Tensor, float]] = []

    def mean_over(self, loss: Tensor) -> float | None:
        """Return what was divided by if this very tensor is a mean, of a loss or a plain one."""
        return next((divisor for mean, divisor in self._means if loss is mean), None)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function in (F.cross_entropy, F.nll_loss) and len(args) > 1:
            self._check_targets(args[0], args[1], named.get("ignore_index", IGNORE_INDEX))
        if function is F.cross_entropy and args and are_probabilities(_classes_last(args[0])):
            raise ModelError(PROBABILITIES)
        result = function(*args, **named)
        if function in (torch.mean, Tensor.mean) or named.get("reduction") == "mean":
            self._means.append((result, _divisor(function, args, named)))
        return result

    def _check_targets(self, scores: Tensor, targets: Any, ignored: int) -> None:
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            return
        if targets.dim() == scores.dim() - 1:
            classes = scores.shape[1 if scores.dim() > 1 else 0]
            owner = f"the scores of a cross entropy are for {classes} classes"
            self._indices.note(self._batch, targets, IndexRange(classes, owner, ignored))


def _classes_last(scores: Tensor) -> Tensor:
    return scores.movedim(1, -1) if scores.dim() > 1 else scores


def _divisor(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> float:
    """Return the number of elements that a mean is over: of a cross entropy its targets, NaN with weights."""
    if function not in (F.cross_entropy, F.nll_loss):
        return float(args[0].numel() if args else 1)
    scores, targets = args[:2]
    if named.get("weight") is not None:
        return math.nan
    if targets.is_floating_point():
        return float(_classes_last(scores)[..., 0].numel())
    return float((targets != named.get("ignore_index", IGNORE_INDEX)).sum())
