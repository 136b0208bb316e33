"""Calls a model with its part of a batch, and finds logits, loss and labels.

Which entries go to the model, and how, says the recipe's list or the forward's signature. Whether layers and
losses fit what they are given is looked at in the first calls, before they compute. What entries of a batch
are found to index there, later batches are held to, on the host. An error of torch's that a wrong data set
causes would else be a traceback, and on a GPU the process's end.
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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.data.batches import FURTHER, IGNORE_INDEX, first_wrong, shown, tensors
from pipeline.errors import DataError, ModelError
from pipeline.models.document_attention import BOUNDS
from pipeline.models.embeddings import KEYS
from pipeline.models.transformers_facts import is_model
from pipeline.objectives.interface import TARGET_KEYS, Batch, GlobalBatch, part_of_vocabulary


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: a tensor, `.logits`, `["logits"]`, or the first of a tuple.

    Raises:
        ModelError: there are none.
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
        f"the model returned {shape_of(output)}; expected logits: a tensor, .logits, ['logits'], or the "
        "first of a tuple"
    )


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returned: a tensor, `.loss`, `["loss"]`, or the first of a tuple.

    Raises:
        ModelError: there is none, or it is no mean (it has more than one dimension).
    """
    loss = _found(output, "loss")
    if loss is None or loss.dim() > 1:
        raise ModelError(
            f"objective.kind is model_loss, and the model returned {shape_of(output)}; expected the mean "
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


def shape_of(output: Any) -> str:
    """What a model or a function returned, for a message."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


log = logging.getLogger(__name__)

MIN_ROWS = 2
"""One row of two logits looks like probabilities once in 400 times."""


def find_labels(batch: Batch, names: Sequence[str], objective: str) -> str:
    """The first of these entries that the batch has.

    Raises:
        DataError: it has none of them, or they are no class numbers; says what the batch has.
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


class FirstCount:
    """Warns where the first count is 0: labels that are all left out train nothing."""

    def __init__(self) -> None:
        self._is_first = True

    def __call__(self, count: Tensor, name: str) -> Tensor:
        if self._is_first:
            self._is_first = False
            if not count:
                log.warning(
                    "no label of the first micro-batch counts: all of %r are %d or have weight 0; where "
                    "that holds for all of the data, nothing is learned",
                    name,
                    IGNORE_INDEX,
                )
        return count


class FirstScores:
    """Holds the first scores to what a cross entropy takes: logits, or declared probabilities.

    Args:
        are_probabilities: The scores are declared as such.
        cure: What to write where logits are expected and probabilities come.
    """

    def __init__(self, cure: str, are_probabilities: bool = False) -> None:
        self._cure = cure
        self._are_probabilities = are_probabilities
        self._rows_left = MIN_ROWS

    def __call__(self, scores: Tensor) -> None:
        """Check scores (..., C). Waits for the device, in the first calls alone.

        Raises:
            ModelError: they are of the other kind.
        """
        if self._rows_left <= 0 or not scores.numel():
            return
        scores = scores.detach()  # nothing of this is to be recomputed
        is_sum_one = bool(((scores.sum(-1) - 1).abs() < 0.01).all())
        if not (scores.shape[-1] > 1 and is_sum_one and scores.min() >= 0):
            if self._are_probabilities:
                raise ModelError(
                    "objective.outputs: probabilities, and the model's outputs are none (0 or more, of sum "
                    "1); if they are logits, drop the key"
                )
            self._rows_left = 0
            return
        self._rows_left -= scores[..., 0].numel()
        if self._rows_left <= 0 and not self._are_probabilities:
            raise ModelError(
                "the model's outputs are probabilities (0 or more, of sum 1), and a cross entropy takes "
                "logits, of which it computes the softmax itself: leave the model's softmax out, or "
                + self._cure
            )


def check_labels(batch: Batch, name: str, classes: int) -> None:
    """Raises DataError where there is a label that is neither -100 nor in [0, classes)."""
    if (wrong := first_wrong(batch, name, classes)) is not None:
        raise DataError(
            f"{name!r} has {wrong.value}, and the model has {classes} outputs: expected 0 to {classes - 1} "
            f"({IGNORE_INDEX}: not counted){wrong.sample}"
        )


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


BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """How a batch is handed to a model."""

    positional: tuple[str, ...]
    """Entries that go in by position."""
    named: tuple[tuple[str, str], ...]
    """(argument, entry) of those that go in by name."""
    is_spread: bool = False
    """A first entry that is a tuple goes in as several arguments."""

    @cached_property
    def entries(self) -> frozenset[str]:
        """The entries that go to the model."""
        return frozenset(self.positional) | {entry for _, entry in self.named}


class ModelCall:
    """Calls a model with its part of a batch; what is left is the loss's.

    Without a list: entries that the forward has an argument for go in by name, `inputs` (or the only tensor
    that is no target) in the place of the first argument that is left. `labels`, `label`, `shift_labels`,
    `targets` and `target` are kept from it.

    Args:
        stated: The recipe's list `model.inputs`: by name where the forward has an argument of that name, the
            others by position, in this order.
        with_targets: The model computes its own loss: targets go in as well, under a name of the forward's
            that means the same, or behind the inputs.
        kept: Further entries that no model is given.
    """

    def __init__(
        self, stated: Sequence[str] | None = None, *, with_targets: bool = False, kept: Sequence[str] = ()
    ) -> None:
        self._stated = tuple(stated) if stated is not None else None
        self._kept = (BOUNDS, KEYS, *kept)
        self._with_targets = with_targets
        self._known: WeakKeyDictionary[nn.Module, dict[Any, Call]] = WeakKeyDictionary()
        self._checked = FirstCalls()

    def entries(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """The entries of the batch that go to the model."""
        return self._planned(model, batch).entries

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """The model's output.

        Raises:
            ModelError: the model's forward cannot be called with the batch; names both sides. Also, at the
                first call, a layer that its input does not fit.
            DataError: see FirstCalls.around.
        """
        call = self._planned(model, batch)
        values = [batch[entry] for entry in call.positional]
        if call.is_spread:
            values = [*values[0], *values[1:]]
        named = {argument: batch[entry] for argument, entry in call.named}
        with self._checked.around(unwrapped(model), batch):
            return model(*values, **named)

    def _planned(self, model: Callable[..., Any], batch: Batch) -> Call:
        kinds = tuple(
            (key, 1 if isinstance(value, Tensor) else _arity(value)) for key, value in batch.items()
        )
        if not isinstance(model, nn.Module):
            return self._plan(model, batch, dict(kinds))
        known = self._known.setdefault(model, {})
        if kinds not in known:
            known[kinds] = self._plan(model, batch, dict(kinds))
        return known[kinds]

    def _plan(self, model: Callable[..., Any], batch: Batch, kinds: dict[str, int]) -> Call:
        own = unwrapped(model)
        forward = own.forward if isinstance(own, nn.Module) else own
        try:
            signature = inspect.signature(forward)
        except ValueError:  # written in C
            signature = inspect.signature(lambda *values, **named: None)
        of_rows = {key: kind for key, kind in kinds.items() if key not in self._kept}
        plan = _Plan(signature, of_rows, self._with_targets)
        if self._stated is not None:
            if absent := [key for key in self._stated if key not in kinds]:
                raise ModelError(f"model.inputs: the batch has no {absent[0]!r}, but {shown(batch)}")
            call = plan.of(self._stated)
        else:
            call = plan.by_signature()
            _refuse_unusable(signature, batch, kinds, call)
        takes_any_name = any(p.kind is Parameter.VAR_KEYWORD for p in signature.parameters.values())
        if BOUNDS in kinds and is_model(own) and takes_any_name:  # other models are not asked to know them
            call = replace(call, named=(*call.named, (BOUNDS, BOUNDS)))
        try:
            places = len(call.positional) + (kinds[call.positional[0]] - 1 if call.is_spread else 0)
            signature.bind(*[None] * places, **dict.fromkeys(argument for argument, _ in call.named))
        except TypeError as misfit:
            raise ModelError(self._told(own, signature, batch, call, misfit)) from None
        if KEYS in kinds and is_model(own):  # its forward does not get to see them
            call = replace(call, named=(*call.named, (KEYS, KEYS)))
        for entry in call.positional[:1]:
            if not any(True for _ in tensors(batch[entry])):
                raise ModelError(f"the model would be given {entry!r}, which holds no tensor: {shown(batch)}")
        return call

    def _told(
        self, own: Any, signature: inspect.Signature, batch: Batch, call: Call, misfit: TypeError
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
            f"{name}({arguments}) does not fit the batch: {misfit}; the batch has {shown(batch)}. Rename "
            "what the data set gives, or name what goes to the model, in that order: model.inputs=[...]"
        )


def _refuse_unusable(signature: inspect.Signature, batch: Batch, kinds: dict[str, int], call: Call) -> None:
    """Refuses a list of what is no tensor, where the forward wants it: by name, or there is nothing else.

    Raises:
        DataError: says what it is a list of.
    """
    parameters = signature.parameters.values()
    wanted = [p.name for p in parameters if p.default is Parameter.empty and p.kind not in VARIABLE]
    places = [name for name in wanted if name not in dict(call.named)]
    has_place = len(places) > len(call.positional) or not call.entries
    others = [key for key in batch if key not in TARGET_KEYS]
    for key in others:
        value = batch[key]
        if kinds[key] or not isinstance(value, (list, tuple, np.ndarray)):
            continue
        by_name = (key, key) in call.named and key in wanted
        if by_name or (has_place and key not in call.entries and (key == "inputs" or others == [key])):
            what = type(value[0]).__name__ if len(value) else "nothing"
            hint = "; where it takes them as they are: model.inputs=[...]" if by_name else ""
            raise DataError(
                f"the model wants entry {key!r}, a {type(value).__name__} of {len(value)} {what}: the data "
                f"set must give tensors, arrays or numbers (torchvision's ToTensor, np.asarray){hint}"
            )


class Caller:
    """What all objectives have: the way to the model."""

    means: Mapping[str, tuple[str, str]] = {}
    targets: Sequence[str] = TARGET_KEYS
    weighted: Mapping[str, float] = {}

    def __init__(self, call: ModelCall | None = None) -> None:
        self._call = call or ModelCall()

    def inputs(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """See Objective.inputs."""
        return self._call.entries(model, batch)

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective.prepare_step: nothing."""


class _Plan:
    """One forward's signature against the entries of one kind of batch."""

    def __init__(self, signature: inspect.Signature, kinds: dict[str, int], with_targets: bool) -> None:
        parameters = list(signature.parameters.values())
        self._kinds = kinds
        self._with_targets = with_targets
        self._names = [p.name for p in parameters if p.kind in BY_NAME]
        self._places = [p for p in parameters if p.kind in BY_POSITION]
        self._takes_any_name = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        self._takes_any_number = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)

    def by_signature(self) -> Call:
        candidates = [key for key in self._kinds if self._with_targets or key not in TARGET_KEYS]
        named = {key: key for key in candidates if key in self._names}
        rest = [key for key in candidates if key not in named and self._kinds[key]]
        for key in [key for key in rest if key in TARGET_KEYS]:  # labels for label, as transformers has it
            alike = [name for name in TARGET_KEYS if name in self._names and name not in named]
            if alike:
                named[alike[0]] = key
                rest.remove(key)
        free = [p for p in self._places if p.name not in named]
        wanted = [p for p in free if p.default is Parameter.empty]
        if self._takes_any_name and (len(rest) > 1 or not self._takes_any_number) and not wanted:
            return Call((), tuple((named | {key: key for key in rest}).items()))
        inputs = [key for key in rest if key not in TARGET_KEYS and not key.startswith(FURTHER)]
        if "inputs" in inputs:
            given = ["inputs"]
        else:  # a lone one where the forward still wants one: nothing else it could be
            given = inputs if len(inputs) == 1 and (wanted or not named) else []
        if self._with_targets and (given or not inputs):
            given = given + [key for key in rest if key not in inputs]
        if not self._takes_any_number:
            given = given[: len(free)]
        if self._takes_any_name:
            named |= {key: key for key in rest if key not in given}
        return self._placed(given, named)

    def of(self, stated: Sequence[str]) -> Call:
        named = {key: key for key in stated if key in self._names}
        rest = [key for key in stated if key not in named]
        if self._takes_any_name and not self._takes_any_number:
            free = [p for p in self._places if p.name not in named]
            named |= {key: key for key in rest[len(free) :]}
            rest = rest[: len(free)]
        return self._placed(rest, named)

    def _placed(self, entries: Sequence[str], named: dict[str, str]) -> Call:
        """The entries in the places that are left: by position where these come first, else by name."""
        free = [p for p in self._places if p.name not in named]
        first = [p.name for p in self._places[: len(entries)]]
        is_spread = bool(entries) and self._kinds[entries[0]] > 1 and (
            self._takes_any_number or len(free) >= self._kinds[entries[0]]
        )  # fmt: skip
        if is_spread or first == [p.name for p in free[: len(entries)]]:
            return Call(tuple(entries), tuple(named.items()), is_spread)
        for parameter, entry in zip(free, entries, strict=False):
            named = {**named, parameter.name: entry}
        return Call(tuple(entries[len(free) :]), tuple(named.items()))


def _arity(value: Any) -> int:
    """0: no tensor in it; 1: a tensor, or what holds some; n > 1: a tuple or list of n that holds some."""
    if isinstance(value, Tensor):
        return 1
    if not any(True for _ in tensors(value)):
        return 0
    return len(value) if isinstance(value, (tuple, list)) and len(value) > 1 else 1


def unwrapped(model: Callable[..., Any]) -> Any:
    """The user's module inside an engine's wrappers: their forward takes anything, and they have `module`."""
    while isinstance(inner := getattr(model, "module", None), nn.Module) and _takes_anything(model):
        model = inner
    return getattr(model, "_orig_mod", model)  # torch.compile's


def _takes_anything(model: Any) -> bool:
    kinds = {p.kind for p in inspect.signature(getattr(model, "forward", model)).parameters.values()}
    return kinds == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
