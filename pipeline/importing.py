"""Turns an import path of a recipe, `package.module:function`, into the object it names.

Shared by data/, models/ and objectives: everything a user may bring as code of their own.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from pipeline.errors import PipelineError


def import_object(path: str, error: type[PipelineError]) -> Callable[..., Any]:
    """The callable at `path`; the current working directory is importable.

    The directory is put last on `sys.path`, so that nothing in it can hide an installed package.

    Args:
        path: `package.module:function`.
        error: What to raise where the path names nothing that can be called.

    Raises:
        PipelineError: as `error`; an exception from inside the user's module stays as it is.
    """
    module_name, separator, name = path.partition(":")
    if not (separator and module_name and name):
        raise error(f"{path!r} is no import path: expected `package.module:function`")
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        sys.path.append(directory)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        parts = module_name.split(".")
        own = {".".join(parts[: depth + 1]) for depth in range(len(parts))}
        if missing.name not in own:
            raise  # the module is there, something it imports is not
        raise error(f"{path}: there is no module {missing.name!r} in {directory} or installed") from None
    found = getattr(module, name, None)
    if callable(found):
        return found
    where = f"{path}: module {module_name!r} ({getattr(module, '__file__', 'built in')})"
    if found is not None:
        raise error(f"{where} has {name!r}, but it is a {type(found).__name__}, not something to call")
    close = difflib.get_close_matches(
        name, [key for key, value in vars(module).items() if callable(value)], n=1
    )
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise error(f"{where} has no {name!r}{hint}")
