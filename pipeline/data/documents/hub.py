"""Reads Hugging Face data sets: folders from `save_to_disk`, folders of data files, and names on the hub.

Python code in a data set's folder or repository is never run.
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

# Files that `save_to_disk` writes: the list of splits, and the list of a split's data files.
SPLITS_FILE = "dataset_dict.json"
STATE_FILE = "state.json"


def load_split(
    name: str, split: str, *, subset: str | None = None, revision: str | None = None, streaming: bool = False
) -> Dataset | IterableDataset:
    """Load a split from a folder that `save_to_disk` wrote, a folder of data files, or the hub.

    If the hub does not answer, `datasets` uses its cache on this machine.

    Args:
        name: Path of the folder, or name on the hub.
        split: Name of the split; except from `save_to_disk` also a slice such as `train[:1000]`.
        subset: Name of the data set's configuration; `None` for the default one.
        revision: Branch, tag or commit on the hub; `None` for the main branch.
        streaming: Whether to fetch rows when they are read, without a download before.

    Returns:
        A Dataset of memory-mapped files; an IterableDataset with `streaming`, except from `save_to_disk`.

    Raises:
        DataError: The data set cannot be found or loaded, has no such split, or refers to files outside of
            its folder.
    """
    import datasets

    folder = Path(name).expanduser()
    if is_path(name) and not folder.exists():
        raise DataError(f"dataset {name}: there is no such folder")
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
        reason = summarize_error(error, 300)
        if folder.is_dir():
            raise DataError(f"dataset {name}: cannot be loaded: {reason}") from error
        raise DataError(
            f"dataset {name}: cannot be loaded from the hub: {reason}, and there is no folder of that name"
        ) from error


def _find_saved_split(folder: Path, split: str) -> Path | None:
    """Return the folder of a split that `save_to_disk` wrote; `None` if it did not write `folder`.

    Raises:
        DataError: There is no such split, it has no rows, or its files are missing or outside of the folder.
    """
    if (folder / SPLITS_FILE).is_file():
        entries, _ = _read_list(folder / SPLITS_FILE, "splits")
        splits = [str(name) for name in entries]
        if split not in splits:
            raise DataError(f"dataset {folder}: has no split {split!r}; its splits: {', '.join(splits)}")
        folder = _resolve_inside(folder, split, SPLITS_FILE)
    elif not (folder / STATE_FILE).is_file():
        return None
    else:
        _, state = _read_list(folder / STATE_FILE, "_data_files")
        # A slice such as `train[:1000]` belongs to train, and so does a data set without a split.
        saved_split = str(state.get("_split") or "train").partition("[")[0]
        if saved_split != split:
            raise DataError(
                f"dataset {folder}: has only the split {saved_split!r}; write split: {saved_split}"
            )
    files, _ = _read_list(folder / STATE_FILE, "_data_files")
    if not files:
        raise DataError(f"dataset {folder}: has no rows")
    for entry in files:
        name = entry.get("filename") if isinstance(entry, dict) else entry
        if not _resolve_inside(folder, str(name), STATE_FILE).is_file():
            raise DataError(
                f"{folder / STATE_FILE}: names {str(name)[:100]!r}, which is not a file in the folder; write "
                "the data set again"
            )
    return folder


def _read_list(path: Path, key: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the list at a key of a JSON file, and the file's entire object.

    Raises:
        DataError: The file cannot be read, or it has no such list.
    """
    try:
        content = json.loads(read_regular_file(path, MAX_DESCRIPTION_BYTES))
        return list(content[key]), content
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise DataError(f"{path}: cannot be read: {reason}; write the data set again") from None


def _check_data_files(folder: Path, subset: str | None) -> None:
    """Raise DataError if `datasets` would read files outside of the folder, which a README.md can name."""
    import datasets

    files = datasets.load_dataset_builder(str(folder), subset).config.data_files or {}
    root = os.path.join(os.path.abspath(folder), "")
    paths = [str(path) for paths_of_split in files.values() for path in paths_of_split]
    for path in paths:
        if not os.path.abspath(path).startswith(root):
            raise _make_outside_error(folder / "README.md", path)


def _resolve_inside(folder: Path, name: str, index: str) -> Path:
    """Return the path of a file in a folder.

    Args:
        folder: The folder.
        name: Relative path of the file, from untrusted content.
        index: Name of the file in the folder that has this content, for the message.

    Raises:
        DataError: The path is outside of the folder.
    """
    path = find_path_inside(folder, name)
    if path is None:
        raise _make_outside_error(folder / index, name)
    return path


def _make_outside_error(index: Path, name: object) -> DataError:
    """Return the error for a path outside of the folder; `index` is the file that names the path."""
    return DataError(
        f"{index}: points outside of its folder: {str(name)[:100]!r}; only files in the folder are read: "
        "move the file there"
    )


@dataclass(frozen=True)
class RowsPiece:
    """Range of rows of a data set whose files are memory-mapped.

    Attributes:
        name: Name of the data set and split for messages.
        dataset: The data set.
        start: First row, from 0.
        end: End of the rows (exclusive).
        digest: See `split_dataset`.
        size: Bytes of the rows in memory, by the mean size of a row.
    """

    name: str
    dataset: Dataset
    start: int
    end: int
    digest: str
    size: int

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield (location, dict) of each row; values are as stored, so an image is its encoded bytes."""
        rows = self.dataset.with_format("arrow").select(range(self.start, self.end))
        if field is not None and field in rows.column_names:
            rows = rows.select_columns([field])
        number = self.start + 1
        for table in rows.iter(ROWS_AT_ONCE):
            yield from iter_table_records(table, self.name, number)
            number += table.num_rows


@dataclass(frozen=True)
class ShardPiece:
    """Shard of a data set whose rows are fetched or read while they are used.

    Attributes:
        name: Name of the data set, split and shard for messages.
        dataset: The rows of the shard.
        digest: See `split_dataset`.
        size: Bytes of the shard, by the mean size of a shard; 0 if not known.
    """

    name: str
    dataset: IterableDataset
    digest: str
    size: int

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield (location, dict) of each row.

        Raises:
            DataError: The network fails, or a file of the data set cannot be read.
        """
        has_field = field is not None and field in (self.dataset.column_names or [])
        rows = iter(self.dataset.select_columns([field]) if has_field else self.dataset)
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
    """Divide the data set of a source: into ranges of rows, or with `streaming` into its shards.

    The digest of a piece is a hash of the contents of all files of the data set, and of the range of rows or
    the number of the shard. For a data set that streams from the hub, the commit stands for the contents.

    Args:
        source: Source with a `dataset`.
        digests: Cache of the files' digests.
        size: Approximate size of a range of rows in bytes.

    Raises:
        DataError: The data set cannot be found or loaded, has no such split, or has no rows, or the hub does
            not answer.
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
    """Divide a memory-mapped data set into ranges of rows of about `size` bytes."""
    if dataset.num_rows == 0:
        raise DataError(f"dataset {name}: has no rows")
    files = [file["filename"] for file in dataset.cache_files]
    content = _hash_files(files, digests) or [dataset._fingerprint]  # a data set in memory has no files
    rows_per_piece = max(1, size * dataset.num_rows // max(1, dataset.data.nbytes))
    pieces = []
    for start in range(0, dataset.num_rows, rows_per_piece):
        end = min(start + rows_per_piece, dataset.num_rows)
        piece = RowsPiece(
            name=name,
            dataset=dataset,
            start=start,
            end=end,
            digest=hash_json([*content, dataset.num_rows, str(dataset.split), start, end]),
            size=dataset.data.nbytes * (end - start) // dataset.num_rows,
        )
        pieces.append(piece)
    return pieces


def _list_shards(
    name: str, dataset: IterableDataset, source: SourceConfig, digests: DigestCache
) -> list[ShardPiece]:
    """Return the shards of a streaming data set."""
    folder = Path(str(source.dataset)).expanduser()
    if folder.is_dir():
        files = sorted(str(file) for file in folder.rglob("*") if file.is_file())
        content = _hash_files(files, digests)
    else:
        content = [str(source.dataset), _read_commit(str(source.dataset), source.revision)]
    num_bytes = dataset.info.dataset_size or 0  # 0 if not known
    num_shards = dataset.num_shards
    return [
        ShardPiece(
            name=f"{name}, shard {index + 1} of {num_shards}",
            dataset=dataset.shard(num_shards=num_shards, index=index),
            digest=hash_json([*content, source.subset, source.split, index, num_shards]),
            size=num_bytes // num_shards,
        )
        for index in range(num_shards)
    ]


def _hash_files(files: list[str], digests: DigestCache) -> list[str]:
    """Return the hash of each file's content."""
    by_file = digests.get_or_compute(files, "content", hash_file)
    hashes = []
    for file in files:
        _, (_, content_hash) = by_file[file]
        hashes.append(content_hash)
    return hashes


def _read_commit(name: str, revision: str | None) -> str:
    """Return the hash of the commit on the hub that a revision names; the main branch's if it is `None`.

    Raises:
        DataError: The hub does not answer, or it has no such data set or revision.
    """
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    except Exception as error:  # the network, a proxy or a certificate can raise anything
        raise DataError(f"dataset {name}: the hub does not answer: {summarize_error(error, 300)}") from None
