"""Checkpoints of a test, in a folder."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.catalog import Retention
from pipeline.checkpoint.store import CheckpointStore
from pipeline.distributed.process_group import Job


def store_in(folder: str | Path, job: Job) -> CheckpointStore:
    """Collective."""
    return CheckpointStore(Path(folder), Retention(keep_last=2), job, "a test")
