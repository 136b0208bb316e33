"""Reading words of any length from images of any width, with CTC: see docs/how-to/extending.md."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

LETTERS, HEIGHT, BLANK = 8, 8, 0
Sample = tuple[Tensor, Tensor]


def words(split: str, num_samples: int = 256) -> list[Sample]:
    """Return samples `(image, word)`: (1, HEIGHT, width), 3 to 6 columns a letter, and letters from 1 on.

    A list is a data set. Called with "train" and with "eval".
    """
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    samples = []
    for length in torch.randint(2, 6, (num_samples,), generator=generator).tolist():
        word = torch.randint(1, LETTERS + 1, (length,), generator=generator)
        columns = torch.randint(3, 7, (length,), generator=generator)
        image = F.one_hot(word - 1, HEIGHT).float().repeat_interleave(columns, dim=0).T
        samples.append((image[None] + 0.1 * torch.randn(image.shape, generator=generator), word))
    return samples


def pad(samples: list[Sample]) -> dict[str, Tensor]:
    """Return a batch: images padded with zeros to the widest, words one behind the other."""
    images, texts = zip(*samples, strict=True)
    by_column = pad_sequence([image[0].T for image in images], batch_first=True)  # (B, widest, HEIGHT)
    return {
        "images": by_column.transpose(1, 2)[:, None],
        "widths": torch.tensor([image.shape[-1] for image in images]),
        "texts": torch.cat(texts),
        "lengths": torch.tensor([len(text) for text in texts]),
    }


class Reader(nn.Module):
    """Convolutions, then an LSTM over the columns."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d((2, 1))
        )
        self.columns = nn.LSTM(16 * HEIGHT // 2, width, bidirectional=True, batch_first=True)
        self.scores = nn.Linear(2 * width, 1 + LETTERS)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, HEIGHT, W) -> scores of each column: (B, W, blank and letters)."""
        features = self.convolutions(images)
        hidden, _ = self.columns(features.flatten(1, 2).transpose(1, 2))
        scores: Tensor = self.scores(hidden)
        return scores


def ctc(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the SUM over the micro-batch. `widths`, `texts`, `lengths` are no arguments of forward."""
    log_probabilities = scores.log_softmax(-1).transpose(0, 1)  # fp32, whatever the model computes in
    return F.ctc_loss(
        log_probabilities, batch["texts"], batch["widths"], batch["lengths"], BLANK, reduction="sum"
    )
