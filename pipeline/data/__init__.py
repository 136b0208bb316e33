"""Data of a run: `prepare_data` turns the `data` section of a recipe into a DataBundle; loader.py feeds it.

Needs no process group: every rank calls it, one per cache directory does the work, the others wait.
What needs torch is imported when it is asked for: processes that tokenise go without (2 s and 300 MB each).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pipeline.config.data_schema import DataConfig
from pipeline.data.prepared.pool import exit_if_imported
from pipeline.distributed.progress import Phase, phase

if TYPE_CHECKING:
    from pipeline.data.bundle import DataBundle

PREPARERS = {
    "text": ("text", "prepare_text"),
    "chat": ("text", "prepare_text"),
    "preference": ("text", "prepare_text"),
    "digits": ("digits", "prepare_digits"),
    "images": ("images", "prepare_images"),
    "custom": ("custom", "prepare_custom"),  # every `package.module:function`
}


@phase(Phase.DATA)
def prepare_data(config: DataConfig) -> DataBundle:
    """Return the data a recipe names, prepared or read back from the cache.

    Raises:
        DataError: a path, file, tokenizer or function the recipe names cannot be used.
    """
    exit_if_imported()
    module, function = PREPARERS["custom" if ":" in config.kind else config.kind]
    bundle: DataBundle = getattr(import_module(f"pipeline.data.{module}"), function)(config)
    return bundle
