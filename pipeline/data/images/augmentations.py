"""Random changes to training images, by name: `data.augmentations`.

To add one, write a function of the image and `draw`, with keyword arguments that have defaults, and register
it in AUGMENTATIONS. The functions use torch alone: torchvision's compiled operators do not load with every
build of torch.
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
"""Function that draws a random number between two bounds."""
LIMITS = {"p": (0.0, 1.0), "scale": (0.0, 1.0), "ratio": (0.01, 100.0)}
"""Minimum and maximum of an argument; other arguments have the minimum 0 and no maximum."""


def flip_horizontally(image: Tensor, draw: DrawNumber, *, p: float = 0.5) -> Tensor:
    """Mirror left and right, with probability `p`."""
    return image.flip(-1) if draw(0, 1) < p else image


def flip_vertically(image: Tensor, draw: DrawNumber, *, p: float = 0.5) -> Tensor:
    """Mirror top and bottom, with probability `p`."""
    return image.flip(-2) if draw(0, 1) < p else image


def crop(image: Tensor, draw: DrawNumber, *, padding: float = 4) -> Tensor:
    """Pad with black on all sides, and cut out the original size at a random position."""
    margin = int(padding)
    top = int(draw(0, 2 * margin + 1))
    left = int(draw(0, 2 * margin + 1))
    padded = functional.pad(image, [margin] * 4)
    return padded[:, top : top + image.shape[1], left : left + image.shape[2]]


def resized_crop(
    image: Tensor,
    draw: DrawNumber,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Cut out a random part and resize it to the original size.

    `scale` bounds the part's share of the area, `ratio` its width divided by its height.
    """
    height, width = image.shape[1:]
    area = height * width * draw(*scale)
    shape = math.exp(draw(math.log(ratio[0]), math.log(ratio[1])))
    rows = min(height, max(1, round(math.sqrt(area / shape))))
    columns = min(width, max(1, round(math.sqrt(area * shape))))
    top = int(draw(0, height - rows + 1))
    left = int(draw(0, width - columns + 1))
    part = image[None, :, top : top + rows, left : left + columns]
    return functional.interpolate(part, (height, width), mode="bilinear", antialias=True)[0]


def rotate(image: Tensor, draw: DrawNumber, *, degrees: float = 15.0) -> Tensor:
    """Rotate by up to `degrees` in either direction around the center; corners become black."""
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
    """Scale brightness, contrast and saturation by random factors between 1 - x and 1 + x."""
    image = image * _draw_factor(draw, brightness)
    middle = _to_grey(image).mean()
    image = middle + (image - middle) * _draw_factor(draw, contrast)
    grey = _to_grey(image)
    return (grey + (image - grey) * _draw_factor(draw, saturation)).clamp(0, 1)


def _draw_factor(draw: DrawNumber, most: float) -> float:
    return draw(max(0.0, 1 - most), 1 + most)


def make_grey(image: Tensor, draw: DrawNumber, *, p: float = 0.1) -> Tensor:
    """Remove the colours, with probability `p`."""
    return _to_grey(image).expand_as(image).clone() if draw(0, 1) < p else image


def _to_grey(image: Tensor) -> Tensor:
    if len(image) == 1:
        return image
    return (image * torch.tensor(GREY_WEIGHTS)[:, None, None]).sum(0, keepdim=True)


def erase(
    image: Tensor, draw: DrawNumber, *, p: float = 0.5, scale: tuple[float, float] = (0.02, 0.33)
) -> Tensor:
    """Make a random rectangle black, with probability `p`; `scale` bounds its share of the area."""
    if draw(0, 1) >= p:
        return image
    height, width = image.shape[1:]
    side = math.sqrt(draw(*scale))
    rows = max(1, round(side * height))
    columns = max(1, round(side * width))
    top = int(draw(0, height - rows + 1))
    left = int(draw(0, width - columns + 1))
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
"""Functions by the name of the transform in torchvision."""


class Augmentation:
    """Applies the recipe's augmentations in order, to one image at a time.

    Args:
        given: Arguments by name of the augmentation, a key of AUGMENTATIONS.

    Raises:
        DataError: There is no such augmentation, or its arguments do not fit.
    """

    def __init__(self, given: dict[str, dict[str, Any]]) -> None:
        self._steps = [partial(_find(name), **_check_arguments(name, its)) for name, its in given.items()]

    def __call__(self, image: Tensor, draw: int) -> Tensor:
        """Return a changed copy of an image.

        Args:
            image: (C, H, W), pixels 0 to 1; not modified.
            draw: Seed of all random numbers: the same image and seed give the same result.
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


def _check_arguments(name: str, given: dict[str, Any]) -> dict[str, Any]:
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
