"""Data and first weights of gpu_curve.py, equal on every machine and in every version of torch.

They are computed from raw words of numpy's PCG64 by integer arithmetic and one multiplication in fp32. NEP 19
guarantees that PCG64 returns the same words in every version of numpy.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

IGNORED = -100  # label of a token without a loss
LARGEST_WEIGHT = 0.035  # bound of a uniform distribution with a standard deviation of 0.02
# Input embeddings that the output layer does not share are larger. After small ones the first normalisation
# multiplies gradients by 35: the gradient norm of GPT-2 jumps to 30 and rounding differences grow 50 times.
INPUT_EMBEDDINGS = ("wpe.", "embed_tokens.")
EMBEDDING_SCALE = 8

FREQUENT_WORDS = 64
TOPICS = 8
WORDS_OF_TOPIC = 16
SHORTEST_DOCUMENT = 12
LENGTH_CHOICES = 64


def raw_words(name: str, count: int) -> NDArray[np.uint64]:
    """Return `count` random 64-bit words that depend on the name alone."""
    generator = np.random.PCG64(zlib.crc32(name.encode()))
    return np.atleast_1d(generator.random_raw(count))


def random_integers(name: str, count: int, below: int) -> NDArray[np.int64]:
    """Return `count` integers of at least 0 and less than `below`."""
    upper_half = raw_words(name, count) >> np.uint64(32)
    return ((upper_half * np.uint64(below)) >> np.uint64(32)).astype(np.int64)


def rows(
    split: str, num_samples: int, length: int, vocab_size: int, packed: bool, separate: bool = True
) -> CurveRows | None:
    """Return the training rows: `data.kind: curve_inputs:rows`. There are no held-out rows."""
    return CurveRows(num_samples, length, vocab_size, packed, separate) if split == "train" else None


class CurveRows(Dataset[dict[str, Tensor]]):
    """Rows of documents from which a model learns within 20 steps.

    Five of eight words follow from the word before, two belong to the document's topic, and one is any word.
    A packed row holds several documents: the last token of each has no label, and in every second document
    the first quarter has none, as a prompt.

    Args:
        num_samples: Number of rows.
        length: Tokens of a row.
        packed: Whether a row holds several documents, with positions that start again at each.
        separate: Whether packed rows have positions; without them documents attend to each other.
    """

    is_deterministic = True

    def __init__(self, num_samples: int, length: int, vocab_size: int, packed: bool, separate: bool = True):
        self.vocab_size = vocab_size
        self._has_positions = packed and separate
        tokens_per_row = length + 1
        ends = _document_ends(num_samples * tokens_per_row, tokens_per_row, packed)
        tokens = _tokens(ends, vocab_size)
        positions = np.concatenate([np.arange(size) for size in np.diff(ends, prepend=0)])
        labels = np.roll(tokens, -1)
        if packed:
            labels[ends - 1] = IGNORED
            for start, end in list(zip(np.append(0, ends), ends, strict=False))[1::2]:
                labels[start : start + (end - start) // 4] = IGNORED
        shape = (num_samples, tokens_per_row)
        self.tokens, self.labels, self.positions = (
            torch.from_numpy(np.ascontiguousarray(each.reshape(shape)[:, :-1]))
            for each in (tokens, labels, positions)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {"input_ids": self.tokens[index], "shift_labels": self.labels[index]}
        if self._has_positions:
            row["position_ids"] = self.positions[index]
        return row


def _document_ends(num_tokens: int, tokens_per_row: int, packed: bool) -> NDArray[np.int64]:
    """Return the index after each document's last token; the end of a row also ends its document."""
    row_ends = np.arange(tokens_per_row, num_tokens + 1, tokens_per_row)
    if not packed:
        return row_ends
    most_documents = num_tokens // SHORTEST_DOCUMENT + 1
    lengths = SHORTEST_DOCUMENT + random_integers("document lengths", most_documents, LENGTH_CHOICES)
    ends = np.cumsum(lengths)
    return np.union1d(ends[ends < num_tokens], row_ends)


def _tokens(ends: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Return the tokens of documents with these ends."""
    num_tokens = int(ends[-1])
    follower = random_integers("followers", vocab_size, FREQUENT_WORDS)
    words_of_topic = random_integers("topics", TOPICS * WORDS_OF_TOPIC, vocab_size).reshape(TOPICS, -1)
    topics = np.repeat(random_integers("topic of document", len(ends), TOPICS), np.diff(ends, prepend=0))
    kinds = random_integers("kinds", num_tokens, 8)
    of_topic = words_of_topic[topics, random_integers("word of topic", num_tokens, WORDS_OF_TOPIC)]
    tokens = random_integers("any word", num_tokens, vocab_size)
    for index in range(num_tokens):
        if index and kinds[index] < 5:
            tokens[index] = follower[tokens[index - 1]]
        elif kinds[index] < 7:
            tokens[index] = of_topic[index]
    return tokens


def write_weights(model: nn.Module, path: Path) -> None:
    """Write the first weights of a model, which depend only on the names and shapes of its parameters."""
    tensors = {name: first_values(name, p.shape) for name, p in model.named_parameters()}
    save_file(tensors, path)


def first_values(name: str, shape: torch.Size) -> Tensor:
    """Return a parameter's first values, uniform around 0, or around 1 for the scale of a normalisation."""
    steps = (raw_words(name, shape.numel()) >> np.uint64(40)).astype(np.int64) - 2**23
    scale = EMBEDDING_SCALE if any(each in name for each in INPUT_EMBEDDINGS) else 1
    values = steps.astype(np.float32) * np.float32(scale * LARGEST_WEIGHT / 2**23)
    if len(shape) == 1 and name.endswith("weight"):
        values = values + np.float32(1)
    return torch.from_numpy(values.reshape(tuple(shape)))


def checksum(data: CurveRows, weights: Path) -> str:
    """Return a checksum of all rows and first weights."""
    values = [tensor for _, tensor in sorted(load_file(weights).items())]
    crc = 0
    for tensor in (data.tokens, data.labels, data.positions, *values):
        crc = zlib.crc32(tensor.numpy().tobytes(), crc)
    return f"{crc:08x}"
