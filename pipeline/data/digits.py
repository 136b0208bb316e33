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
SPLIT_SEED = 20240229  # constant, so that all runs have the same split


class DigitsDataset(Dataset[Batch]):
    """Images in memory; items have `inputs` (1, H, W) float32 from 0 to 1, and `labels` () int64."""

    is_deterministic = True

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
    """Return 1,797 images of 8 x 8 pixels in two splits with the same share of every class.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    require_package("sklearn", "data.kind: digits")
    from sklearn.datasets import load_digits  # importing it takes 1.7 s

    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0).float().unsqueeze(1)  # (N, 1, 8, 8)
    labels = torch.from_numpy(digits.target).long()
    train_rows, eval_rows = stratified_split(labels.numpy(), config.eval_fraction)
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


def stratified_split(
    labels: NDArray[np.int64], eval_fraction: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sorted row numbers of both splits; each split has at least one row of every class."""
    rng = np.random.default_rng(SPLIT_SEED)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        held_out[rows[: min(max(round(eval_fraction * len(rows)), 1), len(rows) - 1)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
