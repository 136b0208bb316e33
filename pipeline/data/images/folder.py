"""Images in a folder of one folder a class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.config.loading import did_you_mean
from pipeline.data.images.stored import TAIL, LabelledImages, check_classes, check_known, key_of
from pipeline.errors import DataError
from pipeline.files import IMAGE_LIMIT, open_plain, read_plain

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
