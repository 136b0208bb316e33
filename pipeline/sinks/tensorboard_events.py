"""TensorBoard event files under the run directory. Needs the `tensorboard` extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.events import Event
from pipeline.optional_packages import require


class TensorBoardSink:
    """Writes each metric as a scalar under its own key."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        """Open a new event file.

        Args:
            folder: Directory of the event files; made where it is missing.
            start_step: Rows of later steps in older event files are no longer shown; 0 hides them all.

        Raises:
            ConfigError: The tensorboard package is missing.
        """
        make = import_writer()
        self._writer = make(str(folder), purge_step=start_step + 1 if start_step > 0 else 0)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add one scalar a metric."""
        for key, value in row.items():
            self._writer.add_scalar(key, value, step)

    def tell(self, step: int, event: Event) -> None:
        """Add a text under the event's name."""
        self._writer.add_text(f"events/{event.name}", event.line, step)

    def close(self, exit_code: int) -> None:
        """Write out the queue and close the file."""
        self._writer.close()


def import_writer() -> Any:
    """torch's SummaryWriter, which torch leaves untyped.

    Raises:
        ConfigError: The tensorboard package is missing.
    """
    require("tensorboard", "log.tensorboard: true", "set log.tensorboard=false")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter
