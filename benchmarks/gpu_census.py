"""What a step costs besides arithmetic: python benchmarks/gpu_census.py --engines plain 2 3 --output FILE

Per engine and peer, after a few steps: how often the host waits for the device, and where; kernels, the
device's busy share, the longest kernels, gaps and memory. On a CPU operators are counted in place of kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from host_waits import HostWaits
from processes import FinishedError, Gate, Participant, ParticipantError, Task
from report import append_line
from throughput import Group, group_tasks
from workload import JSON_FILES, MODELS, Workload

WARM, COUNTED = 5, 2  # steps before anything is counted, and steps of each count
GAP_SECONDS = 100e-6


class Census:
    """A gate that counts two steps' waits, then profiles two steps, then ends the loop."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._step = 0
        self._waits = HostWaits()
        self._profiler: Any = None
        self._start = 0.0

    def __call__(self) -> None:
        self._step += 1
        if self._step == WARM:
            self._begin_waits()
        elif self._step == WARM + COUNTED:
            self._end_waits()
            self._begin_profile()
        elif self._step == WARM + 2 * COUNTED:
            self._end_profile()
            raise FinishedError

    def _begin_waits(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._waits.__enter__()

    def _end_waits(self) -> None:
        import torch

        self._waits.__exit__(None, None, None)
        self.found["host_waits"] = None if self._waits.count is None else self._waits.count / COUNTED
        if torch.cuda.is_available():
            self.found["host_wait_stacks"] = self._waits.stacks.most_common(12)
            memory = torch.cuda.memory_stats()
            self.found["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            self.found["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            self.found["allocation_retries"] = memory.get("num_alloc_retries", 0)

    def _begin_profile(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        self._profiler = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu)
        self._profiler.__enter__()
        self._start = time.perf_counter()

    def _end_profile(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start
        self._profiler.__exit__(None, None, None)
        self.found |= summary(self._profiler.events(), seconds)


def summary(events: Any, seconds: float) -> dict[str, Any]:
    """A profile of COUNTED steps in numbers a step.

    Args:
        events: torch.profiler's.
        seconds: That they took.
    """
    from torch.autograd import DeviceType

    on_device = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    operators = [event for event in events if event.name.startswith("aten::")]
    spent: Counter[str] = Counter()
    for event in on_device:
        spent[event.name] += event.time_range.elapsed_us()
    if not on_device:
        for event in operators:
            spent[event.name] += event.self_cpu_time_total
    busy, gaps, end = 0.0, 0, None
    for event in sorted(on_device, key=lambda each: each.time_range.start):
        begin, until = event.time_range.start, event.time_range.end
        gaps += end is not None and begin - end > GAP_SECONDS * 1e6
        busy += max(0.0, until - max(begin, end if end is not None else begin))
        end = max(until, end) if end is not None else until
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
    """Runs the participant's loop behind a Census; `gate` is not used."""
    import participants

    census = Census()
    told = participants.take_part(task, census)  # type: ignore[arg-type]
    return {**told, **census.found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt2-124m")
    add("--engines", nargs="+", choices=["plain", *JSON_FILES], default=["plain", *JSON_FILES])
    add("--peers", nargs="*", default=[], help="participants of throughput.py besides ours")
    add("--rows", nargs="+", choices=["unpacked", "packed"], default=["packed"])
    add("--precision", choices=["fp32", "bf16"], default="bf16")
    add("--output", type=Path, help="JSON lines, one a participant, as soon as it is there")
    arguments = parser.parse_args()
    arguments.warmup = WARM
    failed = 0
    for engine in arguments.engines:
        for rows in arguments.rows:
            group = Group(arguments.precision, 1, engine, Workload.of(arguments.model, rows=rows))
            with tempfile.TemporaryDirectory(prefix="census-") as folder:
                for task in group_tasks(arguments, group, Path(folder)):
                    failed += not count(replace(task, loops="gpu_census"), group, arguments.output)
    return 1 if failed else 0


def count(task: Task, group: Group, output: Path | None) -> bool:
    """One participant's census, printed and appended. False: it failed, which is told."""
    participant = Participant(task)
    try:
        found = participant.finish_all()[0]
    except ParticipantError as error:
        print(error, file=sys.stderr)
        return False
    finally:
        participant.close()
    append_line(output, {"census": task.name, "group": str(group), **found})
    short = {key: value for key, value in found.items() if not isinstance(value, list)}
    print(task.name, json.dumps(short), flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
