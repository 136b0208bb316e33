"""Steps and evaluations without a target that counts: their loss is no loss."""

from __future__ import annotations

from pipeline.events import NO_TARGETS, Event
from pipeline.watchers import Seen

ADVICE = (
    "look at these samples: their labels are all -100 or have weight 0, as where a prompt fills the "
    "sequence; raise data.sequence_length, or take them out of the data"
)


class NoTargets:
    """Reports global batches and evaluation sets in which nothing counts in the loss."""

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        empty = [name for name, value in seen.row.items() if name.endswith("/targets") and not value]
        if empty:
            sets = ", ".join(name.removesuffix("/targets") for name in empty)
            return Event(NO_TARGETS, f"no target counts in any held-out sample of {sets}", ADVICE)
        if all(seen.counts):
            return None
        number, steps = sum(not count for count in seen.counts), len(seen.counts)
        first = step - steps + 1 + list(map(bool, seen.counts)).index(False)
        message = f"no target counts in the global batch of {number} of {steps} steps, first of step {first}"
        return Event(NO_TARGETS, message, ADVICE, fields={"at_step": float(first), "steps": float(steps)})
