"""Random changes to training images, by name: `data.augmentations`.

To add one, write a function of the image (C, H, W), pixels 0 to 1, and of `draw`, with keyword arguments that
have defaults. The function returns a new image of the same shape, or the same one. Register the function in
AUGMENTATIONS.

The functions use torch alone: torchvision's compiled operators do not load with every build of torch.
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

GREY_WEIGHTS = (0.299, 0.587, 0.114)  # shares of red, green and blue in the brightness (ITU-R BT.601)
DrawNumber = Callable[[float, float], float]
"""Function that draws a random number between two bounds; the upper bound is exclusive."""
ARGUMENT_LIMITS = {"p": (0.0, 1.0), "scale": (0.0, 1.0), "ratio": (0.01, 100.0)}
"""Minimum and maximum of arguments by name; other arguments have the minimum 0 and no maximum."""


def flip_horizontally(image: Tensor, draw: DrawNumber, *, p: float = 0.5) -> Tensor:
    """Mirror left and right, with probability `p`."""
    return image.flip(-1) if draw(0, 1) < p else image


def flip_vertically(image: Tensor, draw: DrawNumber, *, p: float = 0.5) -> Tensor:
    """Mirror top and bottom, with probability `p`."""
    return image.flip(-2) if draw(0, 1) < p else image


def crop(image: Tensor, draw: DrawNumber, *, padding: float = 4) -> Tensor:
    """Pad with `padding` black pixels on all sides, and cut out the original size at a random position."""
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
    """Cut out a random rectangle and resize it to the original size.

    Args:
        image: Image.
        draw: Draws random numbers.
        scale: Bounds of the rectangle's share of the area.
        ratio: Bounds of its width divided by its height.
    """
    height, width = image.shape[1:]
    area = height * width * draw(*scale)
    aspect_ratio = math.exp(draw(math.log(ratio[0]), math.log(ratio[1])))
    rows = min(height, max(1, round(math.sqrt(area / aspect_ratio))))
    columns = min(width, max(1, round(math.sqrt(area * aspect_ratio))))
    top = int(draw(0, height - rows + 1))
    left = int(draw(0, width - columns + 1))
    rectangle = image[None, :, top : top + rows, left : left + columns]
    return functional.interpolate(rectangle, (height, width), mode="bilinear", antialias=True)[0]


def rotate(image: Tensor, draw: DrawNumber, *, degrees: float = 15.0) -> Tensor:
    """Rotate by up to `degrees` in either direction around the center; corners become black."""
    angle = math.radians(draw(-degrees, degrees))
    cosine = math.cos(angle)
    sine = math.sin(angle)
    rotation = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    grid = functional.affine_grid(rotation[None], [1, *image.shape], align_corners=False)
    return functional.grid_sample(image[None], grid, align_corners=False)[0]


def jitter_colors(
    image: Tensor,
    draw: DrawNumber,
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
) -> Tensor:
    """Scale brightness, contrast and saturation by random factors between 1 - x and 1 + x.

    x is the argument of this name. A lower bound below 0 is replaced by 0.
    """
    image = image * _draw_factor(draw, brightness)
    mean_brightness = _to_grey(image).mean()
    image = mean_brightness + (image - mean_brightness) * _draw_factor(draw, contrast)
    grey = _to_grey(image)
    return (grey + (image - grey) * _draw_factor(draw, saturation)).clamp(0, 1)


def _draw_factor(draw: DrawNumber, strength: float) -> float:
    """Return a random factor between 1 - strength (at least 0) and 1 + strength."""
    return draw(max(0.0, 1 - strength), 1 + strength)


def make_grey(image: Tensor, draw: DrawNumber, *, p: float = 0.1) -> Tensor:
    """Remove the colours, with probability `p`."""
    return _to_grey(image).expand_as(image).clone() if draw(0, 1) < p else image


def _to_grey(image: Tensor) -> Tensor:
    """Return the brightness (1, H, W) of an image."""
    if len(image) == 1:
        return image
    return (image * torch.tensor(GREY_WEIGHTS)[:, None, None]).sum(0, keepdim=True)


def erase(
    image: Tensor, draw: DrawNumber, *, p: float = 0.5, scale: tuple[float, float] = (0.02, 0.33)
) -> Tensor:
    """Make a random rectangle black, with probability `p`.

    The rectangle has the image's ratio of width to height; `scale` bounds its share of the area.
    """
    if draw(0, 1) >= p:
        return image
    height, width = image.shape[1:]
    share_of_side = math.sqrt(draw(*scale))
    rows = max(1, round(share_of_side * height))
    columns = max(1, round(share_of_side * width))
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
        arguments: Keyword arguments of each augmentation, by its name in AUGMENTATIONS.

    Raises:
        DataError: There is no such augmentation, or its arguments do not fit.
    """

    def __init__(self, arguments: dict[str, dict[str, Any]]) -> None:
        self._functions: list[Callable[[Tensor, DrawNumber], Tensor]] = []
        for name, keywords in arguments.items():
            function = _find_function(name)
            _check_arguments(name, keywords)
            self._functions.append(partial(function, **keywords))

    def __call__(self, image: Tensor, seed: int) -> Tensor:
        """Return the augmented image: a copy, or the image itself if no augmentation changes it.

        Args:
            image: (C, H, W), pixels 0 to 1; not modified.
            seed: Seed of all random numbers: the same image and seed give the same result.
        """
        generator = torch.Generator().manual_seed(seed % 2**63)

        def draw(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=generator))

        for function in self._functions:
            image = function(image, draw)
        return image


def _find_function(name: str) -> Callable[..., Tensor]:
    """Return the function of an augmentation; raise DataError if there is none."""
    if name not in AUGMENTATIONS:
        raise DataError(
            f"data.augmentations: there is no augmentation {name!r}{did_you_mean(name, AUGMENTATIONS)}"
        )
    return AUGMENTATIONS[name]


def _check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Check the keyword arguments of an augmentation.

    Raises:
        DataError: The function has no such argument, or a value is not a number (or a pair of numbers) within
            the limits.
    """
    parameters = inspect.signature(AUGMENTATIONS[name]).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    for key, value in arguments.items():
        if key not in defaults:
            raise DataError(
                f"data.augmentations.{name}: there is no argument {key!r}{did_you_mean(key, defaults)}"
            )
        low, high = ARGUMENT_LIMITS.get(key, (0.0, math.inf))
        is_pair = isinstance(defaults[key], tuple)
        is_valid = _is_ascending_pair(value, low, high) if is_pair else _is_number(value, low, high)
        if not is_valid:
            bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            expected = f"two numbers {bounds}, the smaller one first" if is_pair else f"a number {bounds}"
            raise DataError(f"data.augmentations.{name}.{key}: {value!r}; expected {expected}")


def _is_number(value: Any, low: float, high: float) -> bool:
    """Return whether `value` is a number from `low` to `high`."""
    return isinstance(value, int | float) and low <= value <= high


def _is_ascending_pair(value: Any, low: float, high: float) -> bool:
    """Return whether `value` is a list of two numbers from `low` to `high`, the smaller one first."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(_is_number(each, low, high) for each in value) and value[0] <= value[1]
