"""Command `python -m pipeline plan`: estimates memory, time and disk of a run before it starts."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.cli.inputs import add_overrides
from pipeline.config.command_lines import Word, format_shell_line, format_train_command
from pipeline.config.settings import Settings, load_settings
from pipeline.config.shipped import DEFAULT_RECIPE, LAUNCH
from pipeline.files import GIB, format_duration
from pipeline.planner.changes import (
    ConfigChange,
    SearchResult,
    find_largest_micro_batch,
    find_largest_model,
    find_longest_sequence,
    price_changes,
    sort_by_memory_gain,
    suggest_split,
)
from pipeline.planner.forecast import Forecast, choose_auto_micro_batch, forecast
from pipeline.planner.hardware import PlannedHardware, resolve_hardware
from pipeline.planner.model import ModelSpec
from pipeline.planner.shapes import read_model_spec
from pipeline.planner.timing import TIME_TOLERANCE

MAX_CHANGES = 12


def format_summary(found: Forecast) -> Iterator[str]:
    """Yield lines on model, split, batch, host memory, disk and time of the run."""
    model = found.model
    resolved = found.resolved
    place = found.hardware
    trained = "" if model.trained == model.numel else f", {model.trained / model.numel:.2%} of them trained"
    yield f"model   {model.name}, {model.numel:,} parameters{trained}"
    yield f"split   {resolved.split}; {place}"
    yield f"batch   {resolved.batch_plan}"
    host = f"host    {found.host_bytes / GIB:.1f} GiB of a machine's memory"
    if place.host_memory:
        host += f" of {place.host_memory / GIB:.1f}{' (assumed)' * place.assumes_host}"
    yield host
    nvme = found.memory.states.disk.total * found.ranks_per_node
    swapped = f"; {nvme / GIB:.1f} GiB of a machine's NVMe" if nvme else ""
    one = found.checkpoint_bytes / GIB
    together = found.disk_bytes / GIB
    yield f"disk    {one:.1f} GiB per checkpoint, {together:.1f} GiB in all{swapped}"
    if found.hours is not None:
        low, high = (
            format_duration(found.hours * 3600 * part) for part in (1 - TIME_TOLERANCE, 1 + TIME_TOLERANCE)
        )
        money = "" if found.cost is None else f", costs about {found.cost:,.2f}"
        yield f"run     {found.config.max_steps:,} steps in {low} to {high}{money}"


def format_memory_rows(found: Forecast) -> Iterator[str]:
    """Yield one line for each part at its own peak, then the peak of all and the device's memory."""
    memory = found.memory
    for name, num_bytes in memory.parts.items():
        if num_bytes:
            yield f"  {name:<28}{num_bytes / GIB:9.2f} GiB"
    yield f"  {f'peak, in the {memory.peak_phase}':<28}{found.peak / GIB:9.2f} GiB"
    sign = "fits" if found.fits else "whether it fits is not known"
    if lacking := found.lacking:
        sign = "does not fit" if lacking == "memory" else f"does not fit: {lacking}"
    there = found.hardware.memory
    yield f"  {'there is':<28}{there / GIB:9.2f} GiB  {found.peak / there:.0%}: {sign}"


def format_range(value: float) -> str:
    """Write a time or a speed as the range in which it is expected."""
    digits = 2 if value >= 1 else 4
    if value >= 100:
        digits = 0
    return f"{value * (1 - TIME_TOLERANCE):,.{digits}f} to {value * (1 + TIME_TOLERANCE):,.{digits}f}"


def format_time_rows(found: Forecast) -> list[tuple[str, str]]:
    """Return name and seconds of each part of a step, then the step's time, throughput and MFU."""
    time = found.time
    assert time is not None
    rows = [(name, f"{seconds:.3f}") for name, seconds in time.parts.items() if seconds > 5e-4]
    rows.append(("a step", format_range(time.seconds)))
    rows.append(("tokens a second", format_range(time.tokens_per_second)))
    if found.mfu is not None:
        low, high = (100 * found.mfu * part for part in (1 - TIME_TOLERANCE, 1 + TIME_TOLERANCE))
        rows.append(("MFU", f"{low:.0f} to {high:.0f} %"))
    return rows


def convert_to_json(found: Forecast, changes: Sequence[ConfigChange] = ()) -> dict[str, Any]:
    """Return a plan as a JSON object, with bytes and seconds as numbers."""
    time = found.time
    batch = found.resolved.batch_plan
    memory = found.memory
    return {
        "model": {"name": found.model.name, "parameters": found.model.numel},
        "split": str(found.resolved.split),
        "batch": asdict(batch) | {"global_batch_size": batch.global_batch_size},
        "place": str(found.hardware),
        "memory": {
            "parts_bytes": memory.parts,
            "peak_bytes": found.peak,
            "there_bytes": found.hardware.memory,
        },
        "fits": found.fits,
        "lacking": found.lacking,
        "host_bytes": found.host_bytes,
        "host_there_bytes": found.hardware.host_memory,
        "checkpoint_bytes": found.checkpoint_bytes,
        "disk_bytes": found.disk_bytes,
        "time": time
        and {
            "parts_seconds": time.parts,
            "seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            "may_be_off_by": TIME_TOLERANCE,
            "mfu": found.mfu,
        },
        "run": {"hours": found.hours, "cost": found.cost},
        "remarks": list(found.remarks()),
        "changes": [asdict(each) for each in changes],
    }


HELP = "estimate memory, time and disk of a run without a GPU, and what to change"
DESCRIPTION = """\
Estimates a run before it starts: memory of the rank that needs most and time of a step, both by part, host
memory and disk. If the run does not fit, lists changes that help. Reads no weights and needs no GPU."""
EPILOG = """\
  ds-pipeline plan --config RECIPE.yaml --deepspeed zero3 --gpu h100 --gpus 8
  ds-pipeline plan --config RECIPE.yaml --gpu a100 --gpus 8 --nodes 2 --suggest
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    recipe = f"recipe (default: {DEFAULT_RECIPE.stem})"
    parser.add_argument("--config", type=Path, metavar="RECIPE.yaml", help=recipe)
    parser.add_argument("--deepspeed", type=Path, metavar="FILE.json", help="split and precision")
    parser.add_argument("--gpu", metavar="NAME", help="h100, a100-40, 4090, ... (default: this machine's)")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of one GPU")
    gpus = "GPUs per machine (default: 1)"
    parser.add_argument("--gpus", type=_parse_count, metavar="N", default=1, help=gpus)
    parser.add_argument("--nodes", type=_parse_count, metavar="N", default=1, help="machines (default: 1)")
    network = "Gbit/s of each GPU's network card between machines (default: what vendors build in)"
    parser.add_argument("--network", type=float, metavar="GBIT", help=network)
    host = "host memory of one machine (default: what machines with such GPUs usually have)"
    parser.add_argument("--host-memory", type=float, metavar="GIB", help=host)
    documents = "average length of the document that a token is in, if rows are packed (default: 2048)"
    parser.add_argument("--document-tokens", type=_parse_count, metavar="N", help=documents)
    asked = parser.add_mutually_exclusive_group()
    suggested = "find the simplest split that fits, and print the command to train with it"
    asked.add_argument("--suggest", action="store_true", help=suggested)
    asked.add_argument("--longest", action="store_true", help="find the longest sequence that fits")
    largest = "find the largest micro-batch, and the largest number of blocks of this width, that fit"
    asked.add_argument("--largest", action="store_true", help=largest)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-color", action="store_true", help="plain text")
    add_overrides(parser, "recipe keys and, with ds., DeepSpeed keys, as for train")


def _parse_count(text: str) -> int:
    if not text.isdecimal() or len(text) > 7 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no positive number")
    return int(text)


def run(arguments: argparse.Namespace) -> None:
    """Print the plan, the suggested split or the limits that the arguments ask for.

    Raises:
        ConfigError, ModelError: The settings are invalid, or nothing fits.
    """
    settings, place = read_inputs(arguments)
    model = _read_model(settings)
    if arguments.longest or arguments.largest:
        reached = find_limits(settings, model, place, arguments.longest)
        if arguments.json:
            print(json.dumps({name: _convert_limit(limit) for name, limit in reached.items()}, indent=2))
            return
        for name, limit in reached.items():
            print(f"{name:<20}  {_format_limit(limit, place)}")
        return
    extra: dict[str, Any] = {}
    changes: list[ConfigChange] = []
    if arguments.suggest:
        suggestion = suggest_split(settings, model, place)
        assert suggestion.forecast is not None
        found = suggestion.forecast
        extra = {"overrides": suggestion.words, "command": format_command(settings, place, suggestion)}
    else:
        found, changes = plan_run(settings, model, place)
    if arguments.json:
        print(json.dumps(convert_to_json(found, changes) | extra, indent=2))
        return
    _show(found, changes, arguments.no_color)
    if arguments.suggest:
        print(f"\nThe simplest split that fits. To train with it: {extra['command']}")


def _show(found: Forecast, changes: Sequence[ConfigChange], no_color: bool) -> None:
    from pipeline.cli.screen import Screen

    screen = Screen(no_color)
    for line in format_summary(found):
        screen.line(line)
    screen.title("Memory of the fullest rank")
    for line in (*format_memory_rows(found), *(f"  {remark}" for remark in found.remarks())):
        screen.line(line)
    if found.time is not None:
        screen.title("A step")
        screen.table(("", "seconds"), format_time_rows(found))
    if changes:
        screen.title("Changes that help: append one to the command")
        for change in changes:
            screen.line(f"  {change}")


def read_inputs(arguments: argparse.Namespace) -> tuple[Settings, PlannedHardware]:
    """Return the settings and the hardware that the command line names."""
    settings = load_settings(
        arguments.config,
        arguments.deepspeed,
        arguments.overrides,
        import_paths=not arguments.no_import_paths,
    )
    place = resolve_hardware(
        arguments.gpu,
        arguments.gpu_memory,
        per_node=arguments.gpus,
        nodes=arguments.nodes,
        network=arguments.network,
        host_memory_gib=arguments.host_memory,
        document_tokens=arguments.document_tokens,
    )
    return settings, place


def _read_model(settings: Settings) -> ModelSpec:
    model = read_model_spec(settings.config)
    if model is None:  # the model has to be built to be known
        from pipeline.models.sizes import measure_recipe

        model = measure_recipe(settings.config)
    return model


def plan_run(
    settings: Settings, model: ModelSpec, place: PlannedHardware
) -> tuple[Forecast, list[ConfigChange]]:
    """Return the forecast of a run and, if it does not fit, changes that help."""
    settings = _resolve_micro_batch(settings, model, place)
    found = forecast(settings, model, place)

    def at(changed: Settings) -> Forecast:
        shaping = ("model", "adapter", "data")
        is_same = all(getattr(changed.config, key) == getattr(settings.config, key) for key in shaping)
        known = model if is_same else _read_model(changed)
        return forecast(_resolve_micro_batch(changed, known, place), known, place)

    if found.fits is not False:
        return found, []
    changes = sort_by_memory_gain(price_changes(settings, found, at), found)
    if found.lacking.startswith("host memory"):  # memory saved on a GPU frees no host memory
        changes = [each for each in changes if each.fits]
    return found, changes[:MAX_CHANGES]


def _resolve_micro_batch(settings: Settings, model: ModelSpec, place: PlannedHardware) -> Settings:
    """Return the settings with the largest micro-batch that is expected to fit in place of `auto`."""
    resolved = settings.resolve(place.ranks, place.device)
    if not resolved.batch_plan.is_provisional:
        return settings
    return settings.with_micro_batch_size(choose_auto_micro_batch(settings.config, resolved, model, place))


def format_command(settings: Settings, place: PlannedHardware, suggestion: SearchResult) -> str:
    """Return the command that trains with the suggested split."""
    # The last override of a key wins, so the suggested ones follow those that the user typed.
    typed = [each for each in settings.overrides if not each.startswith("ds.")]
    file = suggestion.words[:2]
    others = suggestion.words[2:]
    words: tuple[Word, ...] = ("--config", settings.recipe_path, *file, *typed, *others)
    if place.nodes > 1:
        return format_shell_line(LAUNCH / "multi_node.sh", "HOSTFILE", *words)
    return format_train_command(place.per_node, *words)


def find_limits(
    settings: Settings, model: ModelSpec, place: PlannedHardware, longest: bool
) -> dict[str, SearchResult]:
    """Return the largest runs by name: the longest sequence, or else micro-batch and model."""
    if longest:
        return {"longest sequence": find_longest_sequence(settings, model, place)}
    return {
        "largest micro-batch": find_largest_micro_batch(settings, model, place),
        "largest model": find_largest_model(settings, model, place),
    }


def _convert_limit(limit: SearchResult) -> dict[str, Any]:
    return {
        "overrides": limit.words,
        "stops": limit.stop_reason,
        "plan": None if limit.forecast is None else convert_to_json(limit.forecast),
    }


def _format_limit(limit: SearchResult, place: PlannedHardware) -> str:
    found = limit.forecast
    if found is None:
        return f"none fits on {place}" if limit.stop_reason == "memory" else f"none: {limit.stop_reason}"
    size = f"{found.model.numel:,} parameters, {found.peak / GIB:.1f} GiB"
    stops = "" if limit.stop_reason == "memory" else f"; {limit.stop_reason}"
    return f"{shlex.join(limit.words)}   ({size}{stops})"
