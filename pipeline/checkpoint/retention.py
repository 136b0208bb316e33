"""Which checkpoints of a run stay, and the removal of the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.catalog import check, folder_name, remove, steps_in
from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.checkpoint.verify import check_sizes
from pipeline.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    keep_last: int
    """The newest ones; at least 1."""
    keep_every: int = 0
    """Steps that are a multiple of it stay for ever; 0: none."""
    keep_best: bool = False
    """The one with the lowest evaluation loss stays."""

    def stays(self, losses: Mapping[int, float | None]) -> set[int]:
        """The steps that stay, of these: step -> evaluation loss (None: not known)."""
        steps = sorted(losses)
        stays = set(steps[-max(1, self.keep_last) :])
        if self.keep_every > 0:
            stays |= {step for step in steps if step % self.keep_every == 0}
        known = {step: loss for step, loss in losses.items() if loss is not None and not math.isnan(loss)}
        if self.keep_best and known:
            stays.add(min(known, key=lambda step: (known[step], -step)))
        return stays


class Pruner:
    """Removes checkpoints beyond the policy, once their successor is seen to be complete.

    What is not complete, or of another format, neither counts nor goes: it may be all that is left of a run.
    Nor do later steps: a run went on from before them.
    """

    def __init__(self, folder: Path, retention: Retention):
        self._folder = folder
        self._retention = retention
        self.bad: set[int] = set()
        """Steps known to be damaged."""
        self._losses: dict[int, float | None] = {}  # a manifest of many fragments takes long to read

    def prune(self, manifest: Manifest) -> None:
        """Removes what the policy does not keep.

        Args:
            manifest: Of the checkpoint just saved.
        """
        newest = manifest.global_step
        self.bad.discard(newest)
        path = self._folder / folder_name(newest)
        try:
            if not (path / MANIFEST).is_file() or check_sizes(path, manifest):
                raise CheckpointError(f"{path.name} is not complete")
            self._losses[newest] = manifest.eval_loss
            counted = {}
            for step, path in steps_in(self._folder).items():
                if step > newest or step in self.bad:
                    continue
                try:
                    if step not in self._losses:
                        self._losses[step] = check(path).eval_loss
                    counted[step] = self._losses[step]
                except CheckpointError as error:
                    log.info("%s stays and does not count: %s", path.name, error)
            for step in counted.keys() - self._retention.stays(counted):
                remove(self._folder / folder_name(step))
        except (CheckpointError, OSError) as error:
            log.warning("old checkpoints stay: %s", error)
