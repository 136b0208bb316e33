"""Micro-batch sizes that were found, one small file each, named by all that decides them. Not collective.

A size that is about to be tried is written down before: where the process does not live to tell, on a CPU the
kernel kills it, the next start knows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.files import CONFIGURATION_LIMIT, read_plain, replace_file

log = logging.getLogger(__name__)

FOLDER = "micro_batch_sizes"


@dataclass
class KeptSize:
    """What is known of one recipe on one kind of device.

    Args:
        cache: Folder of all that is kept.
        known: JSON values that decide the size.
    """

    cache: Path
    known: Mapping[str, Any]
    found: int | None = None
    needs: int = 0
    """Bytes that the fullest rank held with it."""
    trying: int | None = None
    """A trial that no process has told the end of, or of which memory ran out."""
    tried: Mapping[str, int] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Where it lies, or will."""
        text = json.dumps(self.known, sort_keys=True)
        return self.cache / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def read(self) -> None:
        """Takes up what an earlier start has left; what cannot be read is nothing."""
        try:
            kept = json.loads(read_plain(self.file, CONFIGURATION_LIMIT))
            numbers = {name: kept[name] for name in ("found", "needs", "trying")}
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError):
            return
        if (
            all(value is None or type(value) is int for value in numbers.values())
            and numbers["needs"] is not None
        ):
            self.found, self.needs, self.trying = numbers["found"], numbers["needs"], numbers["trying"]

    def write(self) -> None:
        """Whole or not at all; a folder that cannot be written costs a search at each start."""
        content = {
            "found": self.found,
            "needs": self.needs,
            "trying": self.trying,
            "tried": self.tried,
            "known": self.known,
        }
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.file, json.dumps(content, indent=2))
        except OSError as error:
            log.warning("micro_batch_size is not kept for the next start: %s: %s", self.file, error.strerror)
