"""TensorBoard tracker: event files in the run directory. Needs the `tensorboard` extra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.optional_packages import require_package
from pipeline.monitoring.events import ROLLBACK, Event


class TensorBoardTracker:
    """Writes each metric as a scalar named by its key, and hides the points of removed rows.

    Each row is flushed before the next one, so a kill loses no row that metrics.jsonl has.
    """

    def __init__(self, folder: Path, start_step: int, recorded: Iterable[Mapping[str, Any]]) -> None:
        """Open a new event file.

        Args:
            folder: Directory of the event files; created if it is missing.
            start_step: First step whose points in older event files are hidden.
            recorded: Lines of metrics.jsonl from `start_step` on. They are written again, since their points
                are hidden.

        Raises:
            ConfigError: The tensorboard package is missing.
        """
        self._open = partial(import_writer(), str(folder))
        self._writer = self._open(purge_step=start_step)
        for line in recorded:
            if "event" in line:
                event = Event(line["event"], line["message"], line.get("advice", ""))
                self.tell(line["step"], event)
            else:
                self.write(line["step"], {key: value for key, value in line.items() if key != "step"})

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add one scalar for each metric."""
        for key, value in row.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def tell(self, step: int, event: Event) -> None:
        """Add the event as a text named `events/NAME`. A rollback also hides the points after its step."""
        if event.name == ROLLBACK:
            self._writer.close()
            self._writer = self._open(purge_step=step + 1)
        self._writer.add_text(f"events/{event.name}", event.line, step)
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        """Close the file."""
        self._writer.close()


def import_writer() -> Any:
    """Import and return torch's class SummaryWriter, which has no type annotations.

    Raises:
        ConfigError: The tensorboard package is missing.
    """
    require_package("tensorboard", "log.tensorboard: true", "set log.tensorboard=false")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter
