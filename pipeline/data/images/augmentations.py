"""Random changes to training images, by name: `data.augmentations`.

To add one, write a function of the image and `draw`, with defaults for its arguments, into AUGMENTATIONS.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config.loading import did_you_mean
from pipeline.errors import DataError

GREY_WEIGHTS = (0.299, 0.587, 0.114)
DrawNumber = Callable[[float, float], float]
"""Draws a number between two."""
LIMITS = {"p": (0.0, 1.0), "scale": (0.0, 1.0), "ratio": (0.01, 100.0)}
"""Least and most of an argument; any other one is from 0 on."""


def flip_horizontally(image: Tensor, draw: DrawNumber, *, p: float = 0.5) -> Tensor:
    """Mirror left and right, with probability `p`."""
    return image.flip(-1) if draw(0, 1) < p else image


def flip_vertically(image: Tensor, draw: DrawNumber, *, p: float = 0.5) -> Tensor:
    """Mirror top and bottom, with probability `p`."""
    return image.flip(-2) if draw(0, 1) < p else image


def crop(image: Tensor, draw: DrawNumber, *, padding: float = 4) -> Tensor:
    """Pad with black on all sides, and cut the old size out anywhere."""
    margin = int(padding)
    top, left = int(draw(0, 2 * margin + 1)), int(draw(0, 2 * margin + 1))
    padded = functional.pad(image, [margin] * 4)
    return padded[:, top : top + image.shape[1], left : left + image.shape[2]]


def resized_crop(
    image: Tensor,
    draw: DrawNumber,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Cut out a part with a share of the area (`scale`) and width / height (`ratio`); enlarge it."""
    height, width = image.shape[1:]
    area = height * width * draw(*scale)
    shape = math.exp(draw(math.log(ratio[0]), math.log(ratio[1])))
    rows = min(height, max(1, round(math.sqrt(area / shape))))
    columns = min(width, max(1, round(math.sqrt(area * shape))))
    top, left = int(draw(0, height - rows + 1)), int(draw(0, width - columns + 1))
    part = image[None, :, top : top + rows, left : left + columns]
    return functional.interpolate(part, (height, width), mode="bilinear", antialias=True)[0]


def rotate(image: Tensor, draw: DrawNumber, *, degrees: float = 15.0) -> Tensor:
    """Rotate by up to `degrees` either way around the middle; corners become black."""
    angle = math.radians(draw(-degrees, degrees))
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = functional.affine_grid(turn[None], [1, *image.shape], align_corners=False)
    return functional.grid_sample(image[None], grid, align_corners=False)[0]


def jitter_colors(
    image: Tensor,
    draw: DrawNumber,
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
) -> Tensor:
    """Scale brightness, contrast and saturation, each by 1 - x to 1 + x."""
    image = image * _factor(draw, brightness)
    middle = _grey(image).mean()
    image = middle + (image - middle) * _factor(draw, contrast)
    grey = _grey(image)
    return (grey + (image - grey) * _factor(draw, saturation)).clamp(0, 1)


def _factor(draw: DrawNumber, most: float) -> float:
    return draw(max(0.0, 1 - most), 1 + most)


def make_grey(image: Tensor, draw: DrawNumber, *, p: float = 0.1) -> Tensor:
    """Take the colours away, with probability `p`."""
    return _grey(image).expand_as(image).clone() if draw(0, 1) < p else image


def _grey(image: Tensor) -> Tensor:
    if len(image) == 1:
        return image
    return (image * torch.tensor(GREY_WEIGHTS)[:, None, None]).sum(0, keepdim=True)


def erase(
    image: Tensor, draw: DrawNumber, *, p: float = 0.5, scale: tuple[float, float] = (0.02, 0.33)
) -> Tensor:
    """Make a rectangle with a share of the area (`scale`) black, with probability `p`."""
    if draw(0, 1) >= p:
        return image
    height, width = image.shape[1:]
    side = math.sqrt(draw(*scale))
    rows, columns = max(1, round(side * height)), max(1, round(side * width))
    top, left = int(draw(0, height - rows + 1)), int(draw(0, width - columns + 1))
    image = image.clone()
    image[:, top : top + rows, left : left + columns] = 0.0
    return image


AUGMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "RandomHorizontalFlip": flip_horizontally,
    "RandomVerticalFlip": flip_vertically,
    "RandomCrop": crop,
    "RandomResizedCrop": resized_crop,
    "RandomRotation": rotate,
    "ColorJitter": jitter_colors,
    "RandomGrayscale": make_grey,
    "RandomErasing": erase,
}
"""Name, as in torchvision -> function."""


class Augmentation:
    """Applies the recipe's augmentations in order, to one image at a time.

    Args:
        given: Names of AUGMENTATIONS and their arguments.

    Raises:
        DataError: no such augmentation, or arguments that do not fit.
    """

    def __init__(self, given: dict[str, dict[str, Any]]) -> None:
        self._steps = [partial(_find(name), **_checked(name, its)) for name, its in given.items()]

    def __call__(self, image: Tensor, draw: int) -> Tensor:
        """Return the image (C, H, W), pixels 0 to 1, changed.

        Args:
            image: Not written to.
            draw: Decides every random number: the same image and number give the same result.
        """
        generator = torch.Generator().manual_seed(draw % 2**63)

        def between(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=generator))

        for step in self._steps:
            image = step(image, between)
        return image


def _find(name: str) -> Callable[..., Tensor]:
    if name not in AUGMENTATIONS:
        raise DataError(f"data.augmentations: no {name!r}{did_you_mean(name, AUGMENTATIONS)}")
    return AUGMENTATIONS[name]


def _checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(AUGMENTATIONS[name]).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    for key, value in given.items():
        if key not in defaults:
            raise DataError(f"data.augmentations.{name}: no argument {key!r}{did_you_mean(key, defaults)}")
        is_pair = isinstance(defaults[key], tuple)
        numbers = value if is_pair and isinstance(value, list) and len(value) == 2 else [value]
        least, most = LIMITS.get(key, (0.0, math.inf))
        are_numbers = all(isinstance(each, int | float) and least <= each <= most for each in numbers)
        if not are_numbers or len(numbers) != 1 + is_pair or numbers != sorted(numbers):
            bounds = f"from {least:g} {'on' if most == math.inf else f'to {most:g}'}"
            expected = f"two numbers {bounds}, the smaller one first" if is_pair else f"a number {bounds}"
            raise DataError(f"data.augmentations.{name}.{key}: {value!r}; expected {expected}")
    return given
