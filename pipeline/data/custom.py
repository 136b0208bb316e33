"""Custom data: calls the user's function once for each split, and checks what it returns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from pipeline.config.data_schema import SOURCE_NAME, CustomDataConfig
from pipeline.config.import_paths import exit_as_error, import_object
from pipeline.data.batches import collate_items
from pipeline.data.bundle import Collate, DataBundle
from pipeline.data.random_numbers import isolate_random_numbers
from pipeline.errors import DataError

# Kinds of parameters that take a positional argument.
POSITIONAL_KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)


def prepare_custom(config: CustomDataConfig) -> DataBundle:
    """Return the data sets from `function("train", **args)` and `function("eval", **args)`.

    For `"eval"` the function may return a dict of data sets by name; `eval/loss` is then the mean over all of
    them. If it returns `None`, there is no evaluation. The attributes `collate_fn` (or `collate`),
    `vocab_size`, `num_classes` and `num_channels` of the training set are used if it has them. For a Subset,
    the attributes of the underlying data set are used.

    Raises:
        DataError: There is no such function, the arguments do not fit, it did not return map-style data sets
            with samples, or a name or the collate function is invalid. An exception of the function itself
            keeps its type and traceback.
    """
    function = import_object(config.kind, DataError)
    train = call_for_split(function, "train", config)
    if train is None:
        raise DataError(f'data.kind {config.kind}: returned None for "train"; expected a data set')
    check_dataset(train, '"train"', config)
    held_out = call_for_split(function, "eval", config)
    if not isinstance(held_out, dict):
        held_out = {} if held_out is None else {"eval": held_out}
    for name, dataset in held_out.items():
        if not isinstance(name, str) or not re.match(SOURCE_NAME, name):
            raise DataError(
                f'data.kind {config.kind}: the "eval" data sets are called {", ".join(map(repr, held_out))}; '
                "a name may have letters, digits and _ . -"
            )
        check_dataset(dataset, '"eval"' if len(held_out) == 1 else f'"eval" ({name})', config)
    return DataBundle(
        train=train,
        eval=held_out,
        collate=_find_collate(train, config),
        tokenizer=None,
        vocab_size=_find_attribute(train, "vocab_size"),
        num_classes=_find_attribute(train, "num_classes"),
        num_channels=_find_attribute(train, "num_channels"),
        fingerprint=f"{config.kind}-{len(train)}",
    )


def call_for_split(function: Callable[..., Any], split: str, config: CustomDataConfig) -> Any:
    """Call the user's function for `split`, `train` or `eval`, and return its result.

    The function draws the same random numbers on every rank and after a restart. The generators' states are
    restored afterwards.

    Raises:
        DataError: The function does not take these arguments, or it calls `sys.exit`.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a callable written in C may have none
        signature = None
    if signature is not None:
        try:
            signature.bind(split, **config.args)
        except TypeError as mismatch:
            name = config.kind.partition(":")[2]
            given = ", ".join([f'"{split}"', *config.args])
            takes_split = any(each.kind in POSITIONAL_KINDS for each in signature.parameters.values())
            if takes_split:
                advice = "change data.args"
            else:
                advice = f'it is called as {name}("{split}"): write def {name}(split)'
            raise DataError(
                f"data.kind {config.kind}: {name}{signature} cannot be called with ({given}): {mismatch}; "
                f"{advice}"
            ) from None
    with (
        isolate_random_numbers(0 if split == "train" else 1),
        exit_as_error(f"data.kind {config.kind}", DataError),
    ):
        return function(split, **config.args)


def check_dataset(dataset: Any, role: str, config: CustomDataConfig) -> None:
    """Check that `dataset` is a map-style data set with samples.

    Args:
        dataset: What the user's function returned.
        role: Split of the data set for messages, such as `"train"` (with the quotes).
        config: Configuration that names the function.

    Raises:
        DataError: It is not map-style, or it is empty. An exception of the user's `__len__` keeps its type
            and traceback.
    """
    start = f"data.kind {config.kind}: returned a {type(dataset).__name__} for {role}"
    expected = "expected a map-style torch Dataset: samples by index, and their number"
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        is_loader = isinstance(dataset, DataLoader)
        hint = ": return the data set, and the batches are made for you" if is_loader else ""
        raise DataError(f"{start}, which has no {' and no '.join(missing)}; {expected}{hint}")
    is_data_frame = type(dataset).__name__ == "DataFrame"  # of pandas or polars, which are not imported
    if is_data_frame or isinstance(dataset, (IterableDataset, Mapping, tuple, str)):
        raise DataError(f"{start}; {expected} (of tensors: TensorDataset(x, y); or a list of samples)")
    try:
        length = len(dataset)
    except (TypeError, ValueError, OverflowError) as error:
        # A second frame in the traceback belongs to the user's __len__: the exception came from its code.
        is_raised_by_len = error.__traceback__ is None or error.__traceback__.tb_next is not None
        if is_raised_by_len:
            raise
        raise DataError(
            f"data.kind {config.kind}: len() of the data set for {role}: {error}; its __len__ must "
            "return the number of samples"
        ) from None
    if length == 0:
        raise DataError(f"data.kind {config.kind}: the data set for {role} is empty")


def _find_attribute(dataset: Any, name: str) -> Any:
    """Return an attribute of the data set, or of the data set under a Subset; `None` if there is none."""
    while not hasattr(dataset, name) and isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, name, None)


def _find_collate(dataset: Any, config: CustomDataConfig) -> Collate:
    """Return the collate function of the recipe, else of the data set, else the one that stacks samples.

    Raises:
        DataError: `data.collate_fn` names no function, or the function does not take a list of samples.
    """
    collate = _find_attribute(dataset, "collate_fn") or _find_attribute(dataset, "collate")
    where = f"data.kind {config.kind}: the data set's collate_fn"
    if config.collate_fn is not None:
        collate = import_object(config.collate_fn, DataError)
        where = f"data.collate_fn: {config.collate_fn}"
    if collate is None:
        return collate_items
    if not callable(collate):
        raise DataError(f"{where} is a {type(collate).__name__}; expected a function of a list of samples")
    try:
        inspect.signature(collate).bind([])
    except TypeError as mismatch:
        raise DataError(
            f"{where}{inspect.signature(collate)} cannot be called with a list of samples: {mismatch} (if "
            "it is defined in a class, write @staticmethod or the parameter self)"
        ) from None
    except ValueError:
        pass  # a callable written in C may have no signature
    checked: Collate = collate
    return checked
