"""The call of a model with its part of a batch, and the search for logits or a loss in its output.

The recipe's list `model.inputs` decides which entries go to the model; without it, the forward's signature
decides.

In the first call of training and of evaluation the inputs of layers and losses are checked. Entries of a
batch that index something, such as token ids, are then checked in each later batch, on the host: on a GPU an
index out of range would end the process.
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
    """Return the logits of a model's output: a tensor, `.logits`, `["logits"]`, or the first of a tuple.

    Raises:
        ModelError: The output has no logits.
    """
    logits = _find_entry(output, "logits")
    if logits is not None and logits.dim() > 0:
        return logits
    if logits is not None or _find_entry(output, "loss") is not None:
        raise ModelError(
            "the model returned its own loss, but the objective needs logits; to train on that loss write "
            "objective.kind: model_loss"
        )
    raise ModelError(
        f"the model returned {describe_output(output)}; expected logits: a tensor, .logits, ['logits'], or "
        "the first of a tuple"
    )


def get_loss(output: Any) -> Tensor:
    """Return the loss of a model's output: a tensor, `.loss`, `["loss"]`, or the first of a tuple.

    Raises:
        ModelError: The output has no loss, or the loss has more than one dimension, so it is no mean.
    """
    loss = _find_entry(output, "loss")
    if loss is None or loss.dim() > 1:
        raise ModelError(
            f"objective.kind is model_loss, but the model returned {describe_output(output)}; expected the "
            "mean loss of its samples: a 0-dim tensor, .loss, ['loss'], or the first of a tuple"
        )
    return loss


def _find_entry(output: Any, name: str) -> Tensor | None:
    """Return the entry of this name, else a tuple's first element, else the output; `None`: no tensor."""
    if isinstance(output, Mapping):
        entry = output.get(name)
    elif hasattr(output, name):
        entry = getattr(output, name)
    else:
        entry = output[0] if isinstance(output, (tuple, list)) and output else output
    return entry if isinstance(entry, Tensor) else None


def describe_output(output: Any) -> str:
    """Describe the output of a model or a function, for a message."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


# Kinds of parameters that can be passed by position, and by name.
POSITIONAL_KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
KEYWORD_KINDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class CallPlan:
    """The assignment of a batch's entries to the arguments of a model's forward."""

    positional: tuple[str, ...]
    """Entries that are passed by position, in this order."""
    named: tuple[tuple[str, str], ...]
    """Pairs (argument, entry) of entries that are passed by name."""
    is_spread: bool = False
    """Whether the first positional entry, a tuple, is passed as several arguments."""

    @cached_property
    def entries(self) -> frozenset[str]:
        """Entries that go to the model."""
        return frozenset(self.positional) | {entry for _, entry in self.named}


class ModelCall:
    """Calls a model with the entries of a batch that are meant for it.

    Without a list, entries with tensors are passed by name if the forward has an argument of that name.
    `inputs`, or the only remaining entry that is no target, is passed as the first remaining argument.
    Targets are not passed.

    Args:
        input_names: The recipe's list `model.inputs`; `None`: the signature decides. Entries are passed by
            name if the forward has an argument of that name, and the others by position, in this order.
        with_targets: Whether the model computes its own loss. Targets are then passed too: by name (`label`
            also for an argument `labels`, or any other of TARGET_KEYS), or by position after the inputs.
        withheld: Further entries that are not passed to the model by its signature.
    """

    def __init__(
        self,
        input_names: Sequence[str] | None = None,
        *,
        with_targets: bool = False,
        withheld: Sequence[str] = (),
    ) -> None:
        self._input_names = input_names
        self._withheld = (BOUNDS_KEY, NOISE_KEYS, *withheld)
        self._with_targets = with_targets
        self._plans: WeakKeyDictionary[nn.Module, dict[Any, CallPlan]] = WeakKeyDictionary()
        self._checks = FirstCallChecks()

    def entries(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """Return the names of the batch's entries that go to the model.

        Raises:
            ModelError: The model's forward cannot be called with the batch.
        """
        return self._get_plan(model, batch).entries

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Call the model, and return its output.

        Raises:
            ModelError: The model's forward cannot be called with the batch, or a layer cannot take its input.
            DataError: A label or an index is out of range; see FirstCallChecks.
        """
        plan = self._get_plan(model, batch)
        values = [batch[entry] for entry in plan.positional]
        if plan.is_spread:
            values = [*values[0], *values[1:]]
        named = {argument: batch[entry] for argument, entry in plan.named}
        with self._checks.check_inside(unwrap_model(model), batch):
            return model(*values, **named)

    def _get_plan(self, model: Callable[..., Any], batch: Batch) -> CallPlan:
        """Return the plan for this model and kind of batch, from an earlier call if there was one."""
        widths = {key: _measure_width(value) for key, value in batch.items()}
        if not isinstance(model, nn.Module):
            return self._make_plan(model, batch, widths)
        plans = self._plans.setdefault(model, {})
        key = tuple(widths.items())
        if key not in plans:
            plans[key] = self._make_plan(model, batch, widths)
        return plans[key]

    def _make_plan(self, model: Callable[..., Any], batch: Batch, widths: dict[str, int]) -> CallPlan:
        inner = unwrap_model(model)
        forward = inner.forward if isinstance(inner, nn.Module) else inner
        try:
            signature = inspect.signature(forward)
        except ValueError:  # written in C
            signature = inspect.signature(lambda *values, **named: None)
        planner = _CallPlanner(signature, {key: n for key, n in widths.items() if key not in self._withheld})
        if self._input_names is None:
            plan = planner.plan_by_signature(self._with_targets)
        else:
            missing = [key for key in self._input_names if key not in batch]
            if missing:
                raise ModelError(
                    f"model.inputs names {missing[0]!r}, but the batch has {format_batch(batch)}; name "
                    "entries of the batch"
                )
            plan = planner.plan_by_list(self._input_names)
        if BOUNDS_KEY in batch and is_transformers_model(inner) and planner.takes_any_name:
            plan = replace(plan, named=(*plan.named, (BOUNDS_KEY, BOUNDS_KEY)))
        num_positional = len(plan.positional)
        if plan.is_spread:
            num_positional += widths[plan.positional[0]] - 1
        try:
            signature.bind(*[None] * num_positional, **dict.fromkeys(argument for argument, _ in plan.named))
        except TypeError as misfit:
            raise ModelError(self._describe_misfit(inner, signature, batch, plan, misfit)) from None
        # A forward pre-hook takes these out of the arguments, so they are not part of the signature.
        if NOISE_KEYS in batch and is_transformers_model(inner):
            plan = replace(plan, named=(*plan.named, (NOISE_KEYS, NOISE_KEYS)))
        return plan

    def _describe_misfit(
        self, inner: Any, signature: inspect.Signature, batch: Batch, plan: CallPlan, misfit: TypeError
    ) -> str:
        """Return a message for a forward that cannot be called by this plan."""
        unused_targets = set(batch) & set(TARGET_KEYS) & set(signature.parameters) - plan.entries
        if unused_targets and not self._with_targets and self._input_names is None:
            return (
                f"the model's forward needs {min(unused_targets)}, but targets go to the objective; if the "
                "model computes its own loss, write objective.kind: model_loss, else list all entries that "
                "go to the model in model.inputs"
            )
        name = f"{type(inner).__name__}.forward" if isinstance(inner, nn.Module) else "the model"
        arguments = ", ".join(map(str, signature.parameters))
        return (
            f"{name}({arguments}) does not fit the batch: {misfit}; the batch has {format_batch(batch)}. "
            "Rename the entries in the data set (only tensors, arrays and numbers go to a model by "
            "themselves), or list those that go to the model, in its order: model.inputs=[...]"
        )


class _CallPlanner:
    """Plans calls by matching one forward's signature with the entries of one kind of batch.

    Args:
        signature: The signature of the model's forward.
        widths: The result of _measure_width for each entry that may be passed.

    Attributes:
        takes_any_name: Whether the forward has `**kwargs`.
    """

    def __init__(self, signature: inspect.Signature, widths: dict[str, int]) -> None:
        parameters = list(signature.parameters.values())
        self._widths = widths
        self._keyword_names = [p.name for p in parameters if p.kind in KEYWORD_KINDS]
        self._positional_parameters = [p for p in parameters if p.kind in POSITIONAL_KINDS]
        self.takes_any_name = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        self._takes_any_number = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)

    def plan_by_signature(self, with_targets: bool) -> CallPlan:
        """Return the plan that follows from the forward's signature; see ModelCall.

        First, entries are assigned to arguments of the same name. Then, with `**kwargs` and no required
        argument left, the others are passed by name too. Otherwise inputs become the first free arguments.

        Args:
            with_targets: Whether targets are passed to the model.
        """
        rest = [key for key, width in self._widths.items() if width]
        if not with_targets:
            rest = [key for key in rest if key not in TARGET_KEYS]
        named = {key: key for key in rest if key in self._keyword_names}
        rest = [key for key in rest if key not in named]
        for key in [key for key in rest if key in TARGET_KEYS]:  # such as `label` for transformers' `labels`
            synonyms = [name for name in TARGET_KEYS if name in self._keyword_names and name not in named]
            if synonyms:
                named[synonyms[0]] = key
                rest.remove(key)
        free = [p for p in self._positional_parameters if p.name not in named]
        required = [p for p in free if p.default is Parameter.empty]
        # A forward(*args, **kwargs) gets a single entry by position.
        is_single_positional = self._takes_any_number and len(rest) <= 1
        if self.takes_any_name and not required and not is_single_positional:
            return CallPlan((), tuple((named | {key: key for key in rest}).items()))
        inputs = [key for key in rest if key not in TARGET_KEYS and not key.startswith(FIELD_PREFIX)]
        if "inputs" in inputs:
            positional = ["inputs"]
        else:  # a single entry must be the argument that the forward still needs
            is_needed = bool(required) or not named
            positional = inputs if len(inputs) == 1 and is_needed else []
        if with_targets and (positional or not inputs):
            positional = positional + [key for key in rest if key not in inputs]
        if not self._takes_any_number:
            positional = positional[: len(free)]
        if self.takes_any_name:
            named |= {key: key for key in rest if key not in positional}
        return self._assign(positional, named)

    def plan_by_list(self, input_names: Sequence[str]) -> CallPlan:
        """Return the plan that passes the entries of the recipe's list; see ModelCall."""
        named = {key: key for key in input_names if key in self._keyword_names}
        rest = [key for key in input_names if key not in named]
        if self.takes_any_name and not self._takes_any_number:
            free = [p for p in self._positional_parameters if p.name not in named]
            named |= {key: key for key in rest[len(free) :]}
            rest = rest[: len(free)]
        return self._assign(rest, named)

    def _assign(self, entries: Sequence[str], named: dict[str, str]) -> CallPlan:
        """Assign entries to the remaining arguments of the signature.

        They are passed by position if the remaining arguments are the signature's first ones, else by name.

        Args:
            entries: The entries to assign, in the order of the arguments.
            named: Entries by the arguments that they are assigned to already.
        """
        free = [p.name for p in self._positional_parameters if p.name not in named]
        width = self._widths[entries[0]] if entries else 0
        is_spread = width > 1 and (self._takes_any_number or len(free) >= width)
        first = [p.name for p in self._positional_parameters[: len(entries)]]
        if is_spread or free[: len(entries)] == first:
            return CallPlan(tuple(entries), tuple(named.items()), is_spread)
        # Entries beyond the free arguments stay positional, for a forward with `*args`.
        named = named | dict(zip(free, entries, strict=False))
        return CallPlan(tuple(entries[len(free) :]), tuple(named.items()))


def _measure_width(value: Any) -> int:
    """Return how many arguments a value may be passed as: 0 without tensors, n for n > 1 values, else 1.

    A tuple or list of n values counts as n if any of them has tensors.
    """
    if isinstance(value, Tensor):
        return 1
    if not any(True for _ in iter_tensors(value)):
        return 0
    return len(value) if isinstance(value, (tuple, list)) and len(value) > 1 else 1


class BaseObjective:
    """Base of the objectives: calls the model, with defaults for the rest of the interface."""

    means: Mapping[str, tuple[str, str]] = {}
    targets: Sequence[str] = TARGET_KEYS
    eval_weights: Mapping[str, float] = {}
    _is_first_count = True

    def __init__(self, call: ModelCall | None = None) -> None:
        self._call = call or ModelCall()

    def inputs(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """See Objective.inputs."""
        return self._call.entries(model, batch)

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Do nothing: most losses need to know nothing of the global batch."""

    def _warn_if_none_counts(self, count: Tensor, name: str) -> None:
        """Warn if no label counts, and record that the first count is over.

        Args:
            count: Number of labels that count in the first micro-batch.
            name: Entry of the batch with the labels.
        """
        self._is_first_count = False
        if not count:
            log.warning(
                "no label of the first micro-batch counts: all of %r are %d; check the data set, since "
                "nothing is learned from such labels",
                name,
                IGNORE_INDEX,
            )


def unwrap_model(model: Callable[..., Any]) -> Any:
    """Return the user's module inside the wrappers of an engine, nn.DataParallel and torch.compile.

    A wrapper is recognised by its attribute `module` and a forward that takes any arguments.
    """
    inner = getattr(model, "module", None)
    while isinstance(inner, nn.Module) and _accepts_any_arguments(model):
        model = inner
        inner = getattr(model, "module", None)
    return getattr(model, "_orig_mod", model)  # the attribute of torch.compile's wrapper


def _accepts_any_arguments(model: Any) -> bool:
    """Return whether the forward is `forward(*args, **kwargs)`, and nothing else."""
    kinds = {p.kind for p in inspect.signature(getattr(model, "forward", model)).parameters.values()}
    return kinds == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


@dataclass(frozen=True)
class IndexRange:
    """The range of valid indices into the rows of an embedding or the classes of a loss."""

    size: int
    """Number of rows or classes: indices from 0 to `size` - 1 are valid."""
    owner: str
    """Description of the indexed object, such as `embed, Embedding(...), has 3 rows`."""
    ignored: int | None = None
    """Number that is valid in addition, such as -100; `None`: there is none."""

    @property
    def description(self) -> str:
        """Description of the owner and the valid indices, for a message."""
        return f"{self.owner}: expected 0 to {self.size - 1}"


def are_probabilities(scores: Tensor) -> bool | None:
    """Return whether scores (..., C) look like probabilities; `None` if they do, but are a single row.

    One row of logits looks like probabilities once in 400. The host synchronizes with the device.
    """
    if scores.shape[-1] < 2 or not scores.numel():
        return False
    scores = scores.detach()
    has_sum_one = bool(((scores.sum(-1) - 1).abs() < 0.01).all())
    if not (has_sum_one and bool(scores.min() >= 0)):  # both are False for NaN
        return False
    num_rows = scores[..., 0].numel()
    return True if num_rows > 1 else None


PROBABILITIES_ERROR = (
    "the model's outputs are probabilities (0 or more, of sum 1), but a cross entropy takes logits and "
    "computes the softmax itself; leave the model's softmax out, or return the logarithm of its outputs"
)


class IndexChecks:
    """Checks entries of a batch against index ranges that were recorded in a first call."""

    def __init__(self) -> None:
        self._ranges: dict[str, IndexRange] = {}  # by the entry of the batch

    def check_and_record(self, batch: Batch, indices: Tensor, index_range: IndexRange) -> None:
        """Check indices, and record their range if they are an entry of the batch or a view of all of it.

        If an entry has several ranges, the smallest is used.

        Raises:
            DataError: An index is out of range.
        """
        names = [
            name
            for name, value in batch.items()
            if isinstance(value, Tensor)
            and (indices is value or (indices._base is value and indices.numel() == value.numel()))
        ]
        if len(names) == 1:
            recorded = self._ranges.get(names[0])
            if recorded is None or index_range.size < recorded.size:
                self._ranges[names[0]] = index_range
        self.check(batch)
        counted = indices if index_range.ignored is None else indices[indices != index_range.ignored]
        if not counted.numel():
            return
        lowest = int(counted.min())
        highest = int(counted.max())
        if lowest < 0 or highest >= index_range.size:
            raise DataError(f"indices are {lowest} to {highest}, but {index_range.description}")

    def check(self, batch: Batch) -> None:
        """Raise a DataError if an entry has a number outside of its recorded range."""
        for name, index_range in self._ranges.items():
            wrong = find_bad_value(batch, name, index_range.size, index_range.ignored)
            if wrong is not None:
                raise DataError(f"{name!r} has {wrong.value}, but {index_range.description}{wrong.sample}")


class FirstCallChecks:
    """Checks the first call of a model or a loss in training, and the first one in evaluation."""

    def __init__(self) -> None:
        self._by_training: dict[bool, IndexChecks] = {}  # by the model's attribute `training`

    @contextmanager
    def check_inside(self, model: Any, batch: Batch) -> Iterator[LossChecks | None]:
        """Check the inputs of layers and losses that are called inside the context.

        Only torch's own layers are checked, since a subclass may take other inputs. Compiled blocks are not
        checked, since a hook would be compiled with them. Only first calls synchronize the host with the
        device.

        Args:
            model: The user's own module, without wrappers.
            batch: The batch that the model is called with.

        Yields:
            The checks of the losses inside; `None` if this is not a first call.

        Raises:
            ModelError: A layer cannot take its input.
            DataError: A label or an index is out of range.
        """
        if not isinstance(model, nn.Module):
            yield None
            return
        if model.training in self._by_training:
            self._by_training[model.training].check(batch)
            yield None
            return
        index_checks = IndexChecks()
        self._by_training[model.training] = index_checks
        layers = dict(model.named_modules())
        if any(layer._compiled_call_impl is not None for layer in layers.values()):
            yield None
            return
        compiled_blocks = [layer for layer in layers.values() if "forward" in vars(layer)]
        compiled_ids = {id(layer) for block in compiled_blocks for layer in block.modules()}
        hooks = [
            layer.register_forward_pre_hook(partial(_check_layer, name, batch, index_checks))
            for name, layer in layers.items()
            if id(layer) not in compiled_ids
        ]
        loss_checks = LossChecks(batch, index_checks)
        # The mode is left during a compiled block: a block compiled under it is compiled again without it.
        for block in compiled_blocks:
            hooks.append(block.register_forward_pre_hook(lambda *_: loss_checks.__exit__(None, None, None)))
            hooks.append(block.register_forward_hook(lambda *_: _enter(loss_checks), always_call=True))
        try:
            with loss_checks:
                yield loss_checks
        finally:
            for hook in hooks:
                hook.remove()


def _enter(mode: TorchFunctionMode) -> None:
    mode.__enter__()


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # not SyncBatchNorm: it has all ranks' values
INPUT_WIDTHS = {
    nn.Linear: ("in_features", -1),
    nn.LSTM: ("input_size", -1),
    nn.GRU: ("input_size", -1),
    nn.RNN: ("input_size", -1),
    nn.Conv1d: ("in_channels", -2),
    nn.Conv2d: ("in_channels", -3),
    nn.Conv3d: ("in_channels", -4),
}
"""Attribute of each layer with the width that it takes, and the dimension of the input with that width."""


def _check_layer(
    name: str, batch: Batch, index_checks: IndexChecks, layer: nn.Module, args: tuple[Any, ...]
) -> None:
    """Check a layer's first argument, as a forward pre-hook.

    Raises:
        ModelError: The layer cannot take it.
        DataError: The layer is an embedding, and an index is out of range.
    """
    if not args or not isinstance(args[0], Tensor):
        return
    x = args[0]
    description = f"{name or 'the model'}, {type(layer).__name__}({layer.extra_repr()}),"
    problem = _find_misfit(layer, x)
    if problem is not None:
        dtype = str(x.dtype).removeprefix("torch.")
        raise ModelError(f"model: {description} is given {dtype} of shape {tuple(x.shape)}; {problem}")
    # DeepSpeed's embedding with a part of the vocabulary has `num_embeddings` of all words.
    # It returns zeros for an id out of range, so nothing else would report one.
    is_table = type(layer) is nn.Embedding or get_vocabulary_part(layer) is not None
    rows = getattr(layer, "num_embeddings", None) if is_table else None
    if rows is not None:
        index_checks.check_and_record(batch, x, IndexRange(rows, f"{description} has {rows} rows"))


def _find_misfit(layer: Any, x: Tensor) -> str | None:
    """Return why a layer of torch cannot take its input, as the end of a message; `None` if it can."""
    if type(layer) is nn.Embedding:
        if x.is_floating_point():
            return "expected integers: convert them in the data set, as with x.long()"
        return None
    if type(layer) in BATCH_NORMS:
        uses_batch_statistics = layer.training or layer.running_mean is None
        has_one_value_per_channel = x.dim() > 1 and x.numel() == x.shape[1] == layer.num_features
        if uses_batch_statistics and has_one_value_per_channel:
            return "one value in each channel has no variance; raise batch.micro_batch_size"
        return None
    if type(layer) not in INPUT_WIDTHS:
        return None
    if not x.is_floating_point() and not x.is_complex():
        return "expected floating-point numbers: convert them in the data set, as with x.float()"
    attribute, dimension = INPUT_WIDTHS[type(layer)]
    width = getattr(layer, attribute)
    if x.dim() >= -dimension and x.shape[dimension] == width:
        return None
    return f"expected {attribute} {width} in dimension {dimension}"


class LossChecks(TorchFunctionMode):
    """Checks the arguments of torch's losses that are called inside the context, and records their means."""

    def __init__(self, batch: Batch, index_checks: IndexChecks) -> None:
        super().__init__()
        self._batch = batch
        self._index_checks = index_checks
        self._means: list[tuple[Tensor, float]] = []  # with the number of elements of each mean

    def get_mean_divisor(self, loss: Tensor) -> float | None:
        """Return the number of elements of a mean that was computed inside the context.

        Returns:
            NaN if the elements have weights; `None` if the tensor itself is no such mean.
        """
        return next((divisor for mean, divisor in self._means if loss is mean), None)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (F.cross_entropy, F.nll_loss) and len(args) > 1:
            self._check_targets(args[0], args[1], kwargs.get("ignore_index", IGNORE_INDEX))
        if function is F.cross_entropy and args and are_probabilities(_move_classes_last(args[0])):
            raise ModelError(PROBABILITIES_ERROR)
        result = function(*args, **kwargs)
        if function in (torch.mean, Tensor.mean) or kwargs.get("reduction") == "mean":
            self._means.append((result, _get_divisor(function, args, kwargs)))
        return result

    def _check_targets(self, scores: Tensor, targets: Any, ignored: int) -> None:
        """Check class numbers against the number of classes; other targets are not checked."""
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            return
        if targets.dim() == scores.dim() - 1:
            classes = scores.shape[1 if scores.dim() > 1 else 0]
            owner = f"the scores of a cross entropy are for {classes} classes"
            index_range = IndexRange(classes, owner, ignored)
            self._index_checks.check_and_record(self._batch, targets, index_range)


def _move_classes_last(scores: Tensor) -> Tensor:
    """Return scores (samples, classes, ...) as (samples, ..., classes)."""
    return scores.movedim(1, -1) if scores.dim() > 1 else scores


def _get_divisor(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the number of elements of a mean: for a cross entropy its targets, or NaN with class weights."""
    if function not in (F.cross_entropy, F.nll_loss):
        return float(args[0].numel() if args else 1)
    scores, targets = args[:2]
    if kwargs.get("weight") is not None:
        return math.nan
    if targets.is_floating_point():
        return float(_move_classes_last(scores)[..., 0].numel())
    return float((targets != kwargs.get("ignore_index", IGNORE_INDEX)).sum())
