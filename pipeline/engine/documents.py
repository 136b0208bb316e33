"""Where documents begin in the rows of a batch: worked out on the host, for attention without a mask."""

from __future__ import annotations

from torch import Tensor

from pipeline.data.batches import LoadedBatch, on_host
from pipeline.models.document_attention import BOUNDS, document_bounds
from pipeline.objectives import Batch


def with_bounds(batch: Batch) -> Batch:
    """The batch with the bounds of its documents (see document_attention) where `position_ids` tell them.

    What a loader moved to a device is looked at on the host; only where a batch was made on the device is the
    device waited for.
    """
    seen = on_host(batch)
    positions, ids = seen.get("position_ids"), seen.get("input_ids")
    if BOUNDS in batch or "attention_mask" in batch:  # transformers looks for documents without a mask only
        return batch
    if not (isinstance(positions, Tensor) and isinstance(ids, Tensor) and positions.shape == ids.shape):
        return batch
    bounds = document_bounds(positions.cpu())
    is_pinned = positions.is_cuda or positions.is_pinned()
    return LoadedBatch({**batch, BOUNDS: bounds.pin_memory() if is_pinned else bounds}).known_as(batch)
