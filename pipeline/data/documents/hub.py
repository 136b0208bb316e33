"""Reads Hugging Face datasets: folders from `save_to_disk`, folders of data files, and names on the hub.

Code that comes with a data set is never run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.data_schema import SourceConfig
from pipeline.data.documents.pieces import hash_file
from pipeline.data.documents.readers import ROWS_AT_ONCE, iter_table_records
from pipeline.data.documents.records import BadRecordPolicy, Record, SourcePiece
from pipeline.data.documents.streams import DigestCache, hash_json
from pipeline.errors import DataError, summarize_error
from pipeline.files import MAX_DESCRIPTION_BYTES, find_path_inside, is_path, read_regular_file

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

# Files that `save_to_disk` writes.
SPLITS = "dataset_dict.json"
STATE = "state.json"


def load_split(
    name: str, split: str, *, subset: str | None = None, revision: str | None = None, streaming: bool = False
) -> Dataset | IterableDataset:
    """Load a split from a folder that `save_to_disk` wrote, a folder of data files, or the hub.

    If the hub does not answer, `datasets` uses its cache on this machine.

    Raises:
        DataError: The data set cannot be found or loaded, has no such split, or refers to files outside of
            its folder.
    """
    import datasets

    folder = Path(name).expanduser()
    if is_path(name) and not folder.exists():
        raise DataError(f"data dataset {name}: there is no such folder")
    saved = _find_saved_split(folder, split)
    try:
        if saved is not None:
            return datasets.load_from_disk(str(saved))
        if folder.is_dir():
            _check_data_files(folder, subset)
        return datasets.load_dataset(
            str(folder) if folder.is_dir() else name,
            subset,
            split=split,
            revision=None if folder.is_dir() else revision,
            streaming=streaming,
        )
    except DataError:
        raise
    except Exception as error:  # `datasets` raises plain Exception as well
        where = "" if folder.is_dir() else ", and there is no folder of that name"
        raise DataError(
            f"data dataset {name}: cannot be loaded{' from the hub' if where else ''}: "
            f"{summarize_error(error, 300)}{where}"
        ) from error


def _find_saved_split(folder: Path, split: str) -> Path | None:
    """Return the folder of one split that `save_to_disk` wrote; `None` if it did not write `folder`."""
    if (folder / SPLITS).is_file():
        splits = [str(name) for name in _read_list(folder / SPLITS, "splits")[0]]
        if split not in splits:
            raise DataError(f"data dataset {folder}: has no split {split!r}; its splits: {', '.join(splits)}")
        folder = _resolve_inside(folder, split, SPLITS)
    elif not (folder / STATE).is_file():
        return None
    else:
        # A slice such as `train[:1000]` belongs to train, and so does a data set without a split.
        own = str(_read_list(folder / STATE, "_data_files")[1].get("_split") or "train").partition("[")[0]
        if own != split:
            raise DataError(f"data dataset {folder}: has only the split {own!r}; write split: {own}")
    files, _ = _read_list(folder / STATE, "_data_files")
    if not files:
        raise DataError(f"data dataset {folder}: has no rows")
    for entry in files:
        name = entry.get("filename") if isinstance(entry, dict) else entry
        if not _resolve_inside(folder, str(name), STATE).is_file():
            raise DataError(
                f"{folder / STATE}: names {str(name)[:100]!r}, which is no file there; write the data "
                "set again"
            )
    return folder


def _read_list(path: Path, key: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the list at a key of a JSON file, and the whole object."""
    try:
        tree = json.loads(read_regular_file(path, MAX_DESCRIPTION_BYTES))
        return list(tree[key]), tree
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise DataError(f"{path}: cannot be read: {reason}; write the data set again") from None


def _check_data_files(folder: Path, subset: str | None) -> None:
    """Raise DataError if `datasets` would read files outside of the folder, as a README.md can ask for."""
    import datasets

    files = datasets.load_dataset_builder(str(folder), subset).config.data_files or {}
    root = os.path.join(os.path.abspath(folder), "")
    for path in (str(path) for each in files.values() for path in each):
        if not os.path.abspath(path).startswith(root):
            raise _outside_error(folder / "README.md", path)


def _resolve_inside(folder: Path, name: str, index: str) -> Path:
    path = find_path_inside(folder, name)
    if path is None:
        raise _outside_error(folder / index, name)
    return path


def _outside_error(index: Path, name: object) -> DataError:
    return DataError(
        f"{index}: points outside of its folder: {str(name)[:100]!r}; only files in the folder are read: "
        "move the file there"
    )


@dataclass(frozen=True)
class RowsPiece:
    """Rows `start` to `end` (exclusive) of a data set whose files are memory-mapped."""

    name: str
    dataset: Dataset
    start: int
    end: int
    digest: str
    size: int

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield a dict for each row; values are as stored, so an image is its encoded bytes."""
        rows = self.dataset.with_format("arrow").select(range(self.start, self.end))
        if field is not None and field in rows.column_names:
            rows = rows.select_columns([field])
        number = self.start + 1
        for table in rows.iter(ROWS_AT_ONCE):
            yield from iter_table_records(table, self.name, number)
            number += table.num_rows


@dataclass(frozen=True)
class ShardPiece:
    """A shard of a data set that is streamed over the network."""

    name: str
    dataset: IterableDataset
    digest: str
    size: int

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield a dict for each row.

        Raises:
            DataError: The network fails, or a file of the data set cannot be read.
        """
        wanted = field is not None and field in (self.dataset.column_names or [])
        rows = iter(self.dataset.select_columns([field]) if wanted else self.dataset)
        for number in count(1):
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # raised by any of the libraries that fetch and decode
                raise DataError(
                    f"{self.name}: reading row {number} failed: {summarize_error(error, 300)}"
                ) from error
            yield f"{self.name}: row {number}", row


def split_dataset(source: SourceConfig, digests: DigestCache, size: int) -> Sequence[SourcePiece]:
    """Return the source's data set in pieces of about `size` bytes; a streaming data set in its shards.

    A piece's digest covers the files of the data set, and the rows or shard. For a data set that streams from
    the hub, it covers the commit in place of the files.

    Raises:
        DataError: The data set cannot be found or loaded, has no such split, or has no rows.
    """
    assert source.dataset is not None
    dataset = load_split(
        source.dataset,
        source.split,
        subset=source.subset,
        revision=source.revision,
        streaming=source.streaming,
    )
    name = f"{source.dataset} ({source.split})"
    if hasattr(dataset, "num_rows"):
        return _split_rows(name, dataset, digests, size)
    return _list_shards(name, dataset, source, digests)


def _split_rows(name: str, dataset: Dataset, digests: DigestCache, size: int) -> list[RowsPiece]:
    if dataset.num_rows == 0:
        raise DataError(f"data dataset {name}: has no rows")
    files = [file["filename"] for file in dataset.cache_files]
    content = _hash_files(files, digests) or [dataset._fingerprint]  # a data set in memory has no files
    step = max(1, size * dataset.num_rows // max(1, dataset.data.nbytes))
    pieces = []
    for start in range(0, dataset.num_rows, step):
        end = min(start + step, dataset.num_rows)
        digest = hash_json([*content, dataset.num_rows, str(dataset.split), start, end])
        length = dataset.data.nbytes * (end - start) // dataset.num_rows
        pieces.append(RowsPiece(name=name, dataset=dataset, start=start, end=end, digest=digest, size=length))
    return pieces


def _list_shards(
    name: str, dataset: IterableDataset, source: SourceConfig, digests: DigestCache
) -> list[ShardPiece]:
    folder = Path(str(source.dataset)).expanduser()
    if folder.is_dir():
        files = sorted(str(file) for file in folder.rglob("*") if file.is_file())
        content = _hash_files(files, digests)
    else:
        content = [str(source.dataset), _read_commit(str(source.dataset), source.revision)]
    length = dataset.info.dataset_size or 0
    shards = dataset.num_shards
    return [
        ShardPiece(
            f"{name}, shard {index + 1} of {shards}",
            dataset.shard(num_shards=shards, index=index),
            hash_json([*content, source.subset, source.split, index, shards]),
            length // shards,
        )
        for index in range(shards)
    ]


def _hash_files(files: list[str], digests: DigestCache) -> list[str]:
    found = digests.get_or_compute(files, "content", hash_file)
    return [found[file][1][1] for file in files]


def _read_commit(name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    except Exception as error:  # the network, a proxy or a certificate can raise anything
        raise DataError(
            f"data dataset {name}: the hub does not answer: {summarize_error(error, 300)}"
        ) from None
