"""Checks that a batch fits the model and the loss, so that a misfit is one line that names it.

Layers and losses are looked at in the first call of training and of evaluation. What an entry of the batch
indexes there is checked in each later batch, on the host: on a GPU such an error would end the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.data.batches import IGNORE_INDEX, first_wrong, shown
from pipeline.errors import DataError, ModelError
from pipeline.objectives.interface import Batch, part_of_vocabulary


def find_labels(batch: Batch, names: Sequence[str], objective: str) -> str:
    """Return the first of these entries that the batch has.

    Raises:
        DataError: It has none of them, or they are no class numbers.
    """
    name = next((name for name in names if name in batch), None)
    if name is None:
        raise DataError(f"objective {objective} reads {names[0]!r}, and the batch has {shown(batch)}")
    labels = batch[name]
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"objective {objective} reads class numbers (integers from 0) from {name!r}, and the batch has "
            f"{shown({name: labels})}; make them such in the data set, or use an objective of your own"
        )
    return name


def check_labels(batch: Batch, name: str, classes: int) -> None:
    """Raise a DataError if a label is neither -100 nor in [0, classes)."""
    if (wrong := first_wrong(batch, name, classes)) is not None:
        raise DataError(
            f"{name!r} has {wrong.value}, and the model has {classes} outputs: expected 0 to {classes - 1} "
            f"({IGNORE_INDEX}: not counted){wrong.sample}"
        )


def are_probabilities(scores: Tensor) -> bool | None:
    """Return whether scores (..., C) look like probabilities; `None` of too few. Waits for the device."""
    if scores.shape[-1] < 2 or not scores.numel():
        return False
    scores = scores.detach()
    has_sum_one = bool(((scores.sum(-1) - 1).abs() < 0.01).all())
    if not (has_sum_one and bool(scores.min() >= 0)):  # NaN is neither
        return False
    return True if scores[..., 0].numel() > 1 else None  # logits of one row do once in 400 times


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
            if (wrong := first_wrong(batch, name, known.size, known.ignored)) is not None:
                raise DataError(f"{name!r} has {wrong.value}, and {known.expected}{wrong.sample}")


class FirstCalls:
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
WIDTHS = {
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
    is_table = type(layer) is nn.Embedding or part_of_vocabulary(layer) is not None
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
    if type(layer) not in WIDTHS:
        return None
    if not x.is_floating_point() and not x.is_complex():
        return "expected floating-point numbers: make them such in the data set, as x.float()"
    attribute, dimension = WIDTHS[type(layer)]
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
        self._means: list[Tensor] = []

    def is_mean(self, loss: Tensor) -> bool:
        """Return whether this very tensor is the result of a mean, of a loss or a plain one."""
        return any(loss is mean for mean in self._means)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function in (F.cross_entropy, F.nll_loss) and len(args) > 1:
            self._check_targets(args[0], args[1], named.get("ignore_index", IGNORE_INDEX))
        result = function(*args, **named)
        if function in (torch.mean, Tensor.mean) or named.get("reduction") == "mean":
            self._means.append(result)
        return result

    def _check_targets(self, scores: Tensor, targets: Any, ignored: int) -> None:
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            return
        if targets.dim() == scores.dim() - 1:
            classes = scores.shape[1 if scores.dim() > 1 else 0]
            owner = f"the scores of a cross entropy are for {classes} classes"
            self._indices.note(self._batch, targets, IndexRange(classes, owner, ignored))
