"""Checkpoints of one run: saved beside training, published by one rename, verified before they are loaded."""

from __future__ import annotations

import itertools
import json
import logging
import platform
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from pipeline.checkpoint.files import LayoutChangedError, streamed
from pipeline.checkpoint.folders import Pruner, Retention, folder_name, manifest_of, steps_in
from pipeline.checkpoint.layout import Layout, Slot
from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.checkpoint.peers import meet
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.saving import Content, Saving, first
from pipeline.checkpoint.snapshot import Snapshot, available_memory
from pipeline.checkpoint.verify import check_content, look
from pipeline.distributed.process_group import Job
from pipeline.engine.fragments import EngineState
from pipeline.errors import CheckpointError

LONG = 2e9  # bytes that take some seconds to read
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
        self._device = job.device
        self._split = split
        try:
            self._peers = meet(job, folder, host)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written: {error}; choose another run_dir") from None
        self._layout: Layout | None = None
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._finished: list[SaveOutcome] = []
        self._saved: set[int] = set()
        self._bad: set[int] = set()
        self._said_memory_is_short = False

    def save(self, engine: EngineState, state: dict[str, Any], wait: bool = False) -> SaveOutcome:
        """Saves, and removes what the policy does not keep. Collective. One save is under way at a time.

        Training stands still for a copy to host memory; a background thread does the rest. Where memory is
        short or `wait` is set, it stands still until all is on the disk.

        Args:
            state: JSON values; `global_step`, and `eval_loss` where there is one to choose the best by.

        Returns:
            How it went: what the system refuses (a full disk) does not end the run. Of a save in the
            background only the start is known; `poll` has the end.
        """
        started = time.perf_counter()
        self._join()
        step = int(state["global_step"])
        if step in self._saved:
            return SaveOutcome(step, None, time.perf_counter() - started, 0.0)
        content = Content(step, self._split, json.loads(json.dumps(state)), engine.scalars())
        outcome = self._try(engine, content, wait, started)
        if outcome is None:  # now the layout is known
            outcome = self._try(engine, content, wait, started)
        if outcome is None:
            raise RuntimeError("the engine's fragments are never the same twice")
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
        """Saves in the background that ended since the last call. Does not wait; not collective."""
        if self._thread is not None and not self._thread.is_alive():
            self._join()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Waits for the save under way. Before the process group ends."""
        self._join()

    def _try(self, engine: EngineState, content: Content, wait: bool, started: float) -> SaveOutcome | None:
        """One attempt; None: the fragments are not those of the last save, on some rank."""
        if self._layout is None:
            self._layout = Layout.of(Slot.of(fragment) for fragment in engine.fragments())
        layout = self._layout
        saving = Saving(self.folder, content, self._peers)
        memory = 0 if wait or self._snapshot is not None else layout.num_bytes
        problem, short = saving.begin(layout, memory, available_memory())
        if problem is None and not wait and short is None:
            word = self._take_snapshot(engine, layout)
            words = self._peers.gather(word)
            if "changed" in words:
                self._layout = self._snapshot = None
                return None
            short = first(words)
            if short is None:
                stall = time.perf_counter() - started
                self._start_writing(saving, SaveOutcome(content.step, None, stall, None))
                return SaveOutcome(content.step, None, stall, None)
            self._snapshot = None  # one rank has no memory for it: none keeps it
        if short is not None and not wait and not self._said_memory_is_short:
            self._said_memory_is_short = True
            log.warning("training stands still while checkpoints are written: %s", short)
        began = time.perf_counter()
        if problem is None:
            fragments = iter(engine.fragments())
            shares = saving.write(layout, streamed(layout, fragments), fragments)
            problem = saving.conclude(shares)
            if any(share.layout_changed for share in shares):
                self._layout = self._snapshot = None
                return None
        now = time.perf_counter()
        return self._report(saving, SaveOutcome(content.step, problem, now - started, now - began))

    def _take_snapshot(self, engine: EngineState, layout: Layout) -> str | None:
        fragments = iter(engine.fragments())
        try:
            if self._snapshot is None:
                self._snapshot = Snapshot(layout, self._device)
            self._snapshot.fill(fragments)
        except LayoutChangedError:
            return "changed"
        except MemoryError as error:
            self._snapshot = None
            return f"{self._peers.host}: {str(error).splitlines()[0]}"
        finally:
            for _ in fragments:  # fetching them may be collective
                pass
        return None

    def _start_writing(self, saving: Saving, outcome: SaveOutcome) -> None:
        snapshot = self._snapshot
        assert snapshot is not None

        def write() -> None:
            began = time.perf_counter()
            try:
                shares = saving.write(snapshot.layout, snapshot.views(), iter(()), lasting=True)
                problem = saving.conclude(shares)
                seconds = time.perf_counter() - began
                done = replace(outcome, problem=problem, write_seconds=seconds)
                self._finished.append(self._report(saving, done))
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _report(self, saving: Saving, outcome: SaveOutcome) -> SaveOutcome:
        if outcome.problem is None:
            self._saved.add(outcome.step)
            self._bad.discard(outcome.step)
            log.info("saved %s", saving.final)
            if saving.published is not None:
                self._pruner.prune(saving.published, self._bad)
            return outcome
        line = f"step {outcome.step} is not saved: {outcome.problem}; the checkpoints before it are intact"
        log.warning("%s", line)
        return replace(outcome, problem=line)

    def resume(self, engine: EngineState) -> dict[str, Any] | None:
        """Fills the engine from the newest checkpoint that verifies on all machines. Collective.

        Returns:
            What `save` was given; None: there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        steps = self._peers.gather(list(steps_in(self.folder)) if self._peers.is_leader else [])
        passed_over = []
        for step in sorted(set(itertools.chain(*steps)), reverse=True):
            began = time.perf_counter()
            answer = self._examine(self.folder / folder_name(step))
            if isinstance(answer, Manifest):
                with CheckpointReader(self.folder / folder_name(step), answer) as reader:
                    engine.restore(reader)
                self._saved.add(step)
                log.info(
                    "%s, saved by %s: %.0f MB verified and read in %.1f s",
                    folder_name(step),
                    answer.split,
                    answer.num_bytes / 1e6,
                    time.perf_counter() - began,
                )
                return answer.state
            log.warning("%s", answer)
            self._bad.add(step)
            passed_over.append(answer)
        if passed_over:
            raise CheckpointError(
                f"{self.folder} holds no whole checkpoint; the newest: {passed_over[0]}; "
                "bring back what is missing, or start a new run with checkpoint.resume=never"
            )
        return None

    def _examine(self, path: Path) -> Manifest | str:
        """A checkpoint's manifest once every byte of it is verified, by all ranks together; else why not."""
        peers, manifest = self._peers, None
        problem, checksum, here = None, "", list[str]()
        try:
            manifest = manifest_of(path)
            checksum = xxhash.xxh3_128_hexdigest((path / MANIFEST).read_bytes())
            damages, absent = look(path, manifest)
            problem = f"on {peers.host}: {damages[0]}" if damages else None
            here = [file.name for file in manifest.files if file.name not in absent]
        except (CheckpointError, OSError) as error:
            problem = f"on {peers.host}: {error}"
        said = peers.gather((problem, checksum, here))
        problem = first(wrong for wrong, _, _ in said)
        if problem is not None or manifest is None:
            return f"{path.name} is passed over: {problem}"
        if len({checksum for _, checksum, _ in said}) > 1:
            return f"{path.name} is passed over: it is not the same checkpoint on all machines"
        there = set(itertools.chain(*(names for _, _, names in said)))
        for file in manifest.files:
            if file.name not in there:
                return f"{path.name} is passed over: no machine has {file.name}, written on {file.host}"
        if manifest.num_bytes > LONG:
            log.info("verifying %s, %.1f GB", path.name, manifest.num_bytes / 1e9)
        neighbours = peers.neighbours
        mine = here[neighbours.index(peers.rank) :: len(neighbours)]
        found = peers.gather([str(damage) for damage in check_content(path, manifest, mine)])
        damage = next(itertools.chain(*found), None)
        return manifest if damage is None else f"{path.name} is passed over: {damage}"
