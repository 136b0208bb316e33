"""Handwritten digits of scikit-learn (Alpaydin & Kaynak 1998): real images that come with the package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.config.data_schema import DigitsDataConfig
from pipeline.config.optional_packages import require_package
from pipeline.data.batches import collate_items
from pipeline.data.bundle import Batch, DataBundle

NUM_CLASSES = 10
MAX_PIXEL_VALUE = 16.0  # in the images of scikit-learn, which count black dots in fields of 4 x 4
SPLIT_SEED = 20240229  # constant, so that all runs have the same split


class DigitsDataset(Dataset[Batch]):
    """Images in memory; items have `inputs` (1, H, W) float32 from 0 to 1, and `labels` () int64."""

    is_deterministic = True  # draws no random numbers

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images  # (N, 1, H, W)
        self.labels = labels  # (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {"inputs": self.images[index], "labels": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch: `inputs` (B, 1, H, W) and `labels` (B,)."""
        rows = torch.as_tensor(indices)
        return {"inputs": self.images[rows], "labels": self.labels[rows]}


def prepare_digits(config: DigitsDataConfig) -> DataBundle:
    """Return 1,797 images of 8 x 8 pixels, split so that every class has about the same share held out.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    require_package("sklearn", "data.kind: digits")
    from sklearn.datasets import load_digits  # importing it takes 1.7 s

    digits = load_digits()
    images = torch.from_numpy(digits.images / MAX_PIXEL_VALUE).float().unsqueeze(1)  # (N, 1, 8, 8)
    labels = torch.from_numpy(digits.target).long()
    train_rows, eval_rows = split_by_class(labels.numpy(), config.eval_fraction)
    return DataBundle(
        train=DigitsDataset(images[train_rows], labels[train_rows]),
        eval={"digits": DigitsDataset(images[eval_rows], labels[eval_rows])},
        collate=collate_items,
        tokenizer=None,
        vocab_size=None,
        num_classes=NUM_CLASSES,
        num_channels=1,
        fingerprint=f"digits-{len(train_rows)}-{len(eval_rows)}",
    )


def split_by_class(
    labels: NDArray[np.int64], eval_fraction: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sorted row numbers of the training and the evaluation split.

    Each split has at least one row of every class.

    Args:
        labels: (N,) class numbers, with at least two rows of every class.
        eval_fraction: Share of the rows of every class to hold out.
    """
    rng = np.random.default_rng(SPLIT_SEED)
    is_held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(round(eval_fraction * len(rows)), 1), len(rows) - 1)
        is_held_out[rows[:count]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
