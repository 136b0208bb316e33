"""Shows images: how many of each class, how large, copies, and a sheet of what the model would get."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cli.inspection.screen import Screen, percent
from pipeline.cli.inspection.text import bars, count_copies, count_shared, draw_contact_sheet
from pipeline.data.bundle import Batch
from pipeline.data.images.dataset import describe

if TYPE_CHECKING:
    from torch import Tensor

MOST_CLASSES = 30  # shown one by one
MOST_NAMED = 5


@dataclass(frozen=True)
class StoredImages:
    """What the files of a split are like.

    Attributes:
        sizes: (N, 2) width and height in pixels of those that can be read.
        hashes: (N,) of their content, sorted.
        broken: A line for each that cannot be opened.
    """

    sizes: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    broken: list[str]


def look_at_files(dataset: Any, advance: Callable[[int], object]) -> StoredImages:
    """Reads every file of an ImageDataset, and decodes none."""
    from PIL import Image

    sizes, hashes, broken = [], [], []
    for row in dataset.rows.tolist():
        try:
            content = dataset.images.encoded(row)
            with Image.open(io.BytesIO(content)) as image:
                sizes.append(image.size)
            hashes.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big"))
        except Exception as error:  # Pillow's decoders raise what they like
            broken.append(f"{dataset.images.where(row)}: {describe(error)}")
        advance(1)
    return StoredImages(
        np.array(sizes, dtype=np.int64).reshape(-1, 2), np.sort(np.array(hashes, dtype=np.uint64)), broken
    )


def show_classes(screen: Screen, train: Any, held_out: Sequence[Any]) -> None:
    """Images of each class; `labels` (N,) of the data sets are read."""
    names = class_names(train)
    counts = _counts(train.labels, len(names))
    others = sum((_counts(dataset.labels, len(names)) for dataset in held_out), np.zeros_like(counts))
    screen.title(f"{counts.sum():,} training images, {others.sum():,} held out, {len(names):,} classes")
    order = list(range(len(names)))
    if len(names) > MOST_CLASSES:
        largest = np.argsort(-counts, kind="stable")
        order = [*largest[: MOST_CLASSES // 2].tolist(), *largest[-MOST_CLASSES // 2 :].tolist()]
        screen.line(f"the {MOST_CLASSES // 2} largest classes, and the {MOST_CLASSES // 2} smallest")
    lines = bars([names[number] for number in order], [int(counts[number]) for number in order])
    for number, line in zip(order, lines, strict=True):
        screen.line(f"{line}  (+ {others[number]:,} held out)" if others[number] else line)


def class_names(dataset: Any) -> tuple[str, ...]:
    """Their names, or numbers where they have none."""
    names = getattr(dataset, "class_names", None)
    return names or tuple(str(number) for number in range(int(np.asarray(dataset.labels).max()) + 1))


def _counts(labels: Any, length: int) -> NDArray[np.int64]:
    return np.bincount(np.asarray(labels), minlength=length)


def show_files(screen: Screen, train: Any, held_out: Mapping[str, Any]) -> None:
    """Sizes and copies of stored images."""
    total = len(train) + sum(map(len, held_out.values()))
    with screen.progress("reading images", total) as advance:
        found = look_at_files(train, advance)
        others = {name: look_at_files(dataset, advance) for name, dataset in held_out.items()}
    screen.title("Stored images")
    if len(found.sizes):
        width, height = np.median(found.sizes, axis=0).astype(int)
        small = int((found.sizes.min(axis=1) < train.image_size).sum())
        (low_w, low_h), (high_w, high_h) = found.sizes.min(axis=0), found.sizes.max(axis=0)
        screen.line(
            f"width {low_w:,} to {high_w:,}, median {width:,}; height {low_h:,} to {high_h:,}, "
            f"median {height:,} pixels; all become {train.image_size} x {train.image_size}"
        )
        if small:
            screen.line(f"{small:,} ({percent(small, len(found.sizes))}) are smaller and are enlarged")
    copies = count_copies(found.hashes)
    screen.line(f"exact copies: {copies:,} of {len(found.hashes):,} ({percent(copies, len(found.hashes))})")
    for name, other in others.items():
        shared = count_shared(other.hashes, found.hashes)
        screen.line(f"{name}: {shared:,} of {len(other.hashes):,} held-out images are also trained on")
    broken = found.broken + [line for other in others.values() for line in other.broken]
    for line in broken[:MOST_NAMED]:
        screen.line(f"cannot be opened: {line}")
    if len(broken) > MOST_NAMED:
        screen.line(f"cannot be opened: {len(broken) - MOST_NAMED:,} more")


def show_sheet(screen: Screen, batch: Batch, train: Any, path: Path) -> None:
    """A picture of a batch at `path`, each image with the name of its class."""
    inputs: Tensor = batch["inputs"]  # (B, C, H, W)
    if hasattr(train, "std"):
        inputs = inputs * train.std + train.mean
    images = inputs.clamp(0, 1).permute(0, 2, 3, 1).numpy()
    names = class_names(train)
    draw_contact_sheet(list(images), [names[label] for label in batch["labels"].tolist()], path)
    screen.title("The first images of the run, as the model gets them")
    screen.line(f"picture: {path}")
