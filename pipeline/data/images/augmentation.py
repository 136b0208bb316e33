"""Random changes to training images: kornia's, by name, drawn from a number of the sample's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.loading import did_you_mean
from pipeline.config.optional_packages import require
from pipeline.errors import DataError, one_line

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
