"""Prepares the data of a run: `prepare_data` turns the `data` section of a recipe into a DataBundle.

Every rank calls `prepare_data` before the process group exists. The rank that gets the file lock prepares the
data. The others wait for the lock, not in a collective with a timeout.

Modules that need torch are imported on demand, which saves a process that only tokenises 2 s and 300 MB.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pipeline.config.data_schema import DataConfig
from pipeline.data.prepared.pool import exit_if_imported
from pipeline.distributed.progress import Phase, tag_errors

if TYPE_CHECKING:
    from pipeline.data.bundle import DataBundle

# Kind of data -> module and function that prepare it.
PREPARERS = {
    "text": ("text", "prepare_text"),
    "chat": ("text", "prepare_text"),
    "preference": ("text", "prepare_text"),
    "digits": ("digits", "prepare_digits"),
    "images": ("images", "prepare_images"),
    "custom": ("custom", "prepare_custom"),  # any `package.module:function`
}


@tag_errors(Phase.DATA)
def prepare_data(config: DataConfig) -> DataBundle:
    """Return the data that a recipe names, newly prepared or read from the cache.

    Exits if a worker process calls this while it imports a script without a `__main__` guard.

    Raises:
        DataError: A path, file, tokenizer or function that the recipe names cannot be used.
    """
    exit_if_imported()
    module, function = PREPARERS["custom" if ":" in config.kind else config.kind]
    bundle: DataBundle = getattr(import_module(f"pipeline.data.{module}"), function)(config)
    return bundle
