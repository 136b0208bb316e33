"""What the recipe's section `profile` asks for: torch's profiler on some steps of the main rank, DeepSpeed's
counts of the step behind them, and what each rank's GPU holds when its memory runs out. All of it lies in
`profile/` of the run.

Nothing here ends a run, changes a number of it, or has other ranks wait for files to be written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.engine.profile import counted_step
from pipeline.errors import one_line
from pipeline.monitoring.alerts import Tell
from pipeline.monitoring.events import Event

log = logging.getLogger(__name__)

FOLDER = "profile"
NUM_OPERATORS, NUM_TOLD = 40, 3
PATIENCE, PATIENCE_AFTER_FAILURE = 120.0, 3.0  # seconds that the end of a run waits for the trace
MOST_ALLOCATIONS = 200_000  # the last ones that are remembered; each keeps its stack in host memory

Profiled = Callable[[int], AbstractContextManager[object]]
"""Is given each step's number, and is around its work."""
Counting = Callable[[Path], AbstractContextManager[Mapping[str, float]]]
"""Around a step: gives numbers of it, there once it is over; a table of modules goes to the path."""


class StepProfiler:
    """Profiles a range of steps: `with profiler(step): ...`. As a context manager it writes what is left.

    Args:
        folder: Directory of the run.
        steps: First and last step to profile.
        start: Steps done before this process. A run resumed inside the range profiles the rest of it.
        device: Device whose kernels are recorded beside the host's calls.
        counting: Counts the operations of the step after the range.
        tell: Takes the event that names the files and the numbers.
    """

    def __init__(
        self,
        folder: Path,
        steps: tuple[int, int],
        *,
        start: int,
        device: torch.device,
        counting: Counting,
        tell: Tell,
    ) -> None:
        self._folder = folder / FOLDER
        self._first, self._last = max(steps[0], start + 1), steps[1]
        self._warmup = int(self._first > start + 1)
        self._device, self._counting, self._tell = device, counting, tell
        self._profile: profile | None = None
        self._is_begun = False
        self._records = not self._warmup
        self._writing: threading.Thread | None = None
        self._step = start
        self._profiled_until = 0
        self._counted: Mapping[str, float] = {}
        self._expensive = ""
        self._failed: Exception | None = None

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Around a step. Costs nothing before and behind those that are profiled."""
        self._step = step
        if self._profile is not None:
            self._profile.step_num = step - 1  # which `step` adds one to: a step may come again
            self._profile.step()
        elif step == self._first - self._warmup <= self._last and not self._is_begun:
            self._begin()
        is_counted = step == self._last + 1 and self._writing is not None
        with self._counting(self._folder / "flops.txt") if is_counted else nullcontext({}) as counted:
            yield
        self._counted = self._counted or counted
        if self._profile is not None and step >= self._last:
            self._end()
        if self._writing is not None and step > self._last and not self._writing.is_alive():
            self._tell_of_it()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Of a run that ended within the steps, or right behind them. After a failure nothing is stopped: the
        device may not answer."""
        if self._profile is not None and error is None:
            self._end()
        if self._writing is not None:
            self._writing.join(PATIENCE if error is None else PATIENCE_AFTER_FAILURE)
            self._tell_of_it()

    def _begin(self) -> None:
        self._is_begun = True  # a step that was left out, or gone back to, comes again
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=self._action,
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
        )
        self._profile.step_num = self._step  # names the ranges of the trace: ProfilerStep#STEP

        def start(profiler: profile) -> None:
            self._folder.mkdir(exist_ok=True)
            profiler.start()

        self._attempt(partial(start, self._profile))

    def _action(self, step: int) -> ProfilerAction:
        """Return what torch's profiler does in a step.

        It records from the first one on, also where the run goes back to a step before it.
        """
        self._records = self._records or step >= self._first
        return ProfilerAction.RECORD if self._records else ProfilerAction.WARMUP

    def _end(self) -> None:
        """Stops; the files are written beside the next steps, which other ranks would wait for."""
        ended, self._profile = self._profile, None
        assert ended is not None
        if self._attempt(ended.stop):
            self._profiled_until = self._step
            self._writing = threading.Thread(target=self._write, args=(ended,), name="profile", daemon=True)
            self._writing.start()

    def _write(self, ended: profile) -> None:
        def write() -> None:
            averages = ended.key_averages()
            # Torch's ranges around the steps are no operators: they would take most of all shares.
            averages[:] = [each for each in averages if not each.key.startswith("ProfilerStep")]
            key = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
            table = averages.table(sort_by=key, row_limit=NUM_OPERATORS, max_name_column_width=80)
            (self._folder / "operators.txt").write_text(f"{self._what}\n{table}\n")
            self._expensive = most_expensive(averages, key)
            ended.export_chrome_trace(str(self._folder / f"trace-rank0-step{self._first}.json.gz"))

        self._attempt(write)

    @property
    def _what(self) -> str:
        return f"steps {self._first} to {self._profiled_until}"

    def _tell_of_it(self) -> None:
        is_written, self._writing = self._writing is None or not self._writing.is_alive(), None
        if self._failed is not None or not is_written:
            return
        message = (
            f"profiled {self._what}: {self._folder} has the trace (for ui.perfetto.dev) and operators.txt; "
            f"most time took {self._expensive}"
        )
        self._tell(self._step, Event("profile", message, level="info", fields={**self._counted}))

    def _attempt(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # a full disk, or a driver without counters: training goes on
            self._failed, self._profile = error, None
            log.warning("the profile is not written (%s: %s)", type(error).__name__, one_line(error))
        return self._failed is None


def most_expensive(averages: Any, key: str) -> str:
    """The first operators of torch's table, each with its share of all time: `aten::mm 41 %, ...`."""
    of_all = sum(getattr(each, key) for each in averages) or 1
    first = sorted(averages, key=lambda each: -getattr(each, key))[:NUM_TOLD]
    return ", ".join(f"{each.key} {100 * getattr(each, key) / of_all:.0f} %" for each in first)


@contextmanager
def snapshot_when_out(device: torch.device, path: Path) -> Iterator[None]:
    """Within it a GPU that runs out of memory leaves in `path` what it held, and who asked for it.

    The allocator calls at that very moment, before anything is freed. Keeping the stack of every allocation
    costs some microseconds each. On a CPU nothing is kept.
    """
    if device.type != "cuda":
        yield
        return
    memory: Any = torch.cuda.memory
    snapshot = OutOfMemory(path, memory._dump_snapshot)
    memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
    torch._C._cuda_attach_out_of_memory_observer(snapshot)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        snapshot.is_over = True  # torch has no way to take an observer back
        memory._record_memory_history(enabled=None)


class OutOfMemory:
    """Called by the allocator when it has nothing to give; writes the first time alone."""

    def __init__(self, path: Path, dump: Callable[[str], None]) -> None:
        self._path, self._dump = path, dump
        self.is_over = False

    def __call__(self, *_: Any) -> None:
        if self.is_over:
            return
        self.is_over = True
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._dump(str(self._path))
            log.error("what the memory held: %s (docs.pytorch.org/memory_viz shows it)", self._path)
        except Exception as error:  # the allocator's own error is the news
            log.error("what the memory held cannot be written (%s)", one_line(error))


def build_profiler(
    config: RunConfig,
    resolved: Resolved,
    folder: Path,
    *,
    job: Job,
    engine: Engine,
    start: int,
    tell: Tell,
) -> AbstractContextManager[Profiled]:
    """Return the main rank's profiler, or what does nothing. Closed, it writes what is left.

    Args:
        config: The recipe; `profile` is read.
        resolved: Both files together.
        folder: Directory of the run.
        job: Process group of the run.
        engine: Engine of the run, whose step is counted.
        start: Optimizer steps done before this process.
        tell: Takes the event that names the files.
    """
    first = config.profile.start_step
    last = (first or 0) + config.profile.num_steps - 1
    if first is None or not job.ranks.is_main_process or last <= start:
        return nullcontext(nullcontext)
    in_modules = not resolved.compile and resolved.split.pipeline_stages == 1
    counting = partial(counted_step, resolved.deepspeed, engine, in_modules=in_modules)
    return StepProfiler(folder, (first, last), start=start, device=job.device, counting=counting, tell=tell)


def watch_memory(config: RunConfig, job: Job, folder: Path) -> AbstractContextManager[None]:
    """Write what a GPU held when its memory runs out, if the recipe profiles anything."""
    if config.profile.start_step is None:
        return nullcontext()
    return snapshot_when_out(job.device, folder / FOLDER / f"memory-rank{job.ranks.rank}.pickle")
