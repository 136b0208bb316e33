"""Makes checkpoint stores for tests."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.catalog import Retention
from pipeline.checkpoint.store import CheckpointStore
from pipeline.distributed.process_group import Job


def make_store(folder: str | Path, job: Job) -> CheckpointStore:
    """Return a store that keeps the last two checkpoints in the folder. Collective."""
    return CheckpointStore(Path(folder), Retention(keep_last=2), job, "a test")
