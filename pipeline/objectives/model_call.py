"""Which entries of a batch go to the model, and how: by the recipe's list, or by the forward's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn

from pipeline.data.batches import FURTHER, shown, tensors
from pipeline.errors import DataError, ModelError
from pipeline.models.document_attention import BOUNDS
from pipeline.models.neftune import KEYS
from pipeline.models.of_transformers import is_model
from pipeline.objectives.first_calls import FirstCalls
from pipeline.objectives.interface import TARGET_KEYS, Batch, GlobalBatch, Objective

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

    @property
    def entries(self) -> frozenset[str]:
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
        kinds = tuple((key, _arity(value)) for key, value in batch.items())
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
    ahead: Objective | None = None

    def __init__(self, call: ModelCall | None = None) -> None:
        self._call = call or ModelCall()

    def inputs(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """See Objective.inputs."""
        return self._call.entries(model, batch)

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective.prepare_step: nothing."""

    def hear(self, mean: float) -> None:
        """See Objective.hear: nothing."""


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
