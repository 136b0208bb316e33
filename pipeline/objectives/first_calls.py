"""Whether layers and losses fit what they are given: looked at in the first calls, before they compute.
What entries of a batch are found to index there, later batches are held to, on the host.

An error of torch's that a wrong data set causes would else be a traceback, and on a GPU the process's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.data.batches import IGNORE_INDEX
from pipeline.data.extents import first_wrong
from pipeline.errors import DataError, ModelError
from pipeline.objectives.interface import Batch
from pipeline.objectives.labels import FirstScores
from pipeline.objectives.vocabulary_part import part_of_vocabulary

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # one that asks other ranks has more values
CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


class Table(NamedTuple):
    """What an entry of the batch indexes."""

    rows: int
    ignored: int | None
    """A number besides that is left out."""
    told: str
    """`embed, Embedding(...), has 3 rows`."""


class Tables:
    """Which entries index something, as a first call shows: the batch's own tensor gets there, whole."""

    def __init__(self) -> None:
        self._of: dict[str, Table] = {}

    def note(self, batch: Batch, given: Tensor, table: Table) -> None:
        """Of several tables of an entry the smallest counts. Not where one tensor is two entries.

        Raises:
            DataError: a number has no row.
        """
        names = [
            name
            for name, value in batch.items()
            if isinstance(value, Tensor)
            and (given is value or (given._base is value and given.numel() == value.numel()))
        ]
        if len(names) == 1 and (names[0] not in self._of or table.rows < self._of[names[0]].rows):
            self._of[names[0]] = table
        self.check(batch)

    def check(self, batch: Batch) -> None:
        """Raises DataError where a number has no row."""
        for name, table in self._of.items():
            if (wrong := first_wrong(batch, name, table.rows, table.ignored)) is not None:
                raise DataError(
                    f"{name!r} has {wrong.value}, and {table.told}: expected 0 to "
                    f"{table.rows - 1}{wrong.sample}"
                )


class FirstCalls:
    """The first call of a model (or a loss) in training, and the first in evaluation."""

    def __init__(self) -> None:
        self._seen: dict[bool, Tables] = {}
        self._told_scores = FirstScores(
            "take their logarithm: F.nll_loss(outputs.clamp_min(1e-12).log(), targets)"
        )

    @contextmanager
    def around(self, model: Any, batch: Batch) -> Iterator[Losses | None]:
        """Inside, what does not fit is an error that names it. Waits for the device, in first calls alone;
        later batches are held to what their numbers index.

        Exactly torch's own layers are looked at: a subclass may take something else. Not those in a compiled
        block, and nothing where a user's code compiles: a hook would be compiled in.

        Args:
            model: The user's own, without wrappers: DeepSpeed's says that it is in training all the time.

        Yields:
            What is noted of the losses inside; None: this is no first call.

        Raises:
            ModelError: a layer's input is not what it takes, or a cross entropy is given probabilities.
            DataError: labels are out of the range of the scores that they are compared with, or ids of an
                embedding.
        """
        if not isinstance(model, nn.Module) or model.training in self._seen:
            if isinstance(model, nn.Module):
                self._seen[model.training].check(batch)
            yield None
            return
        tables = self._seen[model.training] = Tables()
        layers = dict(model.named_modules())
        if any(layer._compiled_call_impl is not None for layer in layers.values()):
            yield None
            return
        blocks = [layer for layer in layers.values() if "forward" in vars(layer)]  # compiled, each as one
        inside = {id(layer) for block in blocks for layer in block.modules()}
        hooks = [
            layer.register_forward_pre_hook(partial(_look, name, batch, tables))
            for name, layer in layers.items()
            if id(layer) not in inside
        ]
        losses = Losses(self._told_scores, batch, tables)
        for block in blocks:  # what is compiled under a mode would be compiled once more without it
            hooks.append(block.register_forward_pre_hook(lambda *_: losses.__exit__(None, None, None)))
            hooks.append(block.register_forward_hook(lambda *_: _enter(losses), always_call=True))
        try:
            with losses:
                yield losses
        finally:
            for hook in hooks:
                hook.remove()


def _look(name: str, batch: Batch, tables: Tables, layer: nn.Module, given: tuple[Any, ...]) -> None:
    if given and isinstance(given[0], Tensor) and (rows := _rows(layer)) is not None:
        tables.note(batch, given[0], Table(rows, None, f"{_named(layer, name)} has {rows} rows"))
    if given and isinstance(given[0], Tensor) and (told := _misfit(layer, given[0])) is not None:
        raise ModelError(f"model: {_named(layer, name)} is given {_of(given[0])}; {told}")


def _rows(layer: nn.Module) -> int | None:
    """Of an embedding: torch's own, or one of which a rank holds some words and finds nothing for others."""
    is_table = type(layer) is nn.Embedding or part_of_vocabulary(layer) is not None
    return getattr(layer, "num_embeddings", None) if is_table else None


def _enter(mode: TorchFunctionMode) -> None:
    mode.__enter__()


class Losses(TorchFunctionMode):
    """Looks at what losses are called with, wherever they are."""

    def __init__(self, told_scores: FirstScores, batch: Batch, tables: Tables) -> None:
        super().__init__()
        self._told_scores, self._batch, self._tables = told_scores, batch, tables
        self._means: list[tuple[Tensor, float]] = []

    def divisor(self, loss: Tensor) -> float | None:
        """What was divided by where this very tensor is a mean over everything, a loss's or a plain one."""
        return next((divisor for mean, divisor in self._means if loss is mean), None)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (F.cross_entropy, F.nll_loss) and len(args) > 1:
            self._look_at(args[0], args[1], (kwargs or {}).get("ignore_index", IGNORE_INDEX))
        if function is F.cross_entropy and args and isinstance(args[0], Tensor) and args[0].dim():
            self._told_scores(args[0].movedim(1 if args[0].dim() > 1 else 0, -1))
        result = function(*args, **(kwargs or {}))
        if function in (torch.mean, Tensor.mean) or (kwargs or {}).get("reduction") == "mean":
            self._means.append((result, _divisor(function, args, kwargs or {})))
        return result

    def _look_at(self, scores: Tensor, targets: Any, ignored: int) -> None:
        if (
            isinstance(targets, Tensor)
            and not targets.is_floating_point()
            and targets.dim() == scores.dim() - 1
        ):
            classes = scores.shape[1 if scores.dim() > 1 else 0]
            told = f"the scores of a cross entropy are for {classes} classes"
            self._tables.note(self._batch, targets, Table(classes, ignored, told))
            _check_targets(targets, classes, ignored)


def _divisor(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the number of elements that a mean is over: of a cross entropy its targets, NaN with weights."""
    if function not in (F.cross_entropy, F.nll_loss):
        return float(args[0].numel() if args else 1)
    scores, targets = args[:2]
    if kwargs.get("weight") is not None:
        return math.nan
    if targets.is_floating_point():
        return float(scores.numel() / scores.shape[1 if scores.dim() > 1 else 0])
    return float((targets != kwargs.get("ignore_index", IGNORE_INDEX)).sum())


def _misfit(layer: Any, x: Tensor) -> str | None:
    if type(layer) is nn.Embedding:
        return _embedding_misfit(layer, x)
    if type(layer) in BATCH_NORMS:
        return _batch_norm_misfit(layer, x)
    is_linear, dimensions = type(layer) is nn.Linear, CONVOLUTIONS.get(type(layer))
    is_recurrent = type(layer) in (nn.LSTM, nn.GRU, nn.RNN)
    if not (is_linear or dimensions or is_recurrent):
        return None
    if not x.is_floating_point() and not x.is_complex():
        return "expected floating-point numbers: make them such in the data set, as x.float()"
    if is_linear and x.shape[-1:] != (layer.in_features,):
        return f"expected a last dimension of {layer.in_features}"
    if is_recurrent and x.shape[-1] != layer.input_size:
        return f"expected a last dimension of {layer.input_size}"
    if dimensions:
        fits = x.dim() in (dimensions + 1, dimensions + 2) and x.shape[-dimensions - 1] == layer.in_channels
        return None if fits else f"expected (samples, {layer.in_channels}{', size' * dimensions})"
    return None


def _batch_norm_misfit(layer: Any, x: Tensor) -> str | None:
    takes_statistics = layer.training or (layer.running_mean is None and layer.running_var is None)
    if takes_statistics and x.dim() > 1 and x.numel() == x.shape[1] == layer.num_features:
        return "one value a channel has no variance: raise batch.micro_batch_size"
    return None


def _embedding_misfit(layer: nn.Embedding, ids: Tensor) -> str | None:
    if ids.is_floating_point():
        return "expected integers: make them such in the data set, as x.long()"
    if (
        ids.numel()
        and not 0 <= (lowest := int(ids.min())) <= (highest := int(ids.max())) < layer.num_embeddings
    ):
        return f"indices are {lowest} to {highest}; expected 0 to {layer.num_embeddings - 1}"
    return None


def _check_targets(targets: Tensor, classes: int, ignored: int) -> None:
    counted = targets[targets != ignored]
    if counted.numel() and not 0 <= (low := int(counted.min())) <= (high := int(counted.max())) < classes:
        raise DataError(
            f"the labels of a cross entropy are {low} to {high}, and its scores are for {classes} classes: "
            f"expected 0 to {classes - 1}"
        )


def _of(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"


def _named(layer: nn.Module, name: str) -> str:
    return f"{name or 'the model'}, {type(layer).__name__}({layer.extra_repr()}),"
