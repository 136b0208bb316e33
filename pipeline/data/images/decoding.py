"""Stored image -> tensor of the recipe's size: turned upright, resized, the middle cut out."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from pipeline.errors import DataError


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
    mode = "L" if channels == 1 else "RGB"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of very large images, odd EXIF, palettes with transparency
            image: Image.Image = Image.open(io.BytesIO(encoded))
            # A JPEG of far more pixels is decoded at half, a quarter or an eighth: several times faster.
            image.draft(mode, (2 * image_size, 2 * image_size))
            image = _eight_bits(ImageOps.exif_transpose(image)).convert(mode)
            image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow's decoders raise what they like
        raise DataError(f"{where}: not a readable image ({describe(error)}); repair or remove it") from error
    array = np.asarray(image, dtype=np.float32).reshape(image_size, image_size, channels)
    return torch.from_numpy(array / 255.0).permute(2, 0, 1).contiguous()


def _eight_bits(image: Image.Image) -> Image.Image:
    """Pillow clips 16-bit grey at 255 instead of scaling it."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def describe(error: Exception) -> str:
    """An exception of Pillow's or the file system's in a few words, on one line."""
    reason = getattr(error, "strerror", None) or str(error).split(" <_io")[0]
    return " ".join(str(reason).split())[:200] or type(error).__name__
