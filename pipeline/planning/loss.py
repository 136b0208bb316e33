"""What the output layer and the loss take, in bytes: by the sizes of their chunks (chunks.py)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.planning.chunks import CPU_PART, block_of_rows, chunk_of_tokens, filled_up
from pipeline.planning.work import Work


@dataclass(frozen=True)
class LossBytes:
    """Beside the gradient of the hidden states."""

    forward: float
    """The most in its forward."""
    kept: float
    """From its forward to its backward."""
    backward: float
    """The most in its backward, what was kept included."""


def loss_bytes(work: Work, hidden: int, words: int, trained: bool = True) -> LossBytes:
    """Of one micro-batch.

    Args:
        words: Rows of this rank's output layer.
        trained: Whether its weight is.
    """
    on_cpu, size, tokens = work.device == "cpu", work.computes_in, work.tokens
    full = filled_up(words, work.device)
    copied = work.precision == "autocast" or full > words
    cast = full * hidden * size if copied else 0
    if work.loss == "scores":
        return LossBytes(0.0, 0.0, 0.0)
    block = block_of_rows(full, on_cpu)
    if work.loss == "logits":
        logits = tokens * words * size
        works = 3 * min(block, tokens) * words * 4
        kept = 2 * logits + cast
        return LossBytes(kept + max(logits, works), kept, kept + logits + works)
    chunk = chunk_of_tokens(tokens, words, size, on_cpu)
    works = 2 * min(chunk, block) * full * 4
    added = min(full * hidden, max(256 * hidden, CPU_PART)) * 6 if on_cpu and size == 2 else 0
    # Hidden states, their copy in half precision, and a copy of those alone that count.
    copies = tokens * hidden * (2 if work.precision == "half" else 4)
    copies += tokens * hidden * size * ((work.precision == "autocast") + (work.apart and on_cpu))
    gradient = full * hidden * 4 if trained else 0
    most = cast + copies + chunk * full * size + max(works, added) + 64 * tokens
    given = words * hidden * work.holds_in if trained and work.holds_in != 4 else 0
    if work.loss == "tokens":
        return LossBytes(most, 0.0, most + gradient + tokens * hidden * size + given)
    return LossBytes(most + gradient, gradient, gradient + given)
