"""Answers as segments of rows: what a batch of preferences holds, held to on the host, and log-probabilities
summed by segment.

Shapes: B rows, T tokens, S segments of a row at the most.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.data.batches import IGNORE_INDEX, on_host, shown
from pipeline.errors import ConfigError, DataError
from pipeline.objectives.cross_entropies import OverVocabulary
from pipeline.objectives.interface import TARGET_KEYS, Batch, LossSum
from pipeline.objectives.router import router_of
from pipeline.objectives.sequence_group import SequenceGroup, group_of

SEGMENTS, KINDS, MARGINS, REFERENCE = "segments", "segment_kinds", "margins", "reference_logps"
SEGMENT_KEYS = (SEGMENTS, KINDS, MARGINS, REFERENCE)


@dataclass(frozen=True)
class Segments:
    """What a model says of the segments of a micro-batch."""

    logps_BS: Tensor
    """Log-probabilities of their labels summed, fp64; 0 where there are none."""
    tokens_BS: Tensor
    """How many labels, fp64."""
    kinds_BS: Tensor
    group: SequenceGroup
    """Ranks that compute the same of them."""

    @property
    def per_token_BS(self) -> Tensor:
        """The mean log-probability of a label."""
        return self.logps_BS / self.tokens_BS.clamp(min=1)


class BySegment(OverVocabulary):
    """What objectives on the log-probabilities of answers have in common.

    A batch holds, besides a language model's entries, `segments` (B, T) int64: which of its row's segments a
    token belongs to, -1 in padding; `segment_kinds` (B, S) int64; and `reference_logps` (B, S) where the loss
    has a reference. Labels are -100 but for the answers'.
    """

    unit: str
    has_reference = False
    """Whether it reads `reference_logps`."""
    targets: Sequence[str] = (*TARGET_KEYS, *SEGMENT_KEYS)

    @abstractmethod
    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""

    @abstractmethod
    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""

    def segments(self, model: Callable[..., Any], batch: Batch) -> Segments:
        """Runs the model. Collective where rows are cut."""
        router = router_of(model)
        if router is not None and router.coefficient:
            raise ConfigError(
                f"model.extra.output_router_logits: the routers' auxiliary loss is not part of objective "
                f"{self.name}; set it to false"
            )
        losses_BT, _ = self.losses(model, batch, of_tokens=True)
        kinds_BS, segments_BT = batch[KINDS], batch[SEGMENTS]
        in_one = (self._labels(batch) != IGNORE_INDEX) & (segments_BT >= 0)
        row_B1 = torch.arange(len(kinds_BS), device=kinds_BS.device)[:, None] * kinds_BS.shape[1]
        index_N = (row_B1 + segments_BT.clamp(min=0)).flatten()
        # In fp64 neither the order of the sum nor how many answers share a row shows.
        found_N2 = torch.stack([-losses_BT.double() * in_one, in_one.double()], -1).view(-1, 2)
        sums = found_N2.new_zeros(kinds_BS.numel(), 2).index_add(0, index_N, found_N2)
        group = group_of(model)
        logps_BS, tokens_BS = group.total(sums.view(*kinds_BS.shape, 2)).unbind(-1)
        return Segments(logps_BS, tokens_BS.detach(), kinds_BS, group)

    def kinds(self, batch: Batch) -> Tensor:
        """`segment_kinds` (B, S) of a batch that was looked at on the host.

        Raises:
            DataError: it is no batch of preferences.
        """
        host = on_host(batch)
        if absent := [key for key in (SEGMENTS, KINDS) if not isinstance(host.get(key), Tensor)]:
            raise DataError(
                f"objective {self.name} reads {absent[0]!r}, and the batch has {shown(batch)}; data with "
                "answers to compare has it (data.kind: preference)"
            )
        kinds_BS, segments_BT = host[KINDS], host[SEGMENTS]
        if segments_BT.dtype != torch.int64 or kinds_BS.dim() != 2 or len(segments_BT) != len(kinds_BS):
            raise DataError(
                f"objective {self.name} wants {SEGMENTS!r} (samples, tokens) int64 and {KINDS!r} (samples, "
                f"segments), and the batch has {shown(batch)}"
            )
        if segments_BT.device.type == "cpu" and (highest := int(segments_BT.max())) >= kinds_BS.shape[1]:
            raise DataError(
                f"{SEGMENTS!r} has {highest}, and {KINDS!r} is for {kinds_BS.shape[1]} segments a row: "
                f"expected -1 (none) to {kinds_BS.shape[1] - 1}"
            )
        kinds: Tensor = kinds_BS
        return kinds

    def reference(self, batch: Batch) -> Tensor:
        """`reference_logps` (B, S), fp64.

        Raises:
            DataError: the batch has none.
        """
        found = batch.get(REFERENCE)
        if not isinstance(found, Tensor) or found.shape != batch[KINDS].shape:
            raise DataError(
                f"objective {self.name} reads {REFERENCE!r} (samples, segments), and the batch has "
                f"{shown(batch)}"
            )
        return found.double()
