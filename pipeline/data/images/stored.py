"""Stored, labelled images: files in folders of classes. Not decoded.

Class numbers follow the names of the training data; held-out images take theirs by name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.config.loading import did_you_mean
from pipeline.errors import DataError
from pipeline.files import IMAGE_LIMIT, open_regular_file, read_regular_file

TAIL = 4096  # bytes
READER_THREADS = 16  # threads that read the ends of files: over a network each one waits
CHUNK = 256  # files a thread takes together
SUFFIXES = {".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
SUFFIXES |= {".pbm", ".jp2", ".avif", ".tga", ".ico"}
HELD_OUT_FOLDERS = ("val", "valid", "validation", "test")  # names of folders of splits, beside train


@dataclass(frozen=True)
class FolderImages:
    """Image files of one split.

    Attributes:
        class_names: By class number.
        labels: (N,) class numbers.
        root: The folder.
        names: (N,) paths under root. One array: workers would copy a million Python strings.
    """

    class_names: tuple[str, ...]
    labels: NDArray[np.int64]
    root: Path
    names: NDArray[np.bytes_]

    def encoded(self, index: int) -> bytes:
        """Return the image as stored. OSError where it cannot be read."""
        return read_regular_file(self.where(index), IMAGE_LIMIT)

    def where(self, index: int) -> str:
        """Return the name of the image for messages."""
        return str(self.root / os.fsdecode(self.names[index]))

    def hashes(self) -> NDArray[np.uint64]:
        """Return 64 bits of each image's size and end (N,), which spares reading the whole.

        Raises:
            DataError: a file cannot be read.
        """
        starts = range(0, len(self.names), CHUNK)
        with ThreadPoolExecutor(READER_THREADS) as pool:
            try:
                digests = b"".join(pool.map(self._digests, starts))
            except OSError as error:
                raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
        return np.frombuffer(digests, dtype=">u8").astype(np.uint64)

    def _digests(self, start: int) -> bytes:
        digests = []
        for index in range(start, min(start + CHUNK, len(self.names))):
            with open(open_regular_file(self.where(index)), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL))
                content = size.to_bytes(8, "big") + file.read()
            # Compressed pixels end as individually as they go on.
            digests.append(hashlib.blake2b(content, digest_size=8).digest())
        return b"".join(digests)


def find_folder_images(given: str, key: str, class_names: tuple[str, ...] | None = None) -> FolderImages:
    """Find all images in the class folders of a folder, in the order of class and name.

    Args:
        given: The folder.
        key: The recipe's word for it, for messages.
        class_names: Of the training images, for held-out ones. None: these are the training images.

    Raises:
        DataError: no such folder, no class folders, one without images, or other classes than in training.
    """
    root, where = Path(given).expanduser(), f"data.{key} {given}"
    if not root.is_dir():
        siblings = [entry.name for entry in root.parent.glob("*/")] if root.parent.is_dir() else []
        raise DataError(f"{where}: no such folder{did_you_mean(root.name, siblings) if siblings else ''}")
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
        raise DataError(f"{where}: holds no folders; expected one folder of images for each class")
    empty = [name for name in found if not files[name]]
    if empty:
        raise DataError(
            f"data.{key}: the class folder {root / empty[0]} holds no image; add some or remove it "
            f"({', '.join(sorted(SUFFIXES))} are read)"
        )
    names = class_names or tuple(found)
    if len(names) < 2:
        raise DataError(f"{where}: one class only ({found[0]}); telling classes apart takes two")
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise DataError(
            f"{where}: class {unknown[0]!r} is not among the training images' {len(names)} classes"
            f"{did_you_mean(unknown[0], names[:20])}; the class folders of both must be called the same"
        )
    numbers = {name: number for number, name in enumerate(names)}
    labels = np.repeat([numbers[name] for name in found], [len(files[name]) for name in found])
    paths = np.array([os.fsencode(path) for name in found for path in files[name]])
    return FolderImages(names, labels.astype(np.int64), root, paths)


def _refuse_splits(root: Path, found: list[str], where: str) -> None:
    """Raise DataError for folders of splits, each with class folders: they would be taken for classes."""
    held_out = [name for name in HELD_OUT_FOLDERS if name in found]
    if not held_out or set(found) != {"train", *held_out}:
        return
    if all(any(entry.is_dir() for entry in os.scandir(root / name)) for name in found):
        raise DataError(
            f"{where}: {root} holds train/ and {held_out[0]}/: write {where}={root / 'train'} and "
            f"data.eval_path={root / held_out[0]}"
        )


def _image_names(root: Path, class_name: str) -> Iterable[str]:
    """Yield sorted names, also from folders inside the class folder; hidden files are none of the data."""
    for folder, inner, files in os.walk(root / class_name, followlinks=True):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)
