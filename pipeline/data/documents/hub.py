"""Hugging Face datasets: folders written by `save_to_disk`, folders of data files, and names on the hub.

Never runs code that comes with a data set.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.data_schema import SourceConfig
from pipeline.config.optional_packages import require
from pipeline.data.documents.pieces import hash_file
from pipeline.data.documents.readers import ROWS_AT_ONCE, records_of
from pipeline.data.documents.records import BadRecords, Piece, Record
from pipeline.data.documents.streams import DigestCache, hash_of
from pipeline.errors import DataError, one_line
from pipeline.files import DESCRIPTION_LIMIT, inside, read_plain

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


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


HUB_SECONDS = 10.0  # for the hub to answer; without the question an unreachable one takes half a minute
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowsPiece:
    """Rows `start` to `end` of a data set whose files are mapped into memory."""

    name: str
    dataset: Dataset
    start: int
    end: int
    digest: str
    size: int

    def read(self, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
        """A dict for each row; values stay as they are stored (an image is its bytes)."""
        rows = self.dataset.with_format("arrow").select(range(self.start, self.end))
        if field is not None and field in rows.column_names:
            rows = rows.select_columns([field])
        number = self.start + 1
        for table in rows.iter(ROWS_AT_ONCE):
            yield from records_of(table, self.name, number)
            number += table.num_rows


@dataclass(frozen=True)
class ShardPiece:
    """A shard of a data set that is read as it comes over the network."""

    name: str
    dataset: IterableDataset
    digest: str
    size: int

    def read(self, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
        """A dict for each row.

        Raises:
            DataError: the network or a file of the data set fails.
        """
        wanted = field is not None and field in (self.dataset.column_names or [])
        rows = iter(self.dataset.select_columns([field]) if wanted else self.dataset)
        for number in count(1):
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # of any of the libraries that fetch and decode
                raise DataError(
                    f"{self.name}: reading row {number} failed: {one_line(error, 300)}"
                ) from error
            yield f"{self.name}: row {number}", row


def dataset_pieces(source: SourceConfig, digests: DigestCache, size: int) -> Sequence[Piece]:
    """The source's data set in rows of about `size` bytes; where it streams, in the shards it has.

    A digest is of the data set's files and the piece's place among them. Of one that streams from the hub it
    is of the commit.

    Raises:
        DataError: it cannot be found or loaded, has no such split, or has no rows.
    """
    dataset = load_split(source)
    name = f"{source.dataset} ({source.split})"
    if hasattr(dataset, "num_rows"):
        return _rows(name, dataset, digests, size)
    return _shards(name, dataset, source, digests)


def _rows(name: str, dataset: Dataset, digests: DigestCache, size: int) -> list[RowsPiece]:
    if dataset.num_rows == 0:
        raise DataError(f"data dataset {name}: has no rows")
    files = [file["filename"] for file in dataset.cache_files]
    content = _content(files, digests) or [dataset._fingerprint]  # one that is not on disk
    step = max(1, size * dataset.num_rows // max(1, dataset.data.nbytes))
    pieces = []
    for start in range(0, dataset.num_rows, step):
        end = min(start + step, dataset.num_rows)
        digest = hash_of([*content, dataset.num_rows, str(dataset.split), start, end])
        length = dataset.data.nbytes * (end - start) // dataset.num_rows
        pieces.append(RowsPiece(name=name, dataset=dataset, start=start, end=end, digest=digest, size=length))
    return pieces


def _shards(
    name: str, dataset: IterableDataset, source: SourceConfig, digests: DigestCache
) -> list[ShardPiece]:
    folder = Path(str(source.dataset)).expanduser()
    if folder.is_dir():
        files = sorted(str(file) for file in folder.rglob("*") if file.is_file())
        content = _content(files, digests)
    else:
        content = [str(source.dataset), _ask_hub(str(source.dataset), source.revision)]
    length = dataset.info.dataset_size or 0
    shards = dataset.num_shards
    return [
        ShardPiece(
            f"{name}, shard {index + 1} of {shards}",
            dataset.shard(num_shards=shards, index=index),
            hash_of([*content, source.subset, source.split, index, shards]),
            length // shards,
        )
        for index in range(shards)
    ]


def _content(files: list[str], digests: DigestCache) -> list[str]:
    found = digests.recall(files, "content", hash_file)
    return [found[file][1][1] for file in files]


def load_split(source: SourceConfig) -> Dataset | IterableDataset:
    """One split of a data set: of a folder that `save_to_disk` wrote (streaming or not), of a folder of data
    files, or of a name on the hub; from its cache on this machine where the hub does not answer.

    Raises:
        DataError: it cannot be found or loaded, or has no such split.
        ConfigError: datasets is not installed.
    """
    assert source.dataset is not None
    name, folder = source.dataset, Path(source.dataset).expanduser()
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise DataError(f"data dataset {name}: there is no such folder")
    saved = _saved_split(folder, source.split)
    require("datasets", f"data.sources: dataset {name}", "give files in paths")
    import datasets

    is_folder = folder.is_dir()
    offline: Any = nullcontext()
    failed = f"data dataset {name}: cannot be loaded"
    if not is_folder:
        try:
            _ask_hub(name, source.revision)
        except _HubAwayError as away:
            if source.streaming:
                raise
            offline, failed = _offline(), f"{away}; in the cache on this machine"
    try:
        if saved is not None:
            return datasets.load_from_disk(str(saved))
        with offline:
            if is_folder:
                check_data_files(folder, source.subset)
            return datasets.load_dataset(
                str(folder) if is_folder else name,
                source.subset,
                split=source.split,
                revision=None if is_folder else source.revision,
                streaming=source.streaming,
            )
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exceptions as well
        raise DataError(f"{failed}: {one_line(error, 300)}") from error


def _saved_split(folder: Path, split: str) -> Path | None:
    """The folder of one split that `save_to_disk` wrote; None where it did not write `folder`."""
    check_saved(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = read_entry(folder / "dataset_dict.json", "splits")
        if split not in splits:
            raise DataError(f"data dataset {folder}: has no split {split!r}; its splits: {', '.join(splits)}")
        folder /= split
    elif not (folder / "state.json").is_file():
        return None
    elif (own := own_split(folder)) != split:
        raise DataError(f"data dataset {folder}: holds the split {own!r} alone; write split: {own}")
    if not read_entry(folder / "state.json", "_data_files"):
        raise DataError(f"data dataset {folder}: has no rows")
    return folder


class _HubAwayError(DataError):
    """The hub does not answer."""


def _ask_hub(name: str, revision: str | None) -> str:
    """The commit of a data set on the hub.

    Raises:
        DataError: the hub has no such data set or revision, does not give it to this user or does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return str(HfApi().dataset_info(name, revision=revision, timeout=HUB_SECONDS).sha)
    except RevisionNotFoundError:
        raise DataError(f"data dataset {name}: the hub has no revision {revision!r} of it") from None
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise DataError(
            f"data dataset {name}: no folder here, and none that the hub gives: {one_line(error, 300)}"
        ) from None
    except Exception as error:  # whatever the network, a proxy or a certificate can do
        raise _HubAwayError(
            f"data dataset {name}: no folder here, and the hub does not answer ({one_line(error, 300)})"
        ) from None


@contextmanager
def _offline() -> Iterator[None]:
    """datasets looks into its cache alone; the setting has no other way in once the library is imported."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
