"""The recipe's section `profile`: torch's profiler on some steps of the main rank, and memory snapshots.

A snapshot shows the allocations of a GPU at the moment when it runs out of memory. All files are in
`profile/` of the run directory. Profiling slows the profiled steps; it never ends a run or changes a loss.
DeepSpeed's own timers and FLOPs profiler stay off: they synchronize with the device in every micro-batch.
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
NUM_TABLE_OPERATORS = 40  # most expensive operators in operators.txt
NUM_EVENT_OPERATORS = 3  # most expensive operators in the event's message
MAX_ALLOCATIONS = 200_000  # newest allocations in a snapshot; the stack of each is in host memory

StepContext = Callable[[int], AbstractContextManager[object]]
"""Function that returns a context manager around a step, given the step's number."""


class StepProfiler:
    """Profiles a range of steps: `with profiler(step): ...` around each step of the run.

    The profiler itself is a context manager around the training loop. At its exit it writes a profile whose
    range has not ended; after an exception it does not.
    """

    def __init__(
        self, folder: Path, steps: tuple[int, int], *, start: int, device: torch.device, tell: EmitEvent
    ) -> None:
        """Prepare the profiler without starting it.

        Args:
            folder: Directory of the run.
            steps: First and last step to profile.
            start: Steps done before this process. If they include a part of the range, the rest of the range
                is profiled.
            device: Device of this rank. The kernels of a GPU are recorded with the host's calls.
            tell: Receives the event that names the files and the most expensive operators.
        """
        self._folder = folder / PROFILE_FOLDER
        self._first = max(steps[0], start + 1)
        self._last = steps[1]
        # One step before the range warms the profiler up, unless this process begins with the range.
        self._num_warmup_steps = int(self._first > start + 1)
        self._device = device
        self._tell = tell
        self._profile: profile | None = None
        self._has_begun = False
        self._is_recording = self._num_warmup_steps == 0
        self._step = start

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Return a context manager around a step, which is profiled if it is in the range."""
        self._step = step
        if self._profile is not None:
            self._profile.step_num = step - 1  # `step` adds 1; a step may repeat after a rollback
            self._profile.step()
        elif not self._has_begun and step == self._first - self._num_warmup_steps and step <= self._last:
            self._has_begun = True  # the step may repeat after a rollback
            self._attempt(self._begin)
        yield
        if self._profile is not None and step >= self._last:
            self._attempt(self._end)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure the profile stays open, since the device may hang.
        if self._profile is not None and error is None:
            self._attempt(self._end)

    def _begin(self) -> None:
        self._folder.mkdir(exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        started = profile(
            activities=activities,
            schedule=self._choose_action,
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
        )
        started.step_num = self._step  # names the ranges of the trace: ProfilerStep#STEP
        started.start()
        self._profile = started

    def _choose_action(self, step: int) -> ProfilerAction:
        # Once it has begun, recording continues even if the run rolls back to a step before the first one.
        self._is_recording = self._is_recording or step >= self._first
        return ProfilerAction.RECORD if self._is_recording else ProfilerAction.WARMUP

    def _end(self) -> None:
        """Stop the profiler, write its files and report the event."""
        finished = self._profile
        self._profile = None
        assert finished is not None
        finished.stop()
        averages = finished.key_averages()
        # torch's ranges around the steps are not operators, and would have the largest shares.
        averages[:] = [row for row in averages if not row.key.startswith("ProfilerStep")]
        key = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = averages.table(sort_by=key, row_limit=NUM_TABLE_OPERATORS, max_name_column_width=80)
        steps = f"steps {self._first} to {self._step}"
        (self._folder / "operators.txt").write_text(f"{steps}\n{table}\n")
        finished.export_chrome_trace(str(self._folder / f"trace-rank0-step{self._first}.json.gz"))
        message = (
            f"profiled {steps}: {self._folder} has the trace (open it at ui.perfetto.dev) and operators.txt; "
            f"most expensive operators: {format_most_expensive(averages, key)}"
        )
        self._tell(self._step, Event("profile", message, level="info"))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call a function; if it raises, log a warning and stop profiling."""
        try:
            action()
        except Exception as error:  # a full disk, or a driver without counters: training continues
            self._profile = None
            log.warning(
                "the profile is not written (%s: %s); training continues without it",
                type(error).__name__,
                summarize_error(error),
            )


def format_most_expensive(averages: Any, key: str) -> str:
    """Return the most expensive operators with their shares of the total time: `aten::mm 41 %, ...`.

    Args:
        averages: Rows of torch's profiler, one for each operator.
        key: Attribute of a row that has its time.
    """
    total = sum(getattr(row, key) for row in averages) or 1
    most_expensive = sorted(averages, key=lambda row: -getattr(row, key))[:NUM_EVENT_OPERATORS]
    return ", ".join(f"{row.key} {100 * getattr(row, key) / total:.0f} %" for row in most_expensive)


@contextmanager
def snapshot_on_oom(device: torch.device, path: Path) -> Iterator[None]:
    """Write a snapshot of a GPU's allocations and their stacks to `path` if it runs out of memory.

    Context manager around a run. The allocator calls the snapshot's observer before any tensor is freed.
    Recording the stack of an allocation takes some microseconds. On a CPU nothing is written.
    """
    if device.type != "cuda":
        yield
        return
    memory: Any = torch.cuda.memory
    snapshot = OomSnapshotWriter(path, memory._dump_snapshot)
    memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
    torch._C._cuda_attach_out_of_memory_observer(snapshot)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        snapshot.is_disabled = True  # torch cannot detach an observer
        memory._record_memory_history(enabled=None)


class OomSnapshotWriter:
    """Observer of the allocator that writes one snapshot, at the first out-of-memory error."""

    def __init__(self, path: Path, dump: Callable[[str], None]) -> None:
        self._path = path
        self._dump = dump
        self.is_disabled = False
        """Whether the observer writes no snapshot, or no further one."""

    def __call__(self, *_: Any) -> None:
        """Write the snapshot unless the observer is disabled, and disable the observer."""
        if self.is_disabled:
            return
        self.is_disabled = True
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._dump(str(self._path))
            log.error("memory snapshot: %s (open it at docs.pytorch.org/memory_viz)", self._path)
        except Exception as error:  # must not replace the allocator's own error
            log.error("the memory snapshot cannot be written (%s)", summarize_error(error))


def build_profiler(
    config: RunConfig, folder: Path, *, job: Job, start: int, tell: EmitEvent
) -> AbstractContextManager[StepContext]:
    """Return the main rank's profiler; without steps to profile, a context manager that does nothing.

    Other ranks never profile. After the last profiled step they wait once, while the main rank writes its
    files.

    Args:
        config: The recipe; its section `profile` is read.
        folder: Directory of the run.
        job: Process group of the run.
        start: Optimizer steps done before this process.
        tell: Receives the event that names the files.
    """
    first = config.profile.start_step
    last = (first or 0) + config.profile.num_steps - 1
    if first is None or not job.ranks.is_main_process or last <= start:
        return nullcontext(nullcontext)
    return StepProfiler(folder, (first, last), start=start, device=job.device, tell=tell)


def snapshot_if_profiling(config: RunConfig, job: Job, folder: Path) -> AbstractContextManager[None]:
    """Return `snapshot_on_oom` of this rank if the recipe asks for a profile, else a context without effect.

    Args:
        config: The recipe; its section `profile` is read.
        job: Process group of the run.
        folder: Directory of the run.
    """
    if config.profile.start_step is None:
        return nullcontext()
    return snapshot_on_oom(job.device, folder / PROFILE_FOLDER / f"memory-rank{job.ranks.rank}.pickle")
