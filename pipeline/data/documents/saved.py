"""Folders of data sets that somebody else made, looked at before `datasets` reads what their files name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.files import DESCRIPTION_LIMIT, inside, read_plain


def read_entry(path: Path, key: str) -> list[Any]:
    """The list at `key` of a JSON file that `save_to_disk` wrote.

    Raises:
        DataError: there is none.
    """
    found: list[Any] = _read(path, lambda tree: list(tree[key]))
    return found


def own_split(folder: Path) -> str:
    """The split that a single data set was part of when it was saved; `train` where it was of none.

    Raises:
        DataError: state.json cannot be read.
    """
    name = _read(folder / "state.json", lambda tree: str(tree.get("_split") or "train"))
    return str(name).partition("[")[0]  # of train[:1000]


def _read(path: Path, entry: Callable[[Any], Any]) -> Any:
    try:
        return entry(json.loads(read_plain(path, DESCRIPTION_LIMIT)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise DataError(f"{path}: cannot be read: {reason}; write the data set again") from None


def check_saved(folder: Path) -> None:
    """Whether all files of a folder that `save_to_disk` wrote lie in it; nothing of any other folder.

    Raises:
        DataError: an index leads out of the folder, or names something else than plain files.
    """
    splits: list[Any] = []
    if (folder / "dataset_dict.json").exists():
        splits = read_entry(folder / "dataset_dict.json", "splits")
    for split in splits:
        part = inside(folder, str(split))
        if part is None:
            raise _outside(folder / "dataset_dict.json", split)
        check_saved(part)
    if splits or not (folder / "state.json").exists():
        return
    for entry in read_entry(folder / "state.json", "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else entry
        path = inside(folder, str(name))
        if path is None:
            raise _outside(folder / "state.json", name)
        if not path.is_file():
            raise DataError(f"{folder / 'state.json'}: names {str(name)[:100]!r}, which is no file there")


def check_data_files(folder: Path, subset: str | None) -> None:
    """Whether the files that `datasets` finds for a folder lie in it: its README.md may name others.

    Raises:
        DataError: one does not.
        Exception: what `datasets` raises for a folder that it cannot use.
    """
    import datasets

    files = datasets.load_dataset_builder(str(folder), subset).config.data_files or {}
    root = os.path.join(os.path.abspath(folder), "")
    for path in (str(path) for each in files.values() for path in each):
        if not os.path.abspath(path).startswith(root):
            raise _outside(folder / "README.md", path)


def _outside(index: Path, name: object) -> DataError:
    return DataError(
        f"{index}: points outside of its folder: {str(name)[:100]!r}; only what lies in it is read"
    )
