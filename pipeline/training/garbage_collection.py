"""What a run keeps to its end is no affair of Python's garbage collector."""

from __future__ import annotations

import gc


class LongLived:
    """Objects that collections pass over: what is imported when this is entered, then what `set_aside` finds.

    With transformers imported there are 400,000, and a collection that looks at all of them takes 0.2 s: some
    while a model is built, and later one on one rank in some step, in which all others wait for it.

    Where the process has frozen objects of its own this does nothing: they could not be told apart again.
    """

    def __init__(self) -> None:
        self._is_ours = False

    def set_aside(self) -> None:
        """What there is by now: the model, the engine, what was compiled."""
        if self._is_ours:
            gc.collect()  # garbage that were frozen would stay
            gc.freeze()

    def __enter__(self) -> LongLived:
        self._is_ours = not gc.get_freeze_count()
        if self._is_ours:
            gc.freeze()
        return self

    def __exit__(self, *raised: object) -> None:
        """Gives all back: what the run has held can be collected."""
        if self._is_ours:
            gc.unfreeze()
        self._is_ours = False
