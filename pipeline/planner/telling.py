"""A forecast in words, rows and JSON: what `python -m pipeline plan` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.files import GIB, format_duration
from pipeline.planner.account import Change
from pipeline.planner.forecast import Forecast

BAR = 44
"""Characters of the bar that stands for all of a device's memory."""


def summary(found: Forecast) -> Iterator[str]:
    """What is planned, and where."""
    model, resolved = found.model, found.resolved
    trained = "" if model.trained == model.numel else f", {model.trained / model.numel:.2%} of them trained"
    yield f"model   {model.name}, {model.numel:,} parameters{trained}"
    yield f"split   {resolved.split}; {found.place}"
    yield f"batch   {resolved.plan}"
    host = f"host    {found.host_bytes / GIB:.1f} GiB of a machine's memory"
    if found.place.host_memory:
        host += f" of {found.place.host_memory / GIB:.1f}"
    if found.copy_bytes:
        copy = "more for a checkpoint written beside training, where there is room"
        host += f"; {found.copy_bytes / GIB:.1f} {copy}"
    if found.lacking == "host memory":
        host += ": does not fit"
    yield host
    stay = found.disk_bytes // found.checkpoint_bytes if found.checkpoint_bytes else 0
    yield (
        f"disk    {found.checkpoint_bytes / GIB:.1f} GiB a checkpoint, {found.disk_bytes / GIB:.1f} GiB for "
        f"{stay} at a time"
        + (f"; {found.nvme_bytes / GIB:.1f} GiB of a machine's NVMe" if found.nvme_bytes else "")
    )
    if found.hours is not None:
        money = "" if found.cost is None else f", costs {found.cost:,.2f}"
        energy = "" if found.kilowatt_hours is None else f", {found.kilowatt_hours:,.1f} kWh"
        time = format_duration(found.hours * 3600)
        yield f"run     {found.config.max_steps:,} steps in {time}{energy}{money}"


NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "buffers": "buckets, gathered weights",
    "activations": "activations kept",
    "recomputed": "inside of one block",
    "batch": "batch",
    "loss": "logits and loss",
    "step": "temporaries of the step",
    "checkpoint": "a checkpoint's copy",
    "framework": "framework and allocator",
}


def memory_rows(found: Forecast) -> Iterator[str]:
    """A line a part with its bar, each at its own most, and the peak against what there is."""
    memory, there = found.memory, max(found.place.memory, found.peak)
    for key, name in NAMES.items():
        if num_bytes := memory.parts.get(key):
            yield f"  {name:<28}{num_bytes / GIB:9.2f} GiB  {bar(num_bytes, there)}"
    peak = f"peak, in the {memory.at}"
    yield f"  {peak:<28}{found.peak / GIB:9.2f} GiB  {bar(found.peak, there)}"
    sign = "fits" if found.fits else "whether it fits is not known"
    if lacking := found.lacking:
        sign = "does not fit" if lacking == "memory" else f"does not fit: {lacking}"
    share = found.peak / found.place.memory
    yield f"  {'there is':<28}{found.place.memory / GIB:9.2f} GiB  {share:.0%}: {sign}"
    yield from (f"  {line}" for line in remarks(found))


def remarks(found: Forecast) -> Iterator[str]:
    """What the memory is not exact in."""
    if ":" in found.config.optimizer.kind:
        yield f"{found.config.optimizer.kind} is taken to keep as much as AdamW: two numbers a parameter"
    if not found.memory.is_complete:
        yield "what activations take is not known of this model: the peak is without them"
    elif found.memory.upper:
        yield found.memory.upper
    if found.correction.runs:
        factor, runs = found.correction.memory, found.correction.runs
        yield f"the peak is {factor:.2f} times the formulas', by {runs} run{'s' * (runs > 1)} here"


def bar(num_bytes: float, there: float) -> str:
    """As long as its share of `there`."""
    return "█" * max(1, round(BAR * num_bytes / there))


def time_rows(found: Forecast) -> list[tuple[str, str, str]]:
    """Name, seconds, share of the step; then what comes of it."""
    time = found.time
    assert time is not None
    parts = {
        "matrix products": time.linear,
        "attention": time.attention,
        "between the products": time.elementwise + time.launches,
        "output layer and loss": time.vocabulary,
        "waiting: data-parallel ranks": time.data,
        "waiting: tensor-parallel ranks": time.tensor,
        "waiting: sequence-parallel ranks": time.sequence,
        "waiting: bubble of the stages": time.bubble,
        "waiting: slowest rank": time.stragglers,
        "optimizer": time.optimizer,
        "to and from the host": time.offload,
    }
    rows = [
        (name, f"{seconds:.3f}", f"{seconds / time.seconds:.1%}")
        for name, seconds in parts.items()
        if seconds > 5e-4
    ]
    rows.append(("step", f"{time.seconds:.3f}", ""))
    total = time.tokens_per_second * time.gpus
    mfu = f"MFU {found.mfu:.1%}" if found.mfu is not None else ""
    rows.append((f"{total:,.0f} tokens/s, {time.tokens_per_second:,.0f} of one GPU", mfu, ""))
    return rows


def scaling_rows(forecasts: Sequence[Forecast]) -> list[tuple[str, ...]]:
    """One a number of GPUs."""
    rows: list[tuple[str, ...]] = []
    for each in forecasts:
        time = each.time
        if time is not None:
            total = time.tokens_per_second * time.gpus
            fits = {True: "yes", False: "no", None: "not known"}[each.fits]
            speed = (f"{time.seconds:.2f}", f"{total:,.0f}", f"{time.tokens_per_second:,.0f}")
            rows.append((f"{time.gpus:,}", *speed, f"{each.peak / GIB:.1f}", fits))
    return rows


def change_rows(changes: Sequence[Change]) -> list[tuple[str, str, str, str]]:
    """Words, GiB, time, what it is."""
    return [
        (
            " ".join(each.overrides),
            "" if each.gain is None else f"{-each.gain / GIB:+.1f}",
            "" if each.slower is None else f"{each.slower:.2f} x",
            each.name + (f"; {each.why}" if each.why else ""),
        )
        for each in changes
    ]


def as_json(found: Forecast, changes: Sequence[Change], scaling: Sequence[Forecast]) -> dict[str, Any]:
    """All of it, bytes and seconds as numbers."""
    time, resolved = found.time, found.resolved
    return {
        "model": {
            "name": found.model.name,
            "parameters": found.model.numel,
            "trained_parameters": found.model.trained,
        },
        "split": str(resolved.split),
        "batch": asdict(resolved.plan) | {"global_batch_size": resolved.plan.global_batch_size},
        "place": str(found.place),
        "memory": {
            "parts_bytes": dict(found.memory.parts),
            "peak_bytes": found.peak,
            "peak_phase": found.memory.at,
            "phases_bytes": dict(found.memory.phases),
            "there_bytes": found.place.memory,
            "fits": found.fits,
            "lacking": found.lacking,
            "spare_bytes": found.memory.spare,
            "remarks": list(remarks(found)),
        },
        "host_bytes": found.host_bytes,
        "host_there_bytes": found.place.host_memory,
        "copy_bytes": found.copy_bytes,
        "nvme_bytes": found.nvme_bytes,
        "checkpoint_bytes": found.checkpoint_bytes,
        "disk_bytes": found.disk_bytes,
        "time": None
        if time is None
        else asdict(time)
        | {
            "seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second * time.gpus,
            "tokens_per_second_per_gpu": time.tokens_per_second,
            "mfu": found.mfu,
        },
        "run": {"hours": found.hours, "kilowatt_hours": found.kilowatt_hours, "cost": found.cost},
        "scaling": [
            {
                "gpus": each.resolved.split.world_size,
                "seconds": each.time and each.time.seconds,
                "tokens_per_second": each.time and each.time.tokens_per_second * each.time.gpus,
                "peak_bytes": each.peak,
                "fits": each.fits,
            }
            for each in scaling
        ],
        "changes": [asdict(each) for each in changes],
    }
