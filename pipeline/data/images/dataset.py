"""Decodes stored images to normalised, augmented tensors when a sample is read: `data.kind: images`."""

from __future__ import annotations

import hashlib
import io
import logging
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.config.data_schema import ImagesDataConfig
from pipeline.config.optional_packages import require_package
from pipeline.data.batches import collate_items
from pipeline.data.bundle import Batch, DataBundle
from pipeline.data.images.augmentations import Augmentation
from pipeline.data.images.stored import FolderImages, find_folder_images
from pipeline.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
# Pillow's modes that convert to 8 bits per channel without clipping. Alpha is dropped, palettes are resolved.
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
log = logging.getLogger(__name__)


class ImageDataset(Dataset[Batch]):
    """Data set of images with `inputs` (C, H, W) float32, normalised, and `labels` () int64.

    `__getitem__` raises DataError if an image is damaged or missing.

    Args:
        images: Stored images.
        rows: (N,) numbers of the images in this data set.
        config: Size, channels and normalisation.
        augmentation: Augmentation of training images; `None` for no augmentation.
    """

    def __init__(
        self,
        images: FolderImages,
        rows: NDArray[np.int64],
        config: ImagesDataConfig,
        augmentation: Augmentation | None,
    ) -> None:
        self.images = images
        self.rows = rows
        self.class_names = images.class_names
        self.labels = images.labels[rows]  # (N,)
        self.image_size = config.image_size
        self.num_channels: int = config.channels
        grey = config.channels == 1
        mean = config.mean or ([0.5] if grey else IMAGENET_MEAN)
        std = config.std or ([0.5] if grey else IMAGENET_STD)
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]
        self._augmentation = augmentation

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        """Return the image without augmentation."""
        return self._item(index, self.pixels(index))

    def augmented(self, index: int, draw: int) -> Batch:
        """Return the augmented image; `draw` is the seed of all random numbers."""
        pixels = self.pixels(index)
        return self._item(index, pixels if self._augmentation is None else self._augmentation(pixels, draw))

    def pixels(self, index: int) -> Tensor:
        """Return the image as (C, H, W), 0 to 1, neither augmented nor normalised."""
        row = int(self.rows[index])
        try:
            encoded = self.images.encoded(row)
        except OSError as error:
            raise DataError(f"{self.images.where(row)}: cannot be read: {describe_error(error)}") from error
        return decode_image(encoded, self.images.where(row), self.image_size, self.num_channels)

    def _item(self, index: int, pixels: Tensor) -> Batch:
        return {"inputs": (pixels - self.mean) / self.std, "labels": torch.tensor(int(self.labels[index]))}


def prepare_images(config: ImagesDataConfig) -> DataBundle:
    """Find the images and split them into training and evaluation data, without decoding any.

    Raises:
        DataError: A folder, class or augmentation does not exist or does not fit, or there are too few
            images.
        ConfigError: pillow is not installed.
    """
    require_package("PIL", "data.kind: images")
    augmentation = Augmentation(config.augmentations) if config.augmentations else None
    images = find_folder_images(config.path, "path")
    held_out, eval_rows = _find_held_out(config, images)
    train_rows = np.arange(len(images.labels))
    if held_out is images:
        train_rows = np.setdiff1d(train_rows, eval_rows, assume_unique=True)
    _check_training(config, images, train_rows)
    if len(eval_rows) == 0 and config.eval_fraction > 0:
        log.warning(
            "no evaluation: none of %d images is held out (data.eval_fraction %g)",
            len(images.labels),
            config.eval_fraction,
        )
    train = ImageDataset(images, train_rows, config, augmentation)
    return DataBundle(
        train=train,
        eval={"images": ImageDataset(held_out, eval_rows, config, None)} if len(eval_rows) else {},
        collate=collate_items,
        tokenizer=None,
        vocab_size=None,
        num_classes=len(images.class_names),
        num_channels=config.channels,
        fingerprint=_compute_fingerprint(images, train_rows),
    )


def _find_held_out(config: ImagesDataConfig, images: FolderImages) -> tuple[FolderImages, NDArray[np.int64]]:
    """Return the stored images that contain the held-out ones, and the rows of the held-out ones."""
    if config.eval_path is not None:
        other = find_folder_images(config.eval_path, "eval_path", images.class_names)
        return other, np.arange(len(other.labels))
    if config.eval_fraction == 0:
        return images, np.empty(0, dtype=np.int64)
    return images, np.flatnonzero(images.hashes() < np.uint64(config.eval_fraction * 2**64))


def _check_training(config: ImagesDataConfig, images: FolderImages, rows: NDArray[np.int64]) -> None:
    if len(rows) == 0:
        raise DataError(
            f"data.eval_fraction {config.eval_fraction:g}: all {len(images.labels)} images are held out; "
            "lower it or add images"
        )
    counts = np.bincount(images.labels[rows], minlength=len(images.class_names))
    without = [images.class_names[number] for number in np.flatnonzero(counts == 0)]
    if without:
        log.warning("classes without a training image: %s", ", ".join(without[:10]))


def _compute_fingerprint(images: FolderImages, rows: NDArray[np.int64]) -> str:
    digest = hashlib.blake2b("\0".join(images.class_names).encode(), digest_size=16)
    # Hash names rather than sizes: reading the sizes of a million files at every start would take too long.
    for array in (images.names, images.labels, rows):
        digest.update(array.tobytes())
    return f"images-{digest.hexdigest()}"


def decode_image(encoded: bytes, where: str, image_size: int, channels: int) -> Tensor:
    """Return an image as (C, image_size, image_size) float32, 0 to 1.

    Args:
        encoded: Content of an image file.
        where: Name of the image for messages.
        image_size: Pixels per side.
        channels: 1 for grey, 3 for colour.

    Raises:
        DataError: The content is not an image, or it is damaged.
    """
    from PIL import Image, ImageOps

    mode = "L" if channels == 1 else "RGB"
    try:
        with warnings.catch_warnings():
            # Pillow warns of very large images, unusual EXIF and palettes with transparency.
            warnings.simplefilter("ignore")
            image: Image.Image = Image.open(io.BytesIO(encoded))
            # Decode a much larger JPEG at a half, a quarter or an eighth of its size: several times faster.
            image.draft(mode, (2 * image_size, 2 * image_size))
            image = _scale_to_eight_bits(ImageOps.exif_transpose(image), where).convert(mode)
            image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise exceptions of any type
        raise DataError(
            f"{where}: not a readable image ({describe_error(error)}); repair or remove it"
        ) from error
    array = np.asarray(image, dtype=np.float32).reshape(image_size, image_size, channels)
    return torch.from_numpy(array / 255.0).permute(2, 0, 1).contiguous()


def _scale_to_eight_bits(image: Image.Image, where: str) -> Image.Image:
    """Scale an image to 8 bits per channel, because Pillow clips modes with larger values at 255.

    Raises:
        DataError: There is no rule for the image's mode, or its values are outside of the rule's range.
    """
    if image.mode in EIGHT_BITS:
        return image
    from PIL import Image

    if image.mode == "F":
        most = 1.0
    elif image.mode.startswith("I"):
        most = 65535
    else:
        raise DataError(f"{where}: an image of mode {image.mode}; save it as RGB or as grey (L)")
    values = np.asarray(image).astype(np.float64)
    low = float(values.min())
    high = float(values.max())
    if not 0 <= low <= high <= most:  # false for NaN, too
        raise DataError(
            f"{where}: an image of mode {image.mode} with values from {low:g} to {high:g}; expected 0 to "
            f"{most:g}: scale them to that, or save it in 8 bits a channel"
        )
    levels = values.astype(np.int64) >> 8 if most > 1 else np.rint(values * 255)
    return Image.fromarray(levels.astype(np.uint8))


def describe_error(error: Exception) -> str:
    """Return the message of an exception from Pillow or the file system, shortened to one line."""
    reason = getattr(error, "strerror", None) or str(error).split(" <_io")[0]
    return " ".join(str(reason).split())[:200] or type(error).__name__
