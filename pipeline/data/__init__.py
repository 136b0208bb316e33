"""Data of a run: `prepare_data` turns the `data` section of a recipe into a DataBundle; loader.py feeds it.

Needs no process group: every rank calls it, one per cache directory does the work, the others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.config.data_schema import DataConfig
from pipeline.data.bundle import Batch, Collate, DataBundle
from pipeline.data.custom import prepare_custom
from pipeline.data.digits import prepare_digits
from pipeline.data.images import prepare_images
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.text import prepare_text

PREPARERS: dict[str, Callable[[Any], DataBundle]] = {
    "text": prepare_text,
    "chat": prepare_text,
    "digits": prepare_digits,
    "images": prepare_images,
    "custom": prepare_custom,  # every `package.module:function`
}


def prepare_data(config: DataConfig) -> DataBundle:
    """The data a recipe names, prepared or read back from the cache.

    Raises:
        DataError: a path, file, tokenizer or function the recipe names cannot be used.
    """
    kind = "custom" if ":" in config.kind else config.kind
    return PREPARERS[kind](config)


__all__ = ["Batch", "Collate", "DataBundle", "EvalLoader", "TrainLoader", "prepare_data"]
