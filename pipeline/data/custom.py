"""Data of the user's own: a function of theirs, called once for each split."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from pipeline.config.data_schema import SOURCE_NAME, CustomDataConfig
from pipeline.data.bundle import DataBundle, collate_items
from pipeline.errors import DataError
from pipeline.importing import import_object


def prepare_custom(config: CustomDataConfig) -> DataBundle:
    """Calls `function("train", **args)` and `function("eval", **args)`.

    For `"eval"` it may return a dict of data sets by name; `eval/loss` is then the mean over all of them.
    `collate`, `vocab_size`, `num_classes` and `num_channels` of the training set are used where it has them.

    Raises:
        DataError: nothing to call at the path, arguments that do not fit, or no data set of known length
            returned. What the function itself raises keeps its type and traceback.
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
                "a name is letters, digits and _ . -"
            )
        check_dataset(dataset, '"eval"' if len(held_out) == 1 else f'"eval" ({name})', config)
    return DataBundle(
        train=train,
        eval=held_out,
        collate=getattr(train, "collate", collate_items),
        tokenizer=None,
        vocab_size=getattr(train, "vocab_size", None),
        num_classes=getattr(train, "num_classes", None),
        num_channels=getattr(train, "num_channels", None),
        fingerprint=f"{config.kind}-{len(train)}",
    )


def call_for_split(function: Callable[..., Any], split: str, config: CustomDataConfig) -> Any:
    """What the function returns for `split`."""
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
            raise DataError(
                f"data.kind {config.kind}: {name}{signature} cannot be called with ({given}): {mismatch}; "
                "change data.args"
            ) from None
    return function(split, **config.args)


def check_dataset(dataset: Any, role: str, config: CustomDataConfig) -> None:
    """Whether it can be loaded.

    Raises:
        DataError: no map-style data set, or one without a sample.
    """
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f"data.kind {config.kind}: returned a {type(dataset).__name__} for {role}, which has no "
            f"{' and no '.join(missing)}; expected a map-style torch Dataset"
        )
    if len(dataset) == 0:
        raise DataError(f"data.kind {config.kind}: the data set for {role} is empty")
