"""What stored, labelled images have in common, wherever they are stored. Not decoded.

Class numbers follow the names of the training data; held-out images take theirs by name.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.data_schema import ImagesDataConfig
from pipeline.config.loading import did_you_mean
from pipeline.config.optional_packages import require
from pipeline.data.documents.hub import check_data_files, check_saved, own_split
from pipeline.errors import DataError, one_line
from pipeline.files import IMAGE_LIMIT, open_plain, read_plain

if TYPE_CHECKING:
    from datasets import Dataset


TAIL = 4096  # bytes


@dataclass(frozen=True)
class LabelledImages(ABC):
    """Images of one split."""

    class_names: tuple[str, ...]
    """By class number."""
    labels: NDArray[np.int64]
    """(N,) class numbers."""

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The image as stored. OSError where it cannot be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """What messages call it."""

    @abstractmethod
    def keys(self, indices: range) -> list[bytes]:
        """For each image what its hash is made of: its size and its end, which spares reading the whole."""

    @abstractmethod
    def digest(self) -> bytes:
        """Changes when images come, go or change places."""


def key_of(size: int, tail: bytes) -> bytes:
    """8 bytes, equal for equal files. Compressed pixels end as individually as they go on."""
    return hashlib.blake2b(size.to_bytes(8, "big") + tail, digest_size=8).digest()


def check_classes(names: Iterable[str], where: str) -> tuple[str, ...]:
    """The names, where there are at least two."""
    found = tuple(names)
    if len(found) < 2:
        raise DataError(f"{where}: one class only ({', '.join(found)}); telling classes apart takes two")
    return found


def check_known(names: Iterable[str], known: tuple[str, ...], where: str) -> None:
    """Held-out images are of the training images' classes."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise DataError(
            f"{where}: class {unknown[0]!r} is not among the training images' "
            f"{len(known)} classes{did_you_mean(unknown[0], known[:20])}; the class folders of both must be "
            "called the same"
        )


SUFFIXES = {".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
SUFFIXES |= {".pbm", ".jp2", ".avif", ".tga", ".ico"}
# What folders of splits are called, beside train.
HELD_OUT = ("val", "valid", "validation", "test")


@dataclass(frozen=True)
class FolderImages(LabelledImages):
    """Image files."""

    root: Path
    names: NDArray[np.bytes_]
    """(N,) paths under root. One array: a million Python strings would be copied into every worker."""

    def path(self, index: int) -> Path:
        return self.root / os.fsdecode(self.names[index])

    def encoded(self, index: int) -> bytes:
        return read_plain(self.path(index), IMAGE_LIMIT)

    def where(self, index: int) -> str:
        return str(self.path(index))

    def keys(self, indices: range) -> list[bytes]:
        return [self._key(index) for index in indices]

    def _key(self, index: int) -> bytes:
        with open(open_plain(self.path(index)), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            return key_of(size, file.read())

    def digest(self) -> bytes:
        # Of names: asking for a million sizes at every start would cost more than it tells.
        return hashlib.blake2b(self.names.tobytes() + self.labels.tobytes(), digest_size=16).digest()


def find_folder_images(given: str, key: str, class_names: tuple[str, ...] | None = None) -> FolderImages:
    """All images in the class folders of a folder, in the order of class and name.

    Args:
        given: The folder.
        key: The recipe's word for it, for messages.
        class_names: Of the training images, for held-out ones. None: these are the training images.

    Raises:
        DataError: no such folder, no class folders, one without images, or other classes than in training.
    """
    root = Path(given).expanduser()
    if not root.is_dir():
        siblings = [entry.name for entry in root.parent.glob("*/")] if root.parent.is_dir() else []
        hint = did_you_mean(root.name, siblings) if siblings else f" (nor does {root.parent})"
        raise DataError(
            f"data.{key} {given}: no such folder{hint if not root.exists() else ': it is a file'}"
        )
    try:
        found = sorted(
            entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")
        )
        if class_names is None:
            _refuse_splits(root, found, f"data.{key}")
        files = {name: list(_image_names(root, name)) for name in found}
    except OSError as error:
        raise DataError(f"data.{key}: {error.filename} cannot be read: {error.strerror}") from None
    if not found:
        raise DataError(f"data.{key} {given}: holds no folders; expected one folder of images for each class")
    empty = [name for name in found if not files[name]]
    if empty:
        raise DataError(
            f"data.{key}: the class folder {root / empty[0]} holds no image; add some or remove it "
            f"({', '.join(sorted(SUFFIXES))} are read)"
        )
    names = class_names or check_classes(found, f"data.{key} {given}")
    check_known(found, names, f"data.{key} {given}")
    numbers = {name: number for number, name in enumerate(names)}
    labels = np.repeat([numbers[name] for name in found], [len(files[name]) for name in found])
    paths = np.array([os.fsencode(path) for name in found for path in files[name]])
    return FolderImages(names, labels.astype(np.int64), root, paths)


def _refuse_splits(root: Path, found: list[str], where: str) -> None:
    """Folders of splits, each with class folders, would be taken for classes."""
    held_out = [name for name in HELD_OUT if name in found]
    splits = {"train", *held_out}
    if not held_out or set(found) != splits:
        return
    if all(any(entry.is_dir() for entry in os.scandir(root / name)) for name in splits):
        raise DataError(
            f"{where}: {root} holds train/ and {held_out[0]}/: write {where}={root / 'train'} and "
            f"data.eval_path={root / held_out[0]}"
        )


def _image_names(root: Path, class_name: str) -> Iterable[str]:
    """Sorted, also from folders inside the class folder; hidden files and folders are none of the data."""
    for folder, inner, files in os.walk(root / class_name, followlinks=True):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)


@dataclass(frozen=True)
class DatasetImages(LabelledImages):
    """Rows whose images are not decoded: their `bytes`, or the `path` of a file."""

    name: str
    rows: Dataset
    field: str

    def encoded(self, index: int) -> bytes:
        return _content(self.rows[int(index)][self.field])

    def where(self, index: int) -> str:
        return f"row {index} of {self.name}"

    def keys(self, indices: range) -> list[bytes]:
        contents = map(_content, self.rows[indices.start : indices.stop][self.field])
        return [key_of(len(content), content[-TAIL:]) for content in contents]

    def digest(self) -> bytes:
        return hashlib.blake2b(
            self.rows._fingerprint.encode() + self.labels.tobytes(), digest_size=16
        ).digest()


def _content(value: dict[str, Any] | None) -> bytes:
    if value is None:
        raise OSError("there is no image")
    content: bytes | None = value["bytes"]
    return read_plain(value["path"], IMAGE_LIMIT) if content is None else content


def find_dataset_images(
    config: ImagesDataConfig, split: str, key: str, class_names: tuple[str, ...] | None = None
) -> DatasetImages:
    """All rows of a split of `data.dataset`.

    Args:
        config: Of the data.
        split: Which one.
        key: The recipe's word for the split, for messages.
        class_names: Of the training images, for held-out ones. None: these are the training images.

    Raises:
        DataError: no such dataset, split or column, a column of another type, a row without a label, or other
            classes than in training.
        ConfigError: datasets is not installed.
    """
    require("datasets", f"data.dataset: {config.dataset}", "give a folder of images in data.path")
    from datasets import Image

    rows = _load_split(config, split, key)
    where = f"data.dataset {config.dataset}, split {split}"
    for name, field in (("image_field", config.image_field), ("label_field", config.label_field)):
        if field not in rows.column_names:
            raise DataError(
                f"{where}: no column {field!r}{did_you_mean(field, rows.column_names)}; set data.{name}"
            )
    if len(rows) == 0:
        raise DataError(f"{where}: no rows")
    kind = rows.features[config.image_field]
    holds_bytes = "bytes" in kind if isinstance(kind, dict) else getattr(kind, "dtype", "") == "binary"
    if not (isinstance(kind, Image) or holds_bytes):
        raise DataError(f"{where}: column {config.image_field!r} holds no images but {kind}")
    images = rows.cast_column(config.image_field, Image(decode=False))
    names, labels = _labels(rows, config.label_field, where, class_names)
    return DatasetImages(names, labels, f"{config.dataset}, split {split}", images, config.image_field)


def _load_split(config: ImagesDataConfig, split: str, key: str) -> Dataset:
    from datasets import Dataset, load_dataset, load_from_disk

    assert config.dataset is not None
    path = Path(config.dataset).expanduser()
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    check_saved(path)
    try:
        if not saved:
            if path.is_dir():
                check_data_files(path, config.subset)
            return load_dataset(config.dataset, config.subset, split=split)
        loaded: Any = load_from_disk(str(path))
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exceptions as well
        reason = one_line(error, 300)
        raise DataError(f"data.dataset: cannot load {config.dataset} (split {split}): {reason}") from error
    if isinstance(loaded, Dataset):
        loaded = {own_split(path): loaded}
    if split not in loaded:
        raise DataError(f"data.{key}: {config.dataset} has no split {split!r}{did_you_mean(split, loaded)}")
    return loaded[split]


def _labels(
    rows: Dataset, field: str, where: str, class_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Class names, and the class number of each row."""
    from datasets import ClassLabel

    feature: Any = rows.features[field]
    kind = getattr(feature, "dtype", str(feature))
    if not kind.startswith(("string", "large_string", "bool", "int", "uint")):
        raise DataError(f"{where}: column {field!r} holds {kind}; expected class names or numbers")
    column: Any = rows.select_columns([field]).with_format("arrow")[:][field]
    missing = column.null_count
    given = np.asarray(column.drop_null().to_pylist())
    if isinstance(feature, ClassLabel):
        missing += int((given < 0).sum())  # how test splits on the hub say "not told"
    if missing:
        raise DataError(f"{where}: {missing} of {len(rows)} rows have no label in column {field!r}")
    values, numbers = np.unique(given, return_inverse=True)
    found = tuple(feature.names[value] if isinstance(feature, ClassLabel) else str(value) for value in values)
    names = class_names
    if names is None:
        names = tuple(feature.names) if isinstance(feature, ClassLabel) else found
        check_classes(names, f"{where}, column {field!r}")
    check_known(found, names, where)
    by_name = {name: number for number, name in enumerate(names)}
    return names, np.array([by_name[name] for name in found], dtype=np.int64)[numbers]
