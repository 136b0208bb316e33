"""Images in a Hugging Face dataset: a column of images and one of labels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.data_schema import ImagesDataConfig
from pipeline.config.loading import did_you_mean
from pipeline.data.documents.saved import check_data_files, check_saved, own_split
from pipeline.data.images.stored import TAIL, LabelledImages, check_classes, check_known, key_of
from pipeline.errors import DataError, one_line
from pipeline.files import IMAGE_LIMIT, read_plain
from pipeline.optional_packages import require

if TYPE_CHECKING:
    from datasets import Dataset


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
