"""Checkpoints of a run as artifacts of W&B: where the files lie, not what is in them.

On a thread of its own: the client asks the server before it takes one, and training does not wait.
"""

from __future__ import annotations

import logging
import platform
import queue
import threading
from typing import Any

from pipeline.errors import one_line
from pipeline.events import SavedCheckpoint, SavedCheckpoints

logger = logging.getLogger(__name__)

LONGEST_HASHED = 2**20  # bytes


class CheckpointArtifacts:
    """Logs each checkpoint once, and once more where it becomes the newest or the best again: the server
    knows it by its files, and moves the alias.

    Args:
        run: Of wandb, started. Artifacts are named by its id.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._known: dict[SavedCheckpoint, set[str]] = {}  # with the aliases that it has
        self._coming: queue.SimpleQueue[tuple[Any, set[str]] | None] = queue.SimpleQueue()
        self._is_left = False
        self._thread = threading.Thread(target=self._log, name="wandb-checkpoints", daemon=True)
        self._thread.start()

    def take(self, what: SavedCheckpoints) -> None:
        """Looks at the new ones while they are there, and waits for no server."""
        known, self._known = self._known, {}
        for each in what.saved:
            aliases = {f"step-{each.step}"}
            aliases |= {"latest"} if each is what.saved[-1] else set()
            aliases |= {"best"} if each is what.best else set()
            self._known[each] = aliases
            if not aliases <= known.get(each, set()):
                self._coming.put((self._artifact(each), aliases))

    def close(self, seconds: float) -> None:
        """Before the run finishes; waits for the server so long at the most."""
        self._coming.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._is_left = True
            logger.warning("W&B did not take the last checkpoints within %.0f s", seconds)

    def _artifact(self, checkpoint: SavedCheckpoint) -> Any:
        import wandb

        folder = checkpoint.folder.resolve()
        metadata = {
            "step": checkpoint.step,
            "eval_loss": checkpoint.eval_loss,
            "folder": str(folder),
            "host": platform.node(),
        }
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", "model", metadata=metadata)
        for path in sorted(folder.iterdir()):
            # By their names, but for the manifest: it has the others' checksums, so that a step which is
            # saved anew is another version.
            is_hashed = path.suffix == ".json" and path.stat().st_size < LONGEST_HASHED
            artifact.add_reference(path.as_uri(), name=path.name, checksum=is_hashed)
        return artifact

    def _log(self) -> None:
        while (coming := self._coming.get()) is not None:
            artifact, aliases = coming
            try:
                self._run.log_artifact(artifact, aliases=sorted(aliases))
            except Exception as error:  # whatever wandb raises: training does not need it
                kind = type(error).__name__
                if self._is_left:  # one line is out
                    return
                logger.warning("W&B takes no more checkpoints (%s: %s)", kind, one_line(error))
                return
