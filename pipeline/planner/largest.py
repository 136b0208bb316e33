"""Which micro-batch is the largest that fits, from a few that were tried: what to try next, and when to stop.

Numbers alone. Who tries, and how memory is measured, is pipeline.training.micro_batch's concern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_TRIALS = 6
MARGIN = 0.90
"""Of what a rank may take: what a step may, measured. Rows differ a little, and freed blocks leave gaps."""
TRIED_UP_TO = 0.95
"""The same of what a trial may be predicted to take: what lies between the two is decided by measuring."""
LONGEST_STRIDE = 8
"""A trial is at most so many times the largest one before it: what comes of it is known from those alone."""
FAR = 4
"""The same behind the first one, before it counts as far."""


@dataclass(frozen=True)
class Use:
    """Bytes that one rank held in a trial."""

    forward: int
    """The most in the last forward, above what there was before it."""
    work: int
    """The most before the optimizer stepped."""
    update: int
    """The most from then on, which no number of rows changes."""
    limit: int
    """What the rank may hold."""

    @property
    def most(self) -> int:
        """Over the whole step."""
        return max(self.work, self.update)


Tried = Mapping[int, Sequence[Use]]
"""Micro-batch size -> what each rank held, in the order of ranks."""


def fits(uses: Sequence[Use]) -> bool:
    """Whether it does on every rank."""
    return all(use.most <= MARGIN * use.limit for use in uses)


def largest(tried: Tried) -> int | None:
    """The largest that was tried and fits; None: none does."""
    return max((size for size, uses in tried.items() if fits(uses)), default=None)


def predicted(size: int, tried: Tried) -> list[float]:
    """Bytes that each rank would hold. What comes before the update grows with the rows: by the line through
    the two trials that are nearest, or of a single one by what its forward added.
    """
    sizes = sorted(tried)
    found = []
    for rank in range(len(tried[sizes[0]])):
        work = {each: tried[each][rank].work for each in sizes}
        if len(sizes) == 1:
            high, slope = sizes[0], tried[sizes[0]][rank].forward / sizes[0]
            slope *= 2 if size > FAR * high else 1  # a backward that recomputes adds more than the forward
        else:
            low, high = min(pairwise(sizes), key=lambda pair: abs(pair[0] + pair[1] - 2 * size))
            slope = max(0.0, (work[high] - work[low]) / (high - low))
        update = min(uses[rank].update for uses in tried.values())  # a heap may keep more of larger ones
        found.append(max(work[high] + slope * (size - high), update))
    return found


def share(size: int, tried: Tried) -> float:
    """The same as a share of what the rank may hold, of the rank where that is largest."""
    limits = (use.limit for use in tried[max(tried)])
    return max(held / limit for held, limit in zip(predicted(size, tried), limits, strict=True))


def next_trial(candidates: Sequence[int], tried: Tried, guess: int | None) -> int | None:
    """What to try next; None: `largest` is the answer.

    The first two are a quarter and a half of a guess, which may be twice too large, or the two smallest. Then
    what is predicted to fit is confirmed, until the next larger one is known, or predicted, not to.

    Args:
        candidates: Ascending.
        guess: Of the answer.
    """
    if len(tried) >= MOST_TRIALS:
        return None
    if not tried:
        return _up_to(candidates, guess / 4) if guess else candidates[0]
    best = largest(tried)
    too_large = min((size for size, uses in tried.items() if not fits(uses)), default=None)
    left = [
        size
        for size in candidates
        if size > (best or 0) and (too_large is None or size < too_large) and size not in tried
    ]
    if best is None:
        smaller = [size for size in left if share(size, tried) <= MARGIN]
        return smaller[-1] if smaller else candidates[0] if candidates[0] not in tried else None
    within = [
        size
        for size in left
        if size <= max(LONGEST_STRIDE * max(tried), left[0]) and share(size, tried) <= TRIED_UP_TO
    ]
    if len(tried) == 1 and left:
        return _second(candidates, within, best, guess)
    if not within:
        return None
    expected = [size for size in within if share(size, tried) <= MARGIN]
    return expected[-1] if expected else within[0]


def _second(candidates: Sequence[int], within: Sequence[int], first: int, guess: int | None) -> int | None:
    """Behind a first one that fits: a larger one nearby, else a smaller one, for a line to reach further."""
    if within and within[0] <= 2 * first:
        return max(within[0], _up_to(within, (guess or 0) / 2))
    smaller = [size for size in candidates if size < first]
    return smaller[-1] if smaller else within[0] if within else None


def _up_to(candidates: Sequence[int], most: float) -> int:
    return max((size for size in candidates if size <= most), default=candidates[0])
