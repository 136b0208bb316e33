"""What the data and the engine ask of a model."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.sharding import Sharding


@dataclass(frozen=True)
class ModelRequest:
    """Facts a builder fits the model to."""

    sharding: Sharding
    vocab_size: int | None = None
    """Entries of the tokenizer."""
    sequence_length: int | None = None
    """Tokens of the longest sequence the data yields."""
    num_classes: int | None = None
    """Classes of the data set."""
    num_channels: int | None = None
    """Channels of the images."""
    end_of_document_id: int | None = None
    """Token after each document."""
