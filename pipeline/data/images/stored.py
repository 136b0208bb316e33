"""Finds labelled images: files in one folder for each class. Nothing is decoded.

Classes are numbered by the sorted names of the training data's folders. Held-out images use the same numbers.

The loader `imagefolder` of `datasets` is not used, for three reasons. It takes a class folder called `test`
for a split, and then drops all labels. It silently skips empty class folders. It cannot number the classes of
held-out folders as in the training data.
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

HASHED_BYTES = 4096  # bytes at a file's end that are hashed
READER_THREADS = 16  # more than cores, since threads wait for a network file system
FILES_PER_TASK = 256  # files that a thread hashes in one task
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

    def read_encoded(self, index: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            OSError: The file cannot be read, is no regular file, or has more than MAX_IMAGE_BYTES bytes.
        """
        return read_regular_file(self.get_path(index), MAX_IMAGE_BYTES)

    def get_path(self, index: int) -> str:
        """Return the path of an image file."""
        return str(self.root / os.fsdecode(self.names[index]))

    def compute_hashes(self) -> NDArray[np.uint64]:
        """Return a 64-bit hash (N,) of the size and the last bytes of each file, at most HASHED_BYTES.

        Raises:
            DataError: A file cannot be read.
        """
        starts = range(0, len(self.names), FILES_PER_TASK)
        with ThreadPoolExecutor(READER_THREADS) as pool:
            try:
                digests = b"".join(pool.map(self._hash_files, starts))
            except OSError as error:
                raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
        return np.frombuffer(digests, dtype=">u8").astype(np.uint64)

    def _hash_files(self, start: int) -> bytes:
        """Return the concatenated digests, 8 bytes each, of FILES_PER_TASK files from `start` on."""
        digests = []
        for index in range(start, min(start + FILES_PER_TASK, len(self.names))):
            with open(open_regular_file(self.get_path(index)), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - HASHED_BYTES))
                content = size.to_bytes(8, "big") + file.read()
            # The end of compressed pixels differs between images as much as the rest does.
            digests.append(hashlib.blake2b(content, digest_size=8).digest())
        return b"".join(digests)


def find_folder_images(path: str, key: str, class_names: tuple[str, ...] | None = None) -> FolderImages:
    """Find all images in the class folders of a folder, in the order of class and name.

    Args:
        path: Path of the folder.
        key: Key of the recipe's `data` section that names the folder, for messages.
        class_names: Names of the training classes, to find held-out images; `None` to find training images,
            whose class folders name the classes.

    Raises:
        DataError: The folder does not exist, cannot be read or has no class folders, a class folder has no
            images, there is only one class, or a class is not among the training classes.
    """
    root = Path(path).expanduser()
    where = f"data.{key} {path}"
    if not root.is_dir():
        siblings = [entry.name for entry in root.parent.glob("*/")] if root.parent.is_dir() else []
        raise DataError(f"{where}: no such folder{did_you_mean(root.name, siblings) if siblings else ''}")
    try:
        folders = sorted(
            entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")
        )
        if class_names is None:
            _refuse_splits(root, folders, f"data.{key}")
        files = {name: list(_iter_image_paths(root, name)) for name in folders}
    except OSError as error:
        raise DataError(f"data.{key}: {error.filename} cannot be read: {error.strerror}") from None
    if not folders:
        raise DataError(f"{where}: has no folders; expected one folder of images for each class")
    empty = [name for name in folders if not files[name]]
    if empty:
        raise DataError(
            f"data.{key}: the class folder {root / empty[0]} has no images; add some or remove the folder "
            f"({', '.join(sorted(SUFFIXES))} are read)"
        )
    names = class_names or tuple(folders)
    if len(names) < 2:
        raise DataError(f"{where}: has only one class ({folders[0]}); classification needs at least two")
    unknown = sorted(set(folders) - set(names))
    if unknown:
        raise DataError(
            f"{where}: class {unknown[0]!r} is not among the training images' {len(names)} classes"
            f"{did_you_mean(unknown[0], names[:20])}; the class folders must have the same names in both"
        )
    numbers = {name: number for number, name in enumerate(names)}
    labels = np.repeat([numbers[name] for name in folders], [len(files[name]) for name in folders])
    paths = np.array([os.fsencode(file) for name in folders for file in files[name]])
    return FolderImages(names, labels.astype(np.int64), root, paths)


def _refuse_splits(root: Path, folders: list[str], where: str) -> None:
    """Check that the folders in `root` are classes, and not splits that contain class folders.

    Raises:
        DataError: The folders are splits, which would be read as classes.
        OSError: A folder cannot be read.
    """
    held_out = [name for name in HELD_OUT_FOLDERS if name in folders]
    if not held_out or set(folders) != {"train", *held_out}:
        return
    have_subfolders = all(any(entry.is_dir() for entry in os.scandir(root / name)) for name in folders)
    if have_subfolders:
        raise DataError(
            f"{where}: {root} has the splits train/ and {held_out[0]}/: write {where}={root / 'train'} and "
            f"data.eval_path={root / held_out[0]}"
        )


def _iter_image_paths(root: Path, class_name: str) -> Iterable[str]:
    """Yield the paths, relative to `root`, of images in a class folder and its subfolders.

    The order is the same on every machine. Hidden files and folders are left out.
    """
    for folder, subfolders, files in os.walk(root / class_name, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(files):
            is_image = os.path.splitext(name)[1].lower() in SUFFIXES
            if is_image and not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)
