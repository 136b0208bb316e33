"""The recipe's section `profile`: torch's profiler on some steps of the main rank, and memory snapshots.

A snapshot shows what a GPU holds when its memory runs out. Everything is in `profile/` of the run directory.
Nothing here ends a run or changes a number of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from pipeline.config.schema import RunConfig
from pipeline.distributed.process_group import Job
from pipeline.errors import summarize_error
from pipeline.monitoring.alerts import EmitEvent
from pipeline.monitoring.events import Event

log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
NUM_OPERATORS = 40  # in the table
NUM_TOLD = 3  # in the event
MOST_ALLOCATIONS = 200_000  # the last ones that are remembered; each keeps its stack in host memory

StepContext = Callable[[int], AbstractContextManager[object]]
"""Takes a step's number, and is around its work."""


class StepProfiler:
    """Profiles a range of steps: `with profiler(step): ...`. As a context manager it writes what is left."""

    def __init__(
        self, folder: Path, steps: tuple[int, int], *, start: int, device: torch.device, tell: EmitEvent
    ) -> None:
        """Profile nothing yet.

        Args:
            folder: Directory of the run.
            steps: First and last step to profile.
            start: Steps done before this process. A run resumed inside the range profiles the rest of it.
            device: Device whose kernels are recorded beside the host's calls.
            tell: Takes the event that names the files and the most expensive operators.
        """
        self._folder = folder / PROFILE_FOLDER
        self._first = max(steps[0], start + 1)
        self._last = steps[1]
        self._warmup = int(self._first > start + 1)
        self._device = device
        self._tell = tell
        self._profile: profile | None = None
        self._has_begun = False
        self._records = not self._warmup
        self._step = start

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Surround a step. Costs nothing before and behind the profiled ones."""
        self._step = step
        if self._profile is not None:
            self._profile.step_num = step - 1  # `step` adds 1; a step may come again
            self._profile.step()
        elif step == self._first - self._warmup <= self._last and not self._has_begun:
            self._has_begun = True  # the step may come again
            self._attempt(self._begin)
        yield
        if self._profile is not None and step >= self._last:
            self._attempt(self._end)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure nothing is stopped: the device may not answer.
        if self._profile is not None and error is None:
            self._attempt(self._end)

    def _begin(self) -> None:
        self._folder.mkdir(exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        started = profile(
            activities=activities,
            schedule=self._action,
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
        )
        started.step_num = self._step  # names the ranges of the trace: ProfilerStep#STEP
        started.start()
        self._profile = started

    def _action(self, step: int) -> ProfilerAction:
        # It goes on recording if the run rolls back to a step before the first one.
        self._records = self._records or step >= self._first
        return ProfilerAction.RECORD if self._records else ProfilerAction.WARMUP

    def _end(self) -> None:
        ended, self._profile = self._profile, None
        assert ended is not None
        ended.stop()
        averages = ended.key_averages()
        # torch's ranges around the steps are no operators, and would take most of all shares.
        averages[:] = [each for each in averages if not each.key.startswith("ProfilerStep")]
        key = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = averages.table(sort_by=key, row_limit=NUM_OPERATORS, max_name_column_width=80)
        what = f"steps {self._first} to {self._step}"
        (self._folder / "operators.txt").write_text(f"{what}\n{table}\n")
        ended.export_chrome_trace(str(self._folder / f"trace-rank0-step{self._first}.json.gz"))
        message = (
            f"profiled {what}: {self._folder} has the trace (for ui.perfetto.dev) and operators.txt; "
            f"most time took {format_most_expensive(averages, key)}"
        )
        self._tell(self._step, Event("profile", message, level="info"))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a full disk, or a driver without counters: training goes on
            self._profile = None
            log.warning("the profile is not written (%s: %s)", type(error).__name__, summarize_error(error))


def format_most_expensive(averages: Any, key: str) -> str:
    """Return the first operators of torch's table with their shares of all time: `aten::mm 41 %, ...`."""
    of_all = sum(getattr(each, key) for each in averages) or 1
    first = sorted(averages, key=lambda each: -getattr(each, key))[:NUM_TOLD]
    return ", ".join(f"{each.key} {100 * getattr(each, key) / of_all:.0f} %" for each in first)


@contextmanager
def snapshot_on_oom(device: torch.device, path: Path) -> Iterator[None]:
    """Write to `path` what a GPU held, and which stacks allocated it, when its memory runs out.

    The allocator calls at that very moment, before anything is freed. Keeping the stack of every allocation
    costs some microseconds each. On a CPU nothing is written.
    """
    if device.type != "cuda":
        yield
        return
    memory: Any = torch.cuda.memory
    snapshot = OomSnapshotWriter(path, memory._dump_snapshot)
    memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
    torch._C._cuda_attach_out_of_memory_observer(snapshot)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        snapshot.is_over = True  # torch cannot detach an observer
        memory._record_memory_history(enabled=None)


class OomSnapshotWriter:
    """Observer of the allocator that writes a snapshot the first time it is out of memory."""

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
            log.error("what the memory held cannot be written (%s)", summarize_error(error))


def build_profiler(
    config: RunConfig, folder: Path, *, job: Job, start: int, tell: EmitEvent
) -> AbstractContextManager[StepContext]:
    """Return the main rank's profiler, or one that does nothing. Closed, it writes what is left.

    Args:
        config: The recipe; `profile` is read.
        folder: Directory of the run.
        job: Process group of the run.
        start: Optimizer steps done before this process.
        tell: Takes the event that names the files.
    """
    first = config.profile.start_step
    last = (first or 0) + config.profile.num_steps - 1
    if first is None or not job.ranks.is_main_process or last <= start:
        return nullcontext(nullcontext)
    return StepProfiler(folder, (first, last), start=start, device=job.device, tell=tell)


def snapshot_if_profiling(config: RunConfig, job: Job, folder: Path) -> AbstractContextManager[None]:
    """Write what a GPU held when its memory runs out, if the recipe profiles anything."""
    if config.profile.start_step is None:
        return nullcontext()
    return snapshot_on_oom(job.device, folder / PROFILE_FOLDER / f"memory-rank{job.ranks.rank}.pickle")
