"""`data.kind: images`: stored images become normalised, augmented tensors when a sample is asked for."""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline.config.data_schema import ImagesDataConfig
from pipeline.config.loading import did_you_mean
from pipeline.config.optional_packages import require
from pipeline.data.batches import collate_items
from pipeline.data.bundle import Batch, DataBundle
from pipeline.data.images.stored import LabelledImages, find_dataset_images, find_folder_images
from pipeline.errors import DataError, one_line

if TYPE_CHECKING:
    from PIL import Image

TRIALS = 8  # images changed up front: an augmentation may be drawn only now and then


class Augmentation:
    """Applies the recipe's augmentations in order, to one image at a time.

    Args:
        augmentations: Class names of kornia.augmentation and their keyword arguments.
        shape: (C, H, W) of an image, before and after.

    Raises:
        DataError: no such augmentation, arguments that do not fit, or another size than the model gets.
        ConfigError: kornia is not installed.
    """

    def __init__(self, augmentations: dict[str, dict[str, Any]], shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self._layers = [(name, _build(name, given)) for name, given in augmentations.items()]
        for draw in range(TRIALS):
            self(torch.full(shape, 0.5), draw)

    def __call__(self, image: Tensor, draw: int) -> Tensor:
        """The image (C, H, W), pixels 0 to 1, changed.

        Args:
            image: Not written to.
            draw: Decides every random number: the same image and number give the same result.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(draw % 2**63)  # torch.manual_seed would set the GPU's too
            for name, layer in self._layers:
                try:
                    changed: Tensor = layer(image.unsqueeze(0))[0]
                except Exception as error:  # kornia checks most arguments only here, and raises what it likes
                    raise DataError(
                        f"data.augmentations.{name}: {one_line(error)}; see kornia.augmentation.{name}"
                    ) from error
                if changed.shape != self.shape:
                    sizes = " and ".join("x".join(map(str, s)) for s in (tuple(changed.shape), self.shape))
                    raise DataError(
                        f"data.augmentations.{name}: changes the size (made and expected: {sizes}); "
                        "set its size to data.image_size"
                    )
                image = changed
        return image


def _build(name: str, given: dict[str, Any]) -> nn.Module:
    kinds = _kinds()
    if name not in kinds:
        raise DataError(
            f"data.augmentations: {name!r} is none of kornia.augmentation's for single images"
            f"{did_you_mean(name, kinds)}"
        )
    parameters = [key for key in inspect.signature(kinds[name]).parameters if key != "self"]
    unknown = [key for key in given if key not in parameters]
    if unknown:
        raise DataError(
            f"data.augmentations.{name}: no argument {unknown[0]!r}{did_you_mean(unknown[0], parameters)}"
        )
    try:
        return kinds[name](**{key: _tuples(value) for key, value in given.items()})
    except Exception as error:  # kornia's constructors raise what they like
        raise DataError(
            f"data.augmentations.{name}: {one_line(error)} (its arguments: {', '.join(parameters)})"
        ) from error


def _kinds() -> dict[str, Any]:
    """Those that take one image: not volumes, videos, mixtures of several images or containers of others."""
    require("kornia", "data.augmentations", "leave data.augmentations out")
    import kornia.augmentation as augmentation  # 1.3 s
    from kornia.augmentation import auto

    classes = {name: value for name, value in vars(augmentation).items() if inspect.isclass(value)}
    single = {
        name: value
        for name, value in classes.items()
        if issubclass(value, augmentation.AugmentationBase2D) and not name.endswith("Base2D")
    }
    return single | {name: getattr(auto, name) for name in ("AutoAugment", "RandAugment", "TrivialAugment")}


def _tuples(value: Any) -> Any:
    """YAML has lists only; kornia tells pairs by being tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
READERS = 16  # threads that read the ends of files: over a network each one waits
# Modes of Pillow's that it converts without clipping. Alpha is dropped; a palette gives its colours.
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
LOOKED_AT = 200  # images decoded before training, to tell of those that are of one colour
FLAT = 1.5 / 255  # pixels of one colour differ by a rounding at the most
CHUNK = 256  # files a thread takes at once
log = logging.getLogger(__name__)


class ImageDataset(Dataset[Batch]):
    """Items `inputs` (C, H, W) float32, normalised, and `labels` () int64.

    Args:
        images: As stored.
        rows: (N,) which of them.
        config: Size, channels and normalisation.
        augmentation: Of training images; None: there is none.

    Raises:
        DataError: from `__getitem__`, that an image is damaged or gone.
    """

    def __init__(
        self,
        images: LabelledImages,
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
        """The image as it is."""
        return self._item(index, self.pixels(index))

    def augmented(self, index: int, draw: int) -> Batch:
        """The image changed at random, as `draw` decides: equal numbers, equal results, in any process."""
        pixels = self.pixels(index)
        return self._item(index, pixels if self._augmentation is None else self._augmentation(pixels, draw))

    def pixels(self, index: int) -> Tensor:
        """(C, H, W), 0 to 1, neither changed nor normalised."""
        row = int(self.rows[index])
        try:
            encoded = self.images.encoded(row)
        except OSError as error:
            raise DataError(f"{self.images.where(row)}: cannot be read: {describe(error)}") from error
        return decode_image(encoded, self.images.where(row), self.image_size, self.num_channels)

    def _item(self, index: int, pixels: Tensor) -> Batch:
        return {"inputs": (pixels - self.mean) / self.std, "labels": torch.tensor(int(self.labels[index]))}


def prepare_images(config: ImagesDataConfig) -> DataBundle:
    """Finds the images and divides them; only a few are decoded yet, to tell of those of one colour.

    Raises:
        DataError: a folder, dataset, class or augmentation is not there or does not fit; too few images.
        ConfigError: A package that reads or augments images is not installed.
    """
    require("PIL", "data.kind: images")
    augmentation = None
    if config.augmentations:
        shape = (config.channels, config.image_size, config.image_size)
        augmentation = Augmentation(config.augmentations, shape)
    if config.path is not None:
        images: LabelledImages = find_folder_images(config.path, "path")
    else:
        images = find_dataset_images(config, config.split, "split")
    held_out, eval_rows = _held_out(config, images)
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
    _tell_of_flat(train)
    return DataBundle(
        train=train,
        eval={"images": ImageDataset(held_out, eval_rows, config, None)} if len(eval_rows) else {},
        collate=collate_items,
        tokenizer=None,
        vocab_size=None,
        num_classes=len(images.class_names),
        num_channels=config.channels,
        fingerprint=_fingerprint(images, train_rows),
    )


def _held_out(config: ImagesDataConfig, images: LabelledImages) -> tuple[LabelledImages, NDArray[np.int64]]:
    """Where the held-out images are, and which rows of that they are."""
    other: LabelledImages
    if config.eval_path is not None:
        other = find_folder_images(config.eval_path, "eval_path", images.class_names)
        return other, np.arange(len(other.labels))
    if config.eval_split is not None:
        other = find_dataset_images(config, config.eval_split, "eval_split", images.class_names)
        return other, np.arange(len(other.labels))
    if config.eval_fraction == 0:
        return images, np.empty(0, dtype=np.int64)
    keys = np.array([int.from_bytes(key, "big") for key in all_keys(images)], dtype=np.uint64)
    return images, np.flatnonzero(keys < np.uint64(config.eval_fraction * 2**64))


def all_keys(images: LabelledImages) -> Iterator[bytes]:
    """Of every image, in order."""
    chunks = [range(i, min(i + CHUNK, len(images.labels))) for i in range(0, len(images.labels), CHUNK)]
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for keys in pool.map(images.keys, chunks):
                yield from keys
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read: {describe(error)}") from error


def _check_training(config: ImagesDataConfig, images: LabelledImages, rows: NDArray[np.int64]) -> None:
    if len(rows) == 0:
        raise DataError(
            f"data.eval_fraction {config.eval_fraction:g}: all {len(images.labels)} images are held out; "
            "lower it or add images"
        )
    counts = np.bincount(images.labels[rows], minlength=len(images.class_names))
    without = [images.class_names[number] for number in np.flatnonzero(counts == 0)]
    if without:
        log.warning("classes without a training image: %s", ", ".join(without[:10]))


def _fingerprint(images: LabelledImages, rows: NDArray[np.int64]) -> str:
    digest = hashlib.blake2b("\0".join(images.class_names).encode(), digest_size=16)
    digest.update(images.digest())
    digest.update(rows.tobytes())
    return f"images-{digest.hexdigest()}"


def decode_image(encoded: bytes, where: str, image_size: int, channels: int) -> Tensor:
    """(C, image_size, image_size) float32, 0 to 1.

    Args:
        encoded: Content of an image file.
        where: What messages call it.
        image_size: Pixels a side.
        channels: 1: grey, 3: colour.

    Raises:
        DataError: not an image, or a damaged one.
    """
    from PIL import Image, ImageOps

    mode = "L" if channels == 1 else "RGB"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of very large images, odd EXIF, palettes with transparency
            image: Image.Image = Image.open(io.BytesIO(encoded))
            # A JPEG of far more pixels is decoded at half, a quarter or an eighth: several times faster.
            image.draft(mode, (2 * image_size, 2 * image_size))
            image = _eight_bits(ImageOps.exif_transpose(image), where).convert(mode)
            image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise what they like
        raise DataError(f"{where}: not a readable image ({describe(error)}); repair or remove it") from error
    array = np.asarray(image, dtype=np.float32).reshape(image_size, image_size, channels)
    return torch.from_numpy(array / 255.0).permute(2, 0, 1).contiguous()


def _eight_bits(image: Image.Image, where: str) -> Image.Image:
    """Return the image in 8 bits a channel: Pillow clips other modes at 255 instead of scaling them.

    Raises:
        DataError: its mode has no rule, or its values lie outside of what the rule covers.
    """
    if image.mode in EIGHT_BITS:
        return image
    from PIL import Image

    most = 1.0 if image.mode == "F" else 65535 if image.mode.startswith("I") else None
    if most is None:
        raise DataError(f"{where}: an image of mode {image.mode}; save it as RGB or as grey (L)")
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= most:  # nor a NaN
        raise DataError(
            f"{where}: an image of mode {image.mode} with values from {low:g} to {high:g}; expected 0 to "
            f"{most:g}: scale them to that, or save it in 8 bits a channel"
        )
    levels = values.astype(np.int64) >> 8 if most > 1 else np.rint(values * 255)
    return Image.fromarray(levels.astype(np.uint8))


def _tell_of_flat(dataset: ImageDataset) -> None:
    """Warn of images that are of one colour, such as all black, among some from all over the data."""
    looked_at = range(0, len(dataset), -(-len(dataset) // LOOKED_AT))

    def spread(index: int) -> float:
        try:
            pixels = dataset.pixels(index)
        except DataError:  # raised again when a sample asks for it
            return 1.0
        return float((pixels.amax((1, 2)) - pixels.amin((1, 2))).max())

    with ThreadPoolExecutor(READERS) as pool:
        flat = [i for i, far in zip(looked_at, pool.map(spread, looked_at), strict=True) if far < FLAT]
    if flat:
        log.warning(
            "%d of %d images that were looked at are of one colour, so nothing can be learned from them; the "
            "first: %s",
            len(flat),
            len(looked_at),
            dataset.images.where(int(dataset.rows[flat[0]])),
        )


def describe(error: Exception) -> str:
    """An exception of Pillow's or the file system's in a few words, on one line."""
    reason = getattr(error, "strerror", None) or str(error).split(" <_io")[0]
    return " ".join(str(reason).split())[:200] or type(error).__name__
