"""`python -m pipeline plan`: what a run would take, before it starts and without a GPU."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.cli.inputs import add_overrides
from pipeline.config.command_lines import Word, own_command
from pipeline.config.settings import Settings, load_settings
from pipeline.config.shipped import DEFAULT_RECIPE
from pipeline.errors import ConfigError
from pipeline.files import GIB, format_duration
from pipeline.planner.forecast import Change, Forecast, forecast, largest_that_fits
from pipeline.planner.hardware import NETWORK_HELP
from pipeline.planner.model import Model
from pipeline.planner.place import History, Place, history_of, place_of
from pipeline.planner.proposals import (
    Limit,
    helpful,
    largest_micro_batch,
    largest_model,
    longest_sequence,
)
from pipeline.planner.shapes import model_of
from pipeline.planner.suggest import suggest, text_beside, write

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


HELP = "say what a run takes (memory, time, disk) without a GPU, and what to change"
DESCRIPTION = """\
Says what a run takes before it starts: the memory of its fullest rank by what holds it, the time of a step by
part, the host's memory, the disk. Then what to change. No weights are read, and no GPU is needed."""
EPILOG = """\
  ds-pipeline plan --config RECIPE.yaml --deepspeed zero3 --gpu h100 --gpus 8
  ds-pipeline plan --config RECIPE.yaml --gpu-memory 80 --gpus 8 --nodes 2 --suggest split.json
"""
SUGGESTED = "suggested.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--config",
        type=Path,
        metavar="RECIPE.yaml",
        help=f"recipe (default: {DEFAULT_RECIPE.stem})",
    )
    parser.add_argument("--deepspeed", type=Path, metavar="FILE.json", help="split and precision")
    parser.add_argument("--gpu", metavar="NAME", help="h100, a100-40, 4090, ... (default: what is here)")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="what one GPU has")
    parser.add_argument("--gpus", type=_positive, metavar="N", default=1, help="of one machine (default: 1)")
    parser.add_argument("--nodes", type=_positive, metavar="N", default=1, help="machines (default: 1)")
    parser.add_argument("--network", metavar="GBIT", help=NETWORK_HELP)
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="of one machine")
    asked = parser.add_mutually_exclusive_group()
    suggested = f"find the fastest split that fits, and write it (default: {SUGGESTED})"
    asked.add_argument(
        "--suggest", nargs="?", type=Path, const=Path(SUGGESTED), metavar="FILE.json", help=suggested
    )
    asked.add_argument("--longest", action="store_true", help="the longest sequence that fits")
    largest = "the largest micro-batch, and the largest model of this family, that fit"
    asked.add_argument("--largest", action="store_true", help=largest)
    force = "write over what --suggest finds there"
    parser.add_argument("--force", action="store_true", help=force)
    no_history = "the formulas alone, not corrected by what runs here took"
    parser.add_argument("--no-history", action="store_true", help=no_history)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--no-color", action="store_true", help="plain text")
    add_overrides(parser, "recipe keys and, with ds., DeepSpeed keys, as for train")


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 7 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no positive number")
    return int(text)


def run(arguments: argparse.Namespace) -> None:
    settings = load_settings(
        arguments.config or DEFAULT_RECIPE,
        arguments.deepspeed,
        arguments.overrides,
        import_paths=not arguments.no_import_paths,
        is_default=arguments.config is None,
    )
    history = None if arguments.no_history else history_of(settings.config)
    place = place_of(
        arguments.gpu,
        arguments.gpu_memory,
        per_node=arguments.gpus,
        nodes=arguments.nodes,
        network=arguments.network,
        host_memory_gib=arguments.host_memory,
        history=history,
    )
    model = _model(settings)
    if arguments.suggest is not None:
        _suggest(settings, model, place, history, arguments)
    elif arguments.longest or arguments.largest:
        _limits(settings, model, place, history, arguments)
    else:
        _plan(settings, model, place, history, arguments)


def _with_a_micro_batch(settings: Settings, model: Model, place: Place, history: History | None) -> Settings:
    """In place of `auto` the largest that is expected to fit."""
    resolved = settings.resolve(place.ranks, place.device)
    if not resolved.plan.is_open:
        return settings
    return settings.divided(largest_that_fits(settings.config, resolved, model, place, history))


def _model(settings: Settings) -> Model:
    model = model_of(settings.config)
    if model is None:  # it has to be built
        from pipeline.models.sizes import count

        model = count(settings.config)
    return model


def _plan(
    settings: Settings, model: Model, place: Place, history: History | None, arguments: argparse.Namespace
) -> None:
    asked, settings = settings, _with_a_micro_batch(settings, model, place, history)
    found = forecast(settings, model, place, history)

    def at(changed: Settings) -> Forecast:
        shaping = ("model", "adapter", "data")
        is_same = all(getattr(changed.config, key) == getattr(settings.config, key) for key in shaping)
        known = model if is_same else _model(changed)
        return forecast(_with_a_micro_batch(changed, known, place, history), known, place, history)

    changes = helpful(settings, found, at)
    scaling = _scaling(asked, model, place, history)
    if arguments.json:
        print(json.dumps(as_json(found, changes, scaling), indent=2))
        return
    from pipeline.cli.screen import Screen

    screen = Screen(arguments.no_color)
    for line in summary(found):
        screen.line(line)
    screen.title("Memory of the fullest rank")
    for line in memory_rows(found):
        screen.line(line)
    if found.time is not None:
        screen.title("A step")
        screen.table(("", "seconds", "share"), time_rows(found))
        screen.title("On more and fewer GPUs")
        screen.table(("GPUs", "s a step", "tokens/s", "of one GPU", "GiB", "fits"), scaling_rows(scaling))
    if changes:
        screen.title("What to change" if not found.fits else "What would be faster")
        screen.table(
            ("words for the command line", "GiB", "time", ""),
            change_rows(changes),
            ("words for the command line", ""),
        )


def _scaling(settings: Settings, model: Model, place: Place, history: History | None) -> list[Forecast]:
    """On 1, 2, 4 ... GPUs, and on those asked for; without those on which the split or the batch is none."""
    counts = {2**power for power in range(12) if 2**power <= 2 * place.ranks} | {place.ranks}
    found = []
    for count in sorted(counts):
        try:
            if (there := place.with_gpus(count)).ranks == count:  # else machines are not filled evenly
                divided = _with_a_micro_batch(settings, model, there, history)
                found.append(forecast(divided, model, there, history))
        except ConfigError:
            continue
    return found


def _suggest(
    settings: Settings, model: Model, place: Place, history: History | None, arguments: argparse.Namespace
) -> None:
    text_beside(arguments.suggest, arguments.force)  # before a search of seconds
    found = suggest(settings, model, place, history)
    why = write(found, arguments.suggest, settings.recipe_path, _typed(arguments, settings), arguments.force)
    if arguments.json:
        told = {"file": str(arguments.suggest), "overrides": found.best.overrides}
        print(json.dumps(as_json(found.best.found, [], []) | told, indent=2))
        return
    print(why.read_text("utf-8"), end="")


def _typed(arguments: argparse.Namespace, settings: Settings) -> str:
    """Return the command that was typed, with absolute paths in the place of its files."""
    files = {arguments.config: settings.recipe_path, arguments.deepspeed: settings.split_path}
    files |= {arguments.suggest: arguments.suggest}
    words: list[Word] = []
    for word in sys.argv[1:]:
        option, equals, value = word.rpartition("=")
        path = files.get(Path(value))
        words.append(word if path is None else f"{option}{equals}{path.absolute()}")
    return own_command(*words)


Find: TypeAlias = Callable[[Settings, Model, Place, History | None], Limit]
LIMITS: dict[str, dict[str, Find]] = {
    "--longest": {"longest sequence": longest_sequence},
    "--largest": {"largest micro-batch": largest_micro_batch, "largest model": largest_model},
}
"""What can be as large as fits, by the option, and who finds it."""


def _limits(
    settings: Settings, model: Model, place: Place, history: History | None, arguments: argparse.Namespace
) -> None:
    option = "--longest" if arguments.longest else "--largest"
    limits = {name: find(settings, model, place, history) for name, find in LIMITS[option].items()}
    if arguments.json:
        print(json.dumps({name: _as_json(limit) for name, limit in limits.items()}, indent=2))
        return
    for name, limit in limits.items():
        print(f"{name:<20}  {_as_text(limit, place)}")


def _as_json(limit: Limit) -> dict[str, Any]:
    found = limit.found
    return {
        "overrides": limit.words,
        "parameters": found and found.model.numel,
        "peak_bytes": found and found.peak,
        "stops": limit.stops or "memory",
    }


def _as_text(limit: Limit, place: Place) -> str:
    found = limit.found
    if found is None:
        return f"none fits on {place}" if not limit.stops else f"none: {limit.stops}"
    size = [f"{found.model.numel:,} parameters", f"{found.peak / GIB:.1f} GiB"]
    return f"{shlex.join(limit.words)}   ({'; '.join([', '.join(size), *filter(None, [limit.stops])])})"
