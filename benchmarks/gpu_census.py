"""Counts the kernels and host waits of a step, engine by engine.

    python benchmarks/gpu_census.py --engines plain 2 3 --output FILE

After a few steps of each engine, it records how often and where the host waits for the device. Then it
profiles two steps: kernels, the device's busy share, the longest kernels, gaps and memory. On a CPU it counts
operators instead of kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_facts import is_kernel
from processes import FinishedError, Gate, Participant, ParticipantError, Task, wait_for_device
from report import append_line
from throughput import Group, group_tasks
from torch.profiler import ProfilerActivity, profile
from workload import JSON_FILES, MODELS, Workload

WARM = 5  # steps before the first count
COUNTED = 2  # steps of each count
GAP_MICROSECONDS = 100
SYNC = "synchronizing CUDA operation"


class HostWaits:
    """Counts torch's warnings of operations inside a `with` block for which the host waits for the GPU."""

    def __init__(self) -> None:
        self.stacks: Counter[str] = Counter()
        """Innermost frames outside of torch -> number of waits there."""
        self._cleanup = ExitStack()

    def __enter__(self) -> HostWaits:
        with ExitStack() as entered:
            entered.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = self._count  # type: ignore[assignment]
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
                entered.callback(torch.cuda.set_sync_debug_mode, "default")
            self._cleanup = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _count(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if SYNC in str(message):
            frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
            innermost = [f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in frames[-3:]]
            self.stacks[" < ".join(reversed(innermost))] += 1


class Census(Gate):
    """Counts the host waits of two steps, profiles two more steps, and ends the loop."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._step = 0
        self._waits = HostWaits()
        self._profiler: Any = None
        self._start = 0.0

    def __call__(self) -> None:
        self._step += 1
        if self._step == WARM:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self._waits.__enter__()
        elif self._step == WARM + COUNTED:
            self._waits.__exit__()
            self._record_waits()
            on_gpu = torch.cuda.is_available()
            self._profiler = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu)
            self._profiler.__enter__()
            self._start = time.perf_counter()
        elif self._step == WARM + 2 * COUNTED:
            wait_for_device()
            seconds = time.perf_counter() - self._start
            self._profiler.__exit__(None, None, None)
            self.found |= summary(self._profiler.events(), seconds)
            raise FinishedError

    def _record_waits(self) -> None:
        """Record host waits and memory per step; on a CPU there are none."""
        if not torch.cuda.is_available():
            self.found["host_waits"] = None
            return
        self.found |= {
            "host_waits": self._waits.stacks.total() / COUNTED,
            "host_wait_stacks": self._waits.stacks.most_common(12),
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "allocation_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }


def summary(events: Any, seconds: float) -> dict[str, Any]:
    """Summarize a profile of COUNTED steps as numbers per step.

    Args:
        events: Events of torch.profiler.
        seconds: Wall time of these steps.
    """
    on_device = sorted(filter(is_kernel, events), key=lambda each: each.time_range.start)
    operators = [event for event in events if event.name.startswith("aten::")]
    spent: Counter[str] = Counter()
    for event in on_device or operators:
        spent[event.name] += event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
    busy = 0.0  # microseconds
    gaps = 0
    busy_until = None
    for event in on_device:
        start = event.time_range.start
        end = event.time_range.end
        if busy_until is not None:
            gaps += start - busy_until > GAP_MICROSECONDS
            start = max(start, busy_until)
        busy += max(0.0, end - start)
        busy_until = end if busy_until is None else max(end, busy_until)
    return {
        "operators": len(operators) / COUNTED,
        "host_reads": sum(event.name == "aten::_local_scalar_dense" for event in operators) / COUNTED,
        "kernels": len(on_device) / COUNTED,
        "busy_share": busy / 1e6 / seconds,
        "gaps_over_100us": gaps / COUNTED,
        "step_seconds_profiled": seconds / COUNTED,
        "longest": [[name[:120], micro / COUNTED] for name, micro in spent.most_common(20)],
    }


def take_part(task: Task, gate: Gate) -> dict[str, Any]:
    """Run the participant's loop with a `Census` as its gate; `gate` is not used."""
    import loops

    census = Census()
    return loops.take_part(task, census) | census.found


def main() -> int:
    """Measure each engine in a separate process, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt2-124m")
    add("--engines", nargs="+", choices=["plain", *JSON_FILES], default=["plain", *JSON_FILES])
    add("--precision", choices=["fp32", "bf16"], default="bf16")
    add(
        "--output",
        type=Path,
        help="file of JSON lines; each engine is appended at once",
    )
    arguments = parser.parse_args()
    failed = False
    for engine in arguments.engines:
        group = Group(arguments.precision, 1, engine, Workload.of(arguments.model, rows="packed"))
        with tempfile.TemporaryDirectory(prefix="census-") as folder:
            task = replace(next(group_tasks(group, [], WARM, Path(folder))), module="gpu_census")
            try:
                with Participant(task) as participant:
                    (found,) = participant.finish()
            except ParticipantError as error:
                print(error, file=sys.stderr)
                failed = True
                continue
        append_line(arguments.output, {"census": task.name, "group": str(group), **found})
        short = {key: value for key, value in found.items() if not isinstance(value, list)}
        print(task.name, json.dumps(short), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
