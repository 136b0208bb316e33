"""Random bits of each token of a batch: a function of its document and its place in that one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.data.batches import on_host, shown
from pipeline.data.random_numbers import derive_seed, scrambled
from pipeline.errors import DataError


def token_keys(batch: Mapping[str, Any], *key: int) -> Tensor:
    """32 random bits of each token, and of how many tokens its document consists.

    The bits follow from `key`, from all ids of the document and from the place in it: a document has the same
    ones on any rank, in any row and micro-batch, with or without padding. Two equal documents have the same.

    Args:
        batch: `input_ids` (B, T). A document begins with a row and wherever `position_ids` do not go on
            counting; where there is an `attention_mask` (B, T), a row is one, without what is masked.

    Returns:
        (B, T) int64, on the host: the bits in the upper half, the number in the lower one.

    Raises:
        DataError: the batch has no such ids.
    """
    seen = on_host(batch)
    ids = seen.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise DataError(f"model.neftune_alpha: the batch has no input_ids (rows, tokens), but {shown(batch)}")
    counts, begins = _documents(seen, ids)
    starts = np.flatnonzero(begins)
    document = np.cumsum(begins.reshape(-1)) - 1
    before = np.cumsum(counts) - counts
    places = (before - before[starts][document]).astype(np.uint64)
    words = scrambled(ids.cpu().numpy().reshape(-1).astype(np.uint64) ^ (places << np.uint64(32))) * counts
    of_document = scrambled(np.add.reduceat(words, starts) ^ np.uint64(derive_seed(*key)))
    bits = scrambled(of_document[document] + places) >> np.uint64(32)
    lengths = np.add.reduceat(counts, starts)[document].astype(np.uint64)
    keys = (bits << np.uint64(32)) | lengths
    return torch.from_numpy(keys.view(np.int64).reshape(tuple(ids.shape)))


def _documents(seen: Mapping[str, Any], ids: Tensor) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """(B * T,): 1 where a token is one of its document's, else 0; (B, T): whether a document begins there."""
    begins = np.zeros(tuple(ids.shape), np.bool_)
    begins[:, 0] = True
    mask, positions = seen.get("attention_mask"), seen.get("position_ids")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return (mask.cpu().numpy() != 0).reshape(-1).astype(np.uint64), begins
    if mask is None and isinstance(positions, Tensor) and positions.shape == ids.shape:
        counted = positions.cpu().numpy()
        begins[:, 1:] = counted[:, 1:] != counted[:, :-1] + 1
    return np.ones(ids.numel(), np.uint64), begins
