"""What the DeepSpeed JSON's profilers measure, for the rows of the log: seconds of the backward pass and of
the update, collectives, the FLOPs of one forward.

DeepSpeed's own timers and printing are left off: they wait for the device four times a micro-batch, and speak
to a log that is not shown. Only its counters are used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.distributed.phases import Moment, Phases, moment_now, seconds_between
from pipeline.files import MIB

log = logging.getLogger(__name__)

TABLE = "flops_profile.txt"


def without_profilers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The DeepSpeed JSON without what is measured here in DeepSpeed's place."""
    return {key: config[key] for key in config if key not in ("flops_profiler", "wall_clock_breakdown")}


def profile_asked_for(
    config: Mapping[str, Any] | None, engine: Any, clock: Callable[[], float], folder: Path, is_main: bool
) -> EngineProfile | None:
    """Puts what the JSON asks for around the engine; None: it asks for nothing.

    Args:
        config: The DeepSpeed JSON, filled in; None: plain PyTorch.
        engine: A DeepSpeedEngine or PipelineEngine of this package.
        folder: Where the table of the FLOPs profiler goes, where the JSON names no file.
        is_main: This is the rank whose rows are kept; it alone makes that table.
    """
    config = config or {}
    flops = config.get("flops_profiler", {})
    times = config.get("wall_clock_breakdown", False)
    comms = config.get("comms_logger", {}).get("enabled", False)
    if not (times or comms or flops.get("enabled", False)):
        return None
    profile = EngineProfile()
    if times:
        profile.time_steps(engine._engine, clock, engine.device)
    if comms:
        engine.closing.callback(profile.count_collectives())
    if flops.get("enabled", False) and is_main:
        profile.profile_forward(engine._engine, flops, folder / TABLE)
    return profile


class EngineProfile:
    """See Profile."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}
        self._collectives: dict[str, dict[int, list[Any]]] | None = None
        self._timers: dict[str, Any] = {}
        self._forward: dict[str, float] = {}

    def time_steps(self, engine: Any, clock: Callable[[], float], device: torch.device) -> None:
        """Measures backward passes and updates from here on."""
        for name, method in (("backward", "backward"), ("update", "step")):
            self._spans[name] = Span(clock, device)
            setattr(engine, method, _measured(getattr(engine, method), self._spans[name]))

    def count_collectives(self) -> Callable[[], None]:
        """Reads what DeepSpeed notes of each collective from here on.

        Returns:
            Ends it: DeepSpeed would go on for every later engine of the process.
        """
        from deepspeed.comm import comm

        self._collectives, self._timers = comm.comms_logger.comms_dict, comm.timers.get_timers()
        self._restart()  # without what building the engine took
        return functools.partial(comm.configure, enabled=False)

    def profile_forward(self, engine: Any, config: Mapping[str, Any], table: Path) -> None:
        """Counts the first forward of the step that the JSON names, and writes DeepSpeed's table of it."""
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        forward, at = engine.forward, int(config.get("profile_step", 1))

        @functools.wraps(forward)
        def counted(*inputs: Any, **named: Any) -> Any:
            if engine.global_steps < at or not engine.training:
                return forward(*inputs, **named)
            engine.forward = forward
            profiler = FlopsProfiler(engine.module, engine, config.get("recompute_fwd_factor", 0.0))
            profiler.start_profile()
            try:
                outputs = forward(*inputs, **named)
                profiler.stop_profile()
                self._forward = {
                    "perf/profiled_forward_flops": float(profiler.get_total_flops()),
                    "perf/profiled_forward_macs": float(profiler.get_total_macs()),
                    "perf/profiled_forward_seconds": float(profiler.get_total_duration()),
                }
                path = config.get("output_file") or str(table)
                shown = config.get("module_depth", -1), config.get("top_modules", 1)
                try:
                    profiler.print_model_profile(at, *shown, config.get("detailed", True), path)
                    log.info("flops_profiler: %s has the modules of a forward of step %d", path, at + 1)
                except OSError as error:
                    log.warning("flops_profiler: %s cannot be written (%s)", path, error.strerror or error)
            finally:
                profiler.end_profile()
            return outputs

        engine.forward = counted

    def row(self, steps: int, forward_seconds: float) -> dict[str, float]:
        """See Profile.row. Of this rank. Waits for the device."""
        row, self._forward = self._forward, {}
        if self._spans:
            row["perf/forward_time_seconds"] = forward_seconds / steps
        for name, span in self._spans.items():
            row[f"perf/{name}_time_seconds"] = span.take() / steps
        for name, sizes in (self._collectives or {}).items():
            key = f"perf/comm_{name.partition(' | ')[0]}"  # `debug` adds the caller
            for unit, sum_of in (
                ("calls", sum(times for times, *_ in sizes.values())),
                ("mib", sum(size * times for size, (times, *_) in sizes.items()) / MIB),
                # Of each call DeepSpeed notes what its timer has counted by then, of all calls.
                ("seconds", max(max(noted) for _, noted, *_ in sizes.values()) / 1000),
            ):
                row[f"{key}_{unit}"] = row.get(f"{key}_{unit}", 0.0) + sum_of / steps
        self._restart()
        return row

    def _restart(self) -> None:
        if self._collectives is not None:
            self._collectives.clear()
            for timer in self._timers.values():
                timer.reset()


class Span:
    """Seconds between two places in the code, as the device sees them.

    On a GPU it works on while the host reads data, and only what it waits between two events of its own is
    lost; in a forward it is what it computes, and waits for the host.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._clock = clock
        self._on_gpu = device.type == "cuda"
        self._moments: list[tuple[Moment, Moment]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what is inside."""
        before = moment_now(self._clock, self._on_gpu)
        yield
        self._moments.append((before, moment_now(self._clock, self._on_gpu)))

    def take(self) -> float:
        """Return the seconds measured since the last call. Waits for the device."""
        moments, self._moments = self._moments, []
        return sum((seconds_between(*each) for each in moments), 0.0)


def _measured(method: Callable[..., Any], span: Span) -> Callable[..., Any]:
    @functools.wraps(method)
    def around(*arguments: Any, **named: Any) -> Any:
        with span.measured():
            return method(*arguments, **named)

    return around


# Instructions of a schedule that compute; the others send, receive and reduce.
_PHASES = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "OptimizerStep": "optimizer",
}


def measured_instructions(
    instructions: dict[type, Callable[..., Any]], phases: Phases
) -> dict[type, Callable[..., Any]]:
    """DeepSpeed's methods for the instructions of a schedule, each in its phase."""

    def measured(kind: type, execute: Callable[..., Any]) -> Callable[..., Any]:
        phase = _PHASES.get(kind.__name__, "communication")

        def around(engine: Any, **named: Any) -> None:
            with phases.measured(phase):
                execute(engine, **named)

        return around

    return {kind: measured(kind, execute) for kind, execute in instructions.items()}
