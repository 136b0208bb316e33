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
# Pillow's modes that convert to 8 bits per channel without clipping. Alpha is ignored, palettes are resolved.
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
log = logging.getLogger(__name__)


class ImageDataset(Dataset[Batch]):
    """Data set of images with `inputs` (C, H, W) float32, normalised, and `labels` () int64.

    Reading a sample raises DataError if the image is damaged or missing.

    Args:
        images: Image files, of which this data set has some.
        rows: (N,) indices of this data set's images in `images`.
        config: Size, channels and normalisation.
        augmentation: Augmentation of training images; `None` for no augmentation.

    Attributes:
        images: Image files.
        rows: (N,) indices of this data set's images in `images`.
        class_names: Names of the classes, by class number.
        labels: (N,) class numbers.
        image_size: Width and height in pixels.
        num_channels: 1 for grey, 3 for colour.
        mean: (C, 1, 1) mean of the pixels, 0 to 1, which is subtracted.
        std: (C, 1, 1) standard deviation of the pixels, by which they are divided.
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
        self.labels = images.labels[rows]
        self.image_size = config.image_size
        self.num_channels: int = config.channels
        is_grey = config.channels == 1
        mean = config.mean or ([0.5] if is_grey else IMAGENET_MEAN)
        std = config.std or ([0.5] if is_grey else IMAGENET_STD)
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]
        self._augmentation = augmentation

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        """Return a sample without augmentation."""
        return self._make_sample(index, self.read_pixels(index))

    def augmented(self, index: int, seed: int) -> Batch:
        """Return an augmented sample; `seed` is the seed of all random numbers."""
        pixels = self.read_pixels(index)
        if self._augmentation is not None:
            pixels = self._augmentation(pixels, seed)
        return self._make_sample(index, pixels)

    def read_pixels(self, index: int) -> Tensor:
        """Return an image as (C, H, W), 0 to 1, neither augmented nor normalised.

        Raises:
            DataError: The image is damaged or missing.
        """
        row = int(self.rows[index])
        path = self.images.get_path(row)
        try:
            encoded = self.images.read_encoded(row)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {describe_error(error)}") from error
        return decode_image(encoded, path, self.image_size, self.num_channels)

    def _make_sample(self, index: int, pixels: Tensor) -> Batch:
        """Return the normalised pixels and the label of an image."""
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
    eval_images, eval_rows = _find_held_out(config, images)
    train_rows = np.arange(len(images.labels))
    if eval_images is images:
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
        eval={"images": ImageDataset(eval_images, eval_rows, config, None)} if len(eval_rows) else {},
        collate=collate_items,
        tokenizer=None,
        vocab_size=None,
        num_classes=len(images.class_names),
        num_channels=config.channels,
        fingerprint=_compute_fingerprint(images, train_rows),
    )


def _find_held_out(config: ImagesDataConfig, images: FolderImages) -> tuple[FolderImages, NDArray[np.int64]]:
    """Find the held-out images: those of `eval_path`, or else a share of the training folder's.

    Returns:
        Image files that contain the held-out ones (`images` itself without `eval_path`), and the indices of
        the held-out ones.
    """
    if config.eval_path is not None:
        eval_images = find_folder_images(config.eval_path, "eval_path", images.class_names)
        return eval_images, np.arange(len(eval_images.labels))
    if config.eval_fraction == 0:
        return images, np.empty(0, dtype=np.int64)
    # A hash decides, so that an image stays in its split when others are added or renamed.
    return images, np.flatnonzero(images.compute_hashes() < np.uint64(config.eval_fraction * 2**64))


def _check_training(config: ImagesDataConfig, images: FolderImages, rows: NDArray[np.int64]) -> None:
    """Check that there are training images, and log a warning if a class has none.

    Raises:
        DataError: All images are held out.
    """
    if len(rows) == 0:
        raise DataError(
            f"data.eval_fraction {config.eval_fraction:g}: all {len(images.labels)} images are held out; "
            "lower data.eval_fraction, or add images"
        )
    counts = np.bincount(images.labels[rows], minlength=len(images.class_names))
    untrained = [images.class_names[number] for number in np.flatnonzero(counts == 0)]
    if untrained:
        log.warning("classes without a training image: %s", ", ".join(untrained[:10]))


def _compute_fingerprint(images: FolderImages, rows: NDArray[np.int64]) -> str:
    """Return a hash of the classes, names and labels of all images, and of the training images' indices."""
    digest = hashlib.blake2b("\0".join(images.class_names).encode(), digest_size=16)
    # Hash names rather than sizes: reading the sizes of a million files at every start would take too long.
    for array in (images.names, images.labels, rows):
        digest.update(array.tobytes())
    return f"images-{digest.hexdigest()}"


def decode_image(encoded: bytes, where: str, image_size: int, channels: int) -> Tensor:
    """Return an image as (C, image_size, image_size) float32, 0 to 1.

    The image is rotated by its EXIF data, resized so that its shorter side fits, and cropped in the middle.

    Args:
        encoded: Content of an image file.
        where: Path of the image for messages.
        image_size: Pixels per side.
        channels: 1 for grey, 3 for colour.

    Raises:
        DataError: The content is not an image, it is damaged, or its values cannot be scaled to 8 bits.
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
    """Scale an image to 8 bits per channel, because Pillow would clip larger values at 255.

    Raises:
        DataError: The image's mode is not supported, or its values are outside of the mode's usual range.
    """
    if image.mode in EIGHT_BIT_MODES:
        return image
    from PIL import Image

    if image.mode == "F":
        max_value = 1.0
    elif image.mode.startswith("I"):
        max_value = 65535
    else:
        raise DataError(f"{where}: an image of mode {image.mode}; save it as RGB or as grey (L)")
    values = np.asarray(image).astype(np.float64)
    low = float(values.min())
    high = float(values.max())
    is_in_range = 0 <= low <= high <= max_value  # false if a value is NaN
    if not is_in_range:
        raise DataError(
            f"{where}: an image of mode {image.mode} with values from {low:g} to {high:g}; expected 0 to "
            f"{max_value:g}: scale the values to this range, or save the image in 8 bits per channel"
        )
    levels = np.rint(values * 255) if image.mode == "F" else values.astype(np.int64) >> 8
    return Image.fromarray(levels.astype(np.uint8))


def describe_error(error: Exception) -> str:
    """Return the message of an exception from Pillow or the file system, shortened to one line."""
    reason = getattr(error, "strerror", None) or str(error).split(" <_io")[0]
    return " ".join(str(reason).split())[:200] or type(error).__name__
