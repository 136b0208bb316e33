"""Data of the user's own: a function of theirs, called once for each split."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pipeline.config.schema import CustomDataConfig
from pipeline.data.bundle import DataBundle, collate_items
from pipeline.errors import DataError
from pipeline.importing import import_object


def prepare_custom(config: CustomDataConfig) -> DataBundle:
    """Calls `function("train", **args)` and `function("eval", **args)`.

    `collate`, `vocab_size` and `num_classes` of the training set are used where it has them.

    Raises:
        DataError: nothing to call at the path, arguments that do not fit, or no data set of known length
            returned. What the function itself raises keeps its type and traceback.
    """
    function = import_object(config.kind, DataError)
    train = call_for_split(function, "train", config)
    if train is None:
        raise DataError(f'data.kind {config.kind}: returned None for "train"; expected a data set')
    evaluation = call_for_split(function, "eval", config)
    return DataBundle(
        train=train,
        eval=evaluation,
        collate=getattr(train, "collate", collate_items),
        tokenizer=None,
        vocab_size=getattr(train, "vocab_size", None),
        num_classes=getattr(train, "num_classes", None),
        fingerprint=f"{config.kind}-{len(train)}",
    )


def call_for_split(function: Callable[..., Any], split: str, config: CustomDataConfig) -> Any:
    """What the function returns for `split`: a data set with at least one sample, or None."""
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
    dataset = function(split, **config.args)
    if dataset is None:
        return None
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f'data.kind {config.kind}: returned a {type(dataset).__name__} for "{split}", which has no '
            f"{' and no '.join(missing)}; expected a map-style torch Dataset"
        )
    if len(dataset) == 0:
        raise DataError(f'data.kind {config.kind}: the data set for "{split}" is empty')
    return dataset
