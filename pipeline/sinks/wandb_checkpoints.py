"""Checkpoints of a run as artifacts of W&B: where the files lie, not what is in them.

On a thread of its own: the client asks the server before it takes one, and rows do not wait for that.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.events import Event, Histograms, Shown

if TYPE_CHECKING:  # the sinks load no torch
    from pipeline.checkpoint.catalog import SavedCheckpoint

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

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Nothing."""

    def tell(self, step: int, event: Event) -> None:
        """Nothing."""

    def show(self, what: Shown) -> None:
        """Log the checkpoints that are new. Waits for the server."""
        if isinstance(what, Histograms):
            return
        known, self._known = self._known, {}
        for each in what.saved:
            aliases = {f"step-{each.step}"}
            aliases |= {"latest"} if each is what.saved[-1] else set()
            aliases |= {"best"} if each is what.best else set()
            self._known[each] = aliases
            if not aliases <= known.get(each, set()):
                try:
                    self._run.log_artifact(self._artifact(each), aliases=sorted(aliases))
                except (OSError, ValueError):  # wandb raises ValueError for a file that is not there
                    if each.folder.exists():  # else it was deleted before its turn came
                        raise

    def close(self, exit_code: int) -> None:
        """Nothing."""

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
