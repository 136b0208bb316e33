"""Counts how often the host waits for the device, and where: torch's synchronization warnings, collected."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

SYNC = "synchronizing CUDA operation"


class HostWaits:
    """Counts the operations inside a `with` block for which the host waits for a CUDA device.

    On a CPU there is nothing to wait for, and `count` is None.
    """

    def __init__(self) -> None:
        self.stacks: Counter[str] = Counter()
        """Innermost frames outside torch -> number of waits there."""
        self._cleanup = ExitStack()

    @property
    def count(self) -> int | None:
        """Number of waits; None without a CUDA device."""
        import torch

        return self.stacks.total() if torch.cuda.is_available() else None

    def __enter__(self) -> HostWaits:
        import torch

        with ExitStack() as entered:
            entered.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = self._note  # type: ignore[assignment]
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
                entered.callback(torch.cuda.set_sync_debug_mode, "default")
            self._cleanup = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _note(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if SYNC in str(message):
            frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
            shown = [f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in frames[-3:]]
            self.stacks[" < ".join(reversed(shown))] += 1
