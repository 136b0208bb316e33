"""Checkpoints of one run: saved beside training, published by one rename, verified before they are loaded."""

from __future__ import annotations

import json
import logging
import platform
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.checkpoint.catalog import (
    Pruner,
    Retention,
    SavedCheckpoints,
    newest_whole,
    remove_after,
    set_aside_after,
)
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.peers import find_peers
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.saving import Kept, NotSavedError, Save, prepare
from pipeline.checkpoint.shards import EngineState
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOutcome:
    """How a save went; the same on every rank but for the times, which are this rank's."""

    step: int
    problem: str | None
    """One line; None: it is saved, or on its way."""
    stall_seconds: float
    """How long training stood still."""
    write_seconds: float | None
    """From the first byte to the rename; None: it is still being written."""


class CheckpointStore:
    """`<run_dir>/checkpoints/step-00000100/`: a file a rank, and `manifest.json`.

    While a checkpoint is written in the background, the thread that does it talks to its peers over their
    own gloo group. Such threads wait only for each other, never for a main thread, so they come to an end
    whatever collective training is in.

    Args:
        folder: Of the checkpoints; made if missing.
        retention: Which of them stay.
        job: The ranks. Collective: every rank makes its store at the same point.
        split: How the work is split, in words, for the manifest.
        host: This machine's name, for messages.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: Path, retention: Retention, job: Job, split: str, host: str = platform.node()):
        self.folder = folder
        self._pruner = Pruner(folder, retention)
        self._split = split
        try:
            self._peers = find_peers(job, folder, host)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written: {error}; choose another run_dir") from None
        self._kept = Kept(job.device)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # Filled by the thread while `poll` empties it: a list that is swapped there would lose what comes.
        self._finished: queue.SimpleQueue[SaveOutcome] = queue.SimpleQueue()
        self._saved: dict[int, bool] = {}  # step -> whether its evaluation loss stands in it
        self._is_closed = False
        self._show: Callable[[SavedCheckpoints], None] | None = None

    def shown_to(self, show: Callable[[SavedCheckpoints], None]) -> None:
        """Has this rank show the checkpoints that count now, and whenever they change: on any thread."""
        self._show = show
        self._changed()

    def _changed(self) -> None:
        if self._show is not None:
            self._show(self._pruner.saved())

    def prepare(self, engine: EngineState) -> None:
        """After a first step, where saves in the background will come: takes their memory. Collective."""
        prepare(engine, self._peers, self._kept)

    def hold_device(self) -> None:
        """The device goes on once it has copied what is being saved, whoever changes it next."""
        if self._kept.snapshot is not None:
            self._kept.snapshot.hold_device()

    def save(self, engine: EngineState, state: dict[str, Any], wait: bool = False) -> SaveOutcome:
        """Saves, and removes what the policy does not keep. Collective. One save is under way at a time.

        Training stands still for a copy to host memory, from a GPU for the start of one that the next step
        waits for; a background thread does the rest. Where memory is short or `wait` is set, it stands still
        until all is on the disk.

        Args:
            state: JSON values; `global_step`, and `eval_loss` where there is one to choose the best by.

        Returns:
            How it went: what the system refuses (a full disk) does not end the run. Of a save in the
            background only the start is known.
        """
        started = time.perf_counter()
        self.wait()
        step = int(state["global_step"])
        if self._saved.get(step, False) or (step in self._saved and state.get("eval_loss") is None):
            return SaveOutcome(step, None, time.perf_counter() - started, 0.0)
        fields = {"split": self._split, "state": json.loads(json.dumps(state)), "scalars": engine.scalars()}
        save = Save(self.folder, step, fields, self._peers, self._kept, self._pruner)
        problem = None
        try:
            if not save.run(engine, wait):
                outcome = SaveOutcome(step, None, time.perf_counter() - started, None)
                self._finish_beside(save, outcome)
                return outcome
        except NotSavedError as error:
            problem = str(error)
        stall = time.perf_counter() - started
        outcome = self._ended(save, SaveOutcome(step, problem, stall, save.write_seconds))
        if problem is None and not wait:
            self._finished.put(outcome)
        return outcome

    def save_final(self, engine: EngineState, state: dict[str, Any]) -> SaveOutcome:
        """As save with `wait`, for the end of a run.

        Raises:
            CheckpointError: it is not saved.
        """
        outcome = self.save(engine, state, wait=True)
        if outcome.problem is not None:
            raise CheckpointError(outcome.problem)
        return outcome

    def poll(self) -> list[SaveOutcome]:
        """Saves without `wait` that ended since the last call. Does not wait; not collective."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        return [self._finished.get() for _ in range(self._finished.qsize())]

    def close(self) -> None:
        """Waits for the save under way, and gives back what a store holds. Before the process group ends."""
        try:
            self.wait()
        finally:
            if not self._is_closed:
                self._peers.close()
            self._is_closed = True

    def wait(self) -> None:
        """For the save under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _finish_beside(self, save: Save, outcome: SaveOutcome) -> None:
        """The rest of a save, on a thread of its own."""

        def finish() -> None:
            problem = None
            try:
                save.finish()
            except NotSavedError as error:
                problem = str(error)
            except BaseException as error:
                self._failure = error
                return
            ended = replace(outcome, problem=problem, write_seconds=save.write_seconds)
            self._finished.put(self._ended(save, ended))

        self._thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self._thread.start()

    def _ended(self, save: Save, outcome: SaveOutcome) -> SaveOutcome:
        if outcome.problem is None:
            self._saved[outcome.step] = save.fields["state"].get("eval_loss") is not None
            self._changed()
            return outcome
        line = f"step {outcome.step} is not saved: {outcome.problem}; the checkpoints before it are intact"
        log.warning("%s", line)
        return replace(outcome, problem=line)

    def choose(self) -> Manifest | None:
        """The newest checkpoint that verifies on all machines; says what it passes over, and why. Collective.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        manifest, bad = newest_whole(self.folder, self._peers)
        self._pruner.bad |= bad
        if manifest is not None:
            log.info("going on with %s from %s", self.folder.parent, manifest.folder.name)
        return manifest

    @phase(Phase.RESUMING)
    def restore(self, engine: EngineState, manifest: Manifest) -> dict[str, Any]:
        """Fills the engine from what `choose` gave; what `save` was given. Collective."""
        began = time.perf_counter()
        with CheckpointReader(manifest) as reader:
            engine.restore(reader)
        self._saved[manifest.global_step] = manifest.state.get("eval_loss") is not None
        log.info(
            "%s, saved by %s: %.0f MB read in %.1f s",
            manifest.folder.name,
            manifest.split,
            manifest.num_bytes / 1e6,
            time.perf_counter() - began,
        )
        return manifest.state

    def go_back(self, engine: EngineState, until: int) -> dict[str, Any] | None:
        """The newest whole checkpoint of a step up to `until`, and none after it from now on. Collective.

        Returns:
            What `save` was given; None: there is no such checkpoint, and nothing was changed.
        """
        self.wait()
        manifest, _ = newest_whole(self.folder, self._peers, until)
        if manifest is None:
            return None
        state = self.restore(engine, manifest)
        for problem in filter(
            None, self._peers.attempt(partial(remove_after, self.folder, manifest.global_step))
        ):
            log.warning("later checkpoints stay: %s", problem)
        self._saved = {step: known for step, known in self._saved.items() if step <= manifest.global_step}
        self._changed()
        return state

    def distrust_after(self, step: int) -> None:
        """Sets checkpoints of later steps aside. Collective."""
        self.wait()
        for problem in filter(None, self._peers.attempt(partial(set_aside_after, self.folder, step))):
            log.warning("checkpoints after step %d are not to be trusted, and stay: %s", step, problem)
        self._changed()

    def resume(self, engine: EngineState) -> dict[str, Any] | None:
        """`choose` and `restore`; None: there is no checkpoint. Collective."""
        manifest = self.choose()
        return None if manifest is None else self.restore(engine, manifest)
