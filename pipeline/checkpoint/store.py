"""Checkpoints of one run: written beside, made visible by one rename, counted only with their marker."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.errors import CheckpointError

log = logging.getLogger(__name__)

MARKER = "COMPLETE"


class CheckpointStore:
    """`<run_dir>/checkpoints/step-00000100/`: the engine's files, `state.json`, and `COMPLETE`."""

    def __init__(self, folder: Path, keep_last: int, job: Job):
        self.folder = folder
        self._keep_last = keep_last
        self._job = job

    def save(self, engine: Engine, state: dict[str, Any]) -> None:
        """Writes a checkpoint and removes those beyond `keep_last`. Collective.

        Raises:
            CheckpointError: it cannot be written (a full disk, no permission).
        """
        final = self.folder / f"step-{state['global_step']:08d}"
        if (final / MARKER).exists():
            return
        partial = final.with_suffix(".partial")
        is_main = self._job.ranks.is_main_process
        try:
            if is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._job.barrier()
            engine.save(partial)
            self._job.barrier()  # every rank's share is there
            if is_main:
                record = state | {"world_size": self._job.ranks.world_size}
                (partial / "state.json").write_text(json.dumps(record, indent=2))
                (partial / MARKER).touch()
                _sync_tree(partial)
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
                _sync(self.folder)
                self._prune()
        except OSError as error:
            raise CheckpointError(
                f"{partial}: the checkpoint cannot be written: {error.strerror or error}; "
                "those before it are intact"
            ) from None
        self._job.barrier()
        log.info("saved %s", final)

    def _prune(self) -> None:
        for old in complete_checkpoints(self.folder)[: -self._keep_last]:
            shutil.rmtree(old, ignore_errors=True)

    def load(self, engine: Engine, folder: Path) -> dict[str, Any]:
        """Reads one checkpoint into the engine and returns what `save` was given. Collective.

        Raises:
            CheckpointError: saved on another number of ranks or by another engine, or not readable.
        """
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        if state["world_size"] != self._job.ranks.world_size:
            raise CheckpointError(
                f"{folder} was saved on {state['world_size']} ranks, this job has "
                f"{self._job.ranks.world_size}; start {state['world_size']} ranks, or a new run with "
                "checkpoint.resume=never"
            )
        engine.load(folder)
        return state


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that count, oldest first."""
    return sorted(marker.parent for marker in folder.glob(f"step-*[0-9]/{MARKER}"))


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
