"""Finds labelled images: files in one folder for each class. Nothing is decoded.

Classes are numbered by the sorted names of the training data's folders; held-out images use the same numbers.

`datasets` with its imagefolder is not used: it takes a class folder called `test` for a split and drops all
labels, silently skips empty class folders, and cannot give held-out folders the training classes.
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
from pipeline.files import MAX_IMAGE_BYTES, open_regular_file, read_regular_file

TAIL = 4096  # bytes at a file's end that are hashed
READER_THREADS = 16  # more than cores, since threads wait for a network file system
CHUNK = 256  # files per task of a thread
SUFFIXES = {".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
SUFFIXES |= {".pbm", ".jp2", ".avif", ".tga", ".ico"}
HELD_OUT_FOLDERS = ("val", "valid", "validation", "test")  # usual names of split folders beside train


@dataclass(frozen=True)
class FolderImages:
    """Image files of one split.

    Attributes:
        class_names: Names of the classes, by class number.
        labels: (N,) class numbers.
        root: Folder that contains the class folders.
        names: (N,) paths relative to `root`, in one array because worker processes would copy a million
            Python strings.
    """

    class_names: tuple[str, ...]
    labels: NDArray[np.int64]
    root: Path
    names: NDArray[np.bytes_]

    def encoded(self, index: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            OSError: The file cannot be read.
        """
        return read_regular_file(self.where(index), MAX_IMAGE_BYTES)

    def where(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.root / os.fsdecode(self.names[index]))

    def hashes(self) -> NDArray[np.uint64]:
        """Return 64-bit hashes (N,) of each file's size and last TAIL bytes, without reading whole files.

        Raises:
            DataError: A file cannot be read.
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
            # The end of compressed pixels differs between images as much as the rest does.
            digests.append(hashlib.blake2b(content, digest_size=8).digest())
        return b"".join(digests)


def find_folder_images(given: str, key: str, class_names: tuple[str, ...] | None = None) -> FolderImages:
    """Find all images in the class folders of a folder, in the order of class and name.

    Args:
        given: Path of the folder.
        key: Key of the recipe that names the folder, for messages.
        class_names: Classes of the training images, if these are held-out images; otherwise `None`.

    Raises:
        DataError: The folder does not exist or has no class folders, a class folder has no images, or a class
            is not among the training classes.
    """
    root = Path(given).expanduser()
    where = f"data.{key} {given}"
    if not root.is_dir():
        siblings = [entry.name for entry in root.parent.glob("*/")] if root.parent.is_dir() else []
        raise DataError(f"{where}: no such folder{did_you_mean(root.name, siblings) if siblings else ''}")
    try:
        found = sorted(
            entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")
        )
        if class_names is None:
            _refuse_splits(root, found, f"data.{key}")
        files = {name: list(_iter_image_names(root, name)) for name in found}
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
    """Raise DataError if the folders are splits with class folders, which would be read as classes."""
    held_out = [name for name in HELD_OUT_FOLDERS if name in found]
    if not held_out or set(found) != {"train", *held_out}:
        return
    if all(any(entry.is_dir() for entry in os.scandir(root / name)) for name in found):
        raise DataError(
            f"{where}: {root} holds train/ and {held_out[0]}/: write {where}={root / 'train'} and "
            f"data.eval_path={root / held_out[0]}"
        )


def _iter_image_names(root: Path, class_name: str) -> Iterable[str]:
    """Yield the sorted paths of images in a class folder and its subfolders, without hidden files."""
    for folder, inner, files in os.walk(root / class_name, followlinks=True):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)
