"""Imports the user's own code by an import path of the recipe, `package.module:function`.

Data, models, objectives, optimizers, callbacks and trackers use it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, summarize_error


def import_object(path: str, error: type[PipelineError]) -> Callable[..., Any]:
    """Return the callable at `path`. Modules in the current directory can be imported.

    Side effect: append the current directory to `sys.path`. Since it is last there, it hides no installed
    package.

    Args:
        path: `package.module:function`.
        error: Class of the error to raise.

    Raises:
        PipelineError: As `error`; the path names nothing that can be called, or its module imports a package
            that is not installed or ends the program. Any other exception of the user's module propagates.
    """
    module_name, separator, name = path.partition(":")
    if not (separator and module_name and name):
        raise error(f"{path!r} is no import path: expected `package.module:function`")
    if (advice := suggest_import_path(path)) is not None:
        raise error(f"{path}: {advice}")
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        sys.path.append(directory)
    importlib.invalidate_caches()
    try:
        with exit_as_error(f"{path}: importing {module_name}", error):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None:
            raise
        if not f"{module_name}.".startswith(f"{missing.name}."):
            problem = (
                f"{_format_origin(missing)} imports {missing.name!r}, which is not installed; install it in "
                "this environment"
            )
        else:
            hint = _find_hidden_file(module_name, directory)
            problem = f"there is no module {missing.name!r} in {directory} or installed{hint}"
        raise error(f"{path}: {problem}") from None
    attribute = getattr(module, name, None)
    if inspect.iscoroutinefunction(attribute) or inspect.isasyncgenfunction(attribute):
        raise error(f"{path} is an async function; write def in place of async def")
    if callable(attribute):
        return attribute
    hint = _find_hidden_file(module_name, directory)
    start = f"{path}: module {module_name!r} ({getattr(module, '__file__', 'built in')})"
    if attribute is not None:
        kind = type(attribute).__name__
        raise error(f"{start} has {name!r}, but it is a {kind}, which is not callable{hint}")
    names = [key for key, value in vars(module).items() if callable(value)]
    near = difflib.get_close_matches(name, names, n=1)
    if near and not hint:
        hint = f"; did you mean {near[0]!r}?"
    raise error(f"{start} has no {name!r}{hint}")


def check_signature(
    function: Callable[..., Any], message: str, error: type[PipelineError], /, *args: Any, **named: Any
) -> None:
    """Check that a function of the user can be called with these arguments.

    Args:
        function: Function to check. One without a signature, such as some written in C, is accepted.
        message: Beginning of the error, before the reason.
        error: Class of the error to raise.
        *args: Positional arguments of the call.
        **named: Keyword arguments of the call.

    Raises:
        PipelineError: As `error`; the arguments do not fit the signature.
    """
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError as misfit:
        raise error(f"{message}: {misfit}") from None
    except ValueError:
        pass  # no signature


def suggest_import_path(text: str) -> str | None:
    """Return advice if the text is the path of a file, `folder/file.py:name`; else `None`.

    The advice has the import path to write, and the folder in which to start.
    """
    module_name, _, name = text.partition(":")
    if not name or not (module_name.endswith(".py") or "/" in module_name):
        return None
    file = Path(module_name).with_suffix("")
    folder = file.parent if file.is_absolute() or ".." in file.parts else Path()
    module = ".".join(file.relative_to(folder).parts)
    return f"is the path of a file; write {module}:{name}, and start in {folder.absolute()}"


@contextmanager
def exit_as_error(what: str, error: type[PipelineError]) -> Iterator[None]:
    """Turn `sys.exit` in the user's code into an error, since it would end the run with that exit code.

    Args:
        what: Description of the code, for the message.
        error: Class of the error to raise in place of SystemExit.

    Raises:
        PipelineError: As `error`; the body raised SystemExit.
    """
    try:
        yield
    except SystemExit as exit_request:
        raise error(
            f"{what} ended the program (SystemExit: {exit_request.code}); put its script part under "
            'if __name__ == "__main__":'
        ) from None


@contextmanager
def errors_in_one_line(what: str, error: type[PipelineError]) -> Iterator[None]:
    """Turn an exception of the user's code into a one-line error with file and line.

    Args:
        what: Description of the code, for the message.
        error: Class of the error to raise in place of the exception.

    Raises:
        PipelineError: As `error`; the body raised an exception. A PipelineError of the body propagates.
    """
    try:
        with exit_as_error(what, error):
            yield
    except PipelineError:
        raise
    except Exception as raised:
        name = type(raised).__name__
        raise error(f"{what} raised {name}: {summarize_error(raised)} ({_format_origin(raised)})") from None


def _format_origin(raised: Exception) -> str:
    """Return `file:line` of the innermost call in a file, or of the import that failed."""
    frames = traceback.extract_tb(raised.__traceback__)
    # Names such as <frozen importlib._bootstrap> are not files.
    last = next(frame for frame in reversed(frames) if not frame.filename.startswith("<"))
    name = last.filename
    if Path(name).is_relative_to(os.getcwd()):
        name = os.path.relpath(name)
    return f"{name}:{last.lineno}"


def _find_hidden_file(module_name: str, directory: str) -> str:
    """Return a hint if an installed or standard module hides a file of the user with the same name.

    The hint is empty if no file is hidden.
    """
    top = module_name.partition(".")[0]
    module = sys.modules.get(top)
    if module is None:
        return ""
    paths = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    imported = [Path(path).resolve() for path in paths if path]
    for name in (f"{top}.py", top):
        path = Path(directory, name).resolve()
        is_imported = any(imported_path.is_relative_to(path) for imported_path in imported)
        if path.exists() and not is_imported:
            kind = "file" if path.is_file() else "folder"
            return f"; ./{name} is hidden by it: rename your {kind}"
    return ""
