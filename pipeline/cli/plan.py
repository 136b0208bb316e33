"""Command `python -m pipeline plan`: estimates memory, time and disk of a run before it starts.

In this file an estimate is a `Forecast`.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.cli import plan_recipes
from pipeline.cli.inputs import PATH_OR_NAME, ParagraphHelpFormatter, add_overrides
from pipeline.config.command_lines import Word, format_shell_line, format_train_command
from pipeline.config.settings import Settings, load_settings
from pipeline.config.shipped import DEFAULT_RECIPE, LAUNCH
from pipeline.errors import PipelineError
from pipeline.files import GIB, format_duration
from pipeline.planner.changes import (
    ConfigChange,
    NoSplitFitsError,
    SearchResult,
    find_largest_micro_batch,
    find_largest_model,
    find_longest_sequence,
    price_changes,
    sort_by_memory_gain,
    suggest_split,
)
from pipeline.planner.forecast import Forecast, forecast, resolve_auto_micro_batch
from pipeline.planner.hardware import PlannedHardware, resolve_hardware
from pipeline.planner.model import ModelSpec
from pipeline.planner.shapes import read_model_spec
from pipeline.planner.timing import TIME_TOLERANCE

MAX_CHANGES = 12  # number of changes that are listed if a run does not fit
MAX_COUNT = 9_999_999  # largest number of GPUs, machines or tokens that an option takes
LABEL_WIDTH = 35  # characters of a line before the number; the longest name has 33


def format_summary(estimate: Forecast) -> Iterator[str]:
    """Yield lines on model, split, batch, host memory, disk and time of the run."""
    model = estimate.model
    resolved = estimate.resolved
    hardware = estimate.hardware
    is_partly_trained = model.trained != model.numel
    trained = f", {model.trained / model.numel:.2%} of them trained" if is_partly_trained else ""
    yield f"model   {model.name}, {model.numel:,} parameters{trained}"
    yield f"split   {resolved.split}; {hardware}"
    yield f"batch   {resolved.batch_plan}"
    host = f"{estimate.host_bytes / GIB:.1f}"
    assumed = ""
    if hardware.host_memory:
        host += f" of {hardware.host_memory / GIB:.1f}"
        assumed = " (assumed)" if hardware.assumes_host else ""
    yield f"host    {host} GiB of a machine's memory{assumed}"
    nvme_bytes = estimate.memory.states.disk.total * estimate.ranks_per_node
    nvme = f"; {nvme_bytes / GIB:.1f} GiB of a machine's NVMe" if nvme_bytes else ""
    checkpoint = estimate.checkpoint_bytes / GIB
    all_checkpoints = estimate.disk_bytes / GIB
    yield f"disk    {checkpoint:.1f} GiB per checkpoint, at most {all_checkpoints:.1f} GiB for all{nvme}"
    if estimate.hours is not None:
        seconds = estimate.hours * 3600
        shortest = format_duration(seconds * (1 - TIME_TOLERANCE))
        longest = format_duration(seconds * (1 + TIME_TOLERANCE))
        cost = "" if estimate.cost is None else f", costs {format_range(estimate.cost)}"
        yield f"run     {estimate.config.max_steps:,} steps in {shortest} to {longest}{cost}"
    elif estimate.time is not None:
        epochs = f"{estimate.config.max_epochs:g} epochs"
        yield f"run     {epochs}; the plan does not read the data: for time and cost, add max_steps=N"
    elif estimate.config.log.price_per_device_hour is not None:
        yield "run     the time of a step is not known, so neither is the cost"


def format_memory_rows(estimate: Forecast) -> Iterator[str]:
    """Yield a line for each part of a rank's memory, then the peak and the memory of the device.

    The parts add up to more than the peak, since each is shown at its own peak.
    """
    memory = estimate.memory
    for name, num_bytes in memory.parts.items():
        if num_bytes:
            yield f"  {name:<{LABEL_WIDTH}}{num_bytes / GIB:9.2f} GiB"
    yield f"  {f'peak, in the {memory.peak_phase}':<{LABEL_WIDTH}}{estimate.peak / GIB:9.2f} GiB"
    available = estimate.hardware.memory
    verdict = f"{estimate.peak / available:.0%}: {_format_verdict(estimate)}"
    yield f"  {'memory of the device':<{LABEL_WIDTH}}{available / GIB:9.2f} GiB  {verdict}"


def _format_verdict(estimate: Forecast) -> str:
    """Return whether the run fits and, if something else than the device's memory is short, what it is."""
    if estimate.lacking == "memory":
        return "does not fit"
    if estimate.lacking:
        return f"does not fit: {estimate.lacking}"
    return "fits" if estimate.fits else "whether it fits is not known"


def format_range(value: float) -> str:
    """Return a time or a speed as the range in which it is expected."""
    digits = 2 if value >= 1 else 4
    if value >= 100:
        digits = 0
    return f"{value * (1 - TIME_TOLERANCE):,.{digits}f} to {value * (1 + TIME_TOLERANCE):,.{digits}f}"


def format_time_rows(estimate: Forecast) -> Iterator[str]:
    """Yield a line for the seconds of each part of a step, then the step's time, throughput and MFU.

    Yields nothing if the time is not known.
    """
    time = estimate.time
    if time is None:
        return
    # A run's tok/s counts target tokens only. The plan cannot know how many of the positions are targets.
    rows = [(name, f"{seconds:.3f} s") for name, seconds in time.parts.items() if seconds > 5e-4]
    rows.append(("a step", f"{format_range(time.seconds)} s"))
    rows.append(("positions per second", format_range(time.tokens_per_second)))
    if estimate.mfu is not None:
        lowest = 100 * estimate.mfu * (1 - TIME_TOLERANCE)
        highest = 100 * estimate.mfu * (1 + TIME_TOLERANCE)
        rows.append(("MFU", f"{lowest:.0f} to {highest:.0f} %"))
    for name, value in rows:
        yield f"  {name:<{LABEL_WIDTH}}{value}"


def convert_to_json(estimate: Forecast, changes: Sequence[ConfigChange] = ()) -> dict[str, Any]:
    """Return a plan as a JSON object, with bytes and seconds as numbers.

    Args:
        estimate: Forecast of the run.
        changes: Changes that help if the run does not fit.
    """
    time = estimate.time
    batch = estimate.resolved.batch_plan
    memory = estimate.memory
    return {
        "model": {"name": estimate.model.name, "parameters": estimate.model.numel},
        "split": str(estimate.resolved.split),
        "batch": {
            "micro_batch_size": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.gradient_accumulation_steps,
            "dp_world_size": batch.dp_world_size,
            "is_auto": batch.is_provisional,
            "global_batch_size": batch.global_batch_size,
        },
        "place": str(estimate.hardware),
        "memory": {
            "parts_bytes": memory.parts,
            "peak_bytes": estimate.peak,
            "there_bytes": estimate.hardware.memory,
        },
        "fits": estimate.fits,
        "lacking": estimate.lacking,
        "host_bytes": estimate.host_bytes,
        "host_there_bytes": estimate.hardware.host_memory,
        "checkpoint_bytes": estimate.checkpoint_bytes,
        "disk_bytes": estimate.disk_bytes,
        "time": time
        and {
            "parts_seconds": time.parts,
            "seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            "may_be_off_by": TIME_TOLERANCE,
            "mfu": estimate.mfu,
        },
        "run": {"hours": estimate.hours, "cost": estimate.cost},
        "remarks": list(estimate.remarks()),
        "changes": [_convert_change(change) for change in changes],
    }


def _convert_change(change: ConfigChange) -> dict[str, Any]:
    """Return a change as a JSON object."""
    return {
        "name": change.name,
        "kind": change.kind,
        "overrides": change.overrides,
        "gain": change.gain,
        "slower": change.time_ratio,
        "fits": change.fits,
    }


HELP = "estimate memory, time and disk of a run before it starts, and what to change if it does not fit"
DESCRIPTION = """\
Estimate a run before it starts: the memory of the rank that needs most and the time of a step, both by part,
host memory and disk. If the run does not fit, list changes that help; the exit code is 0 then, too. The
command needs no GPU and reads no weights, only the config.json of a pretrained model."""
EPILOG = """\
Examples:

  ds-pipeline plan --config RECIPE.yaml --deepspeed zero3 --gpu h100 --gpus 8
  ds-pipeline plan --config RECIPE.yaml --gpu a100 --gpus 8 --nodes 2 --suggest
  ds-pipeline plan --recipes --gpu 4090
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = ParagraphHelpFormatter
    recipe = f"recipe; {PATH_OR_NAME} (default: {DEFAULT_RECIPE.stem})"
    parser.add_argument("--config", type=Path, metavar="RECIPE.yaml", help=recipe)
    split = f"split and precision; {PATH_OR_NAME}"
    parser.add_argument("--deepspeed", type=Path, metavar="FILE.json", help=split)
    gpu = "kind of GPU: h100, a100-40, 4090, ... (default: this machine's)"
    parser.add_argument("--gpu", metavar="NAME", help=gpu)
    gpu_memory = "memory of one GPU, if it is of no known kind or has another size"
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help=gpu_memory)
    gpus = "number of GPUs per machine (default: 1)"
    parser.add_argument("--gpus", type=_parse_count, metavar="N", default=1, help=gpus)
    nodes = "number of machines (default: 1)"
    parser.add_argument("--nodes", type=_parse_count, metavar="N", default=1, help=nodes)
    network = "Gbit/s of each GPU's network card between machines (default: as in the vendor's machines)"
    parser.add_argument("--network", type=float, metavar="GBIT", help=network)
    host = "host memory of one machine (default: what machines with such GPUs usually have)"
    parser.add_argument("--host-memory", type=float, metavar="GIB", help=host)
    documents = "average tokens of a document, weighted by its length, if rows are packed (default: 2048)"
    parser.add_argument("--document-tokens", type=_parse_count, metavar="N", help=documents)
    searches = parser.add_mutually_exclusive_group()
    suggest = "find the simplest split that fits, and print the command to train with it"
    searches.add_argument("--suggest", action="store_true", help=suggest)
    longest = "find the longest sequence that fits"
    searches.add_argument("--longest", action="store_true", help=longest)
    largest = "find the largest micro-batch that fits, and the largest number of blocks of the recipe's width"
    searches.add_argument("--largest", action="store_true", help=largest)
    recipes = "print memory and time of each shipped recipe, or of --config, on three machines or on --gpu"
    searches.add_argument("--recipes", action="store_true", help=recipes)
    as_json = "print all numbers as JSON; `fits` says whether the run fits, the exit code is 0 either way"
    parser.add_argument("--json", action="store_true", help=as_json)
    parser.add_argument("--no-color", action="store_true", help="print without colours and bold type")
    add_overrides(parser, "recipe keys and, with ds., DeepSpeed keys, as for train")


def _parse_count(text: str) -> int:
    """Return the number from 1 to MAX_COUNT that an option has.

    Raises:
        ArgumentTypeError: The text is no such number.
    """
    has_digits = text.isdecimal() and len(text) <= len(str(MAX_COUNT))
    if not has_digits or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text[:20]!r}, expected a number from 1 to {MAX_COUNT:,}")
    return int(text)


def run(arguments: argparse.Namespace) -> None:
    """Print the plan, the suggested split, the limits or the table that the arguments ask for.

    Raises:
        ConfigError, ModelError: The settings are invalid, or `--suggest` finds no split that fits.
    """
    if arguments.recipes:
        plan_recipes.run(arguments)
        return
    settings, hardware = read_inputs(arguments)
    model = _read_model(settings)
    if arguments.longest or arguments.largest:
        limits = find_limits(settings, model, hardware, arguments.longest)
        if arguments.json:
            print(json.dumps({name: _convert_limit(limit) for name, limit in limits.items()}, indent=2))
            return
        for name, limit in limits.items():
            print(f"{name:<20}  {_format_limit(limit, hardware)}")
        return
    suggested: dict[str, Any] = {}
    changes: list[ConfigChange] = []
    if arguments.suggest:
        suggestion = suggest_split(settings, model, hardware)
        assert suggestion.forecast is not None
        estimate = suggestion.forecast
        command = format_command(settings, hardware, suggestion)
        suggested = {"overrides": suggestion.words, "command": command}
    else:
        estimate, changes = plan_run(settings, model, hardware)
    if arguments.json:
        print(json.dumps(convert_to_json(estimate, changes) | suggested, indent=2))
        return
    advice = format_changes(settings, estimate, changes) if estimate.fits is False else None
    _print_plan(estimate, advice, arguments.no_color)
    if arguments.suggest:
        print(f"\nThis is the simplest split that fits. To train with it: {suggested['command']}")


def _print_plan(estimate: Forecast, advice: tuple[str, list[str]] | None, no_color: bool) -> None:
    """Print the plan of a run; `advice` is a title with lines on what to change, if it does not fit."""
    from pipeline.cli.screen import Screen

    screen = Screen(no_color)
    for line in format_summary(estimate):
        screen.line(line)
    screen.title("Memory of the fullest rank")
    for line in (*format_memory_rows(estimate), *(f"  {remark}" for remark in estimate.remarks())):
        screen.line(line)
    if estimate.time is not None:
        screen.title("Time of a step")
        for line in format_time_rows(estimate):
            screen.line(line)
    if advice is not None:
        title, lines = advice
        screen.title(title)
        for line in lines:
            screen.line(line)


def read_inputs(arguments: argparse.Namespace) -> tuple[Settings, PlannedHardware]:
    """Return the settings and the hardware that the command line names.

    Raises:
        ConfigError: The recipe, the JSON, an override or an option is invalid.
    """
    settings = load_settings(
        arguments.config,
        arguments.deepspeed,
        arguments.overrides,
        import_paths=not arguments.no_import_paths,
    )
    hardware = resolve_hardware(
        arguments.gpu,
        arguments.gpu_memory,
        per_node=arguments.gpus,
        nodes=arguments.nodes,
        network=arguments.network,
        host_memory_gib=arguments.host_memory,
        document_tokens=arguments.document_tokens,
    )
    return settings, hardware


def _read_model(settings: Settings) -> ModelSpec:
    """Return the sizes of the model, from its configuration if that is enough.

    Otherwise the model is built, which imports torch.
    """
    model = read_model_spec(settings.config)
    if model is None:
        from pipeline.models.sizes import measure_recipe

        model = measure_recipe(settings.config)
    return model


def plan_run(
    settings: Settings, model: ModelSpec, hardware: PlannedHardware
) -> tuple[Forecast, list[ConfigChange]]:
    """Return the forecast of a run and, if it does not fit, changes that help.

    Args:
        settings: Settings of the run.
        model: Sizes of the model.
        hardware: Hardware of the run.

    Returns:
        The changes are empty if the run fits, or if that is not known. If some are enough alone, the others
        are left out.
    """
    settings = resolve_auto_micro_batch(settings, model, hardware)
    estimate = forecast(settings, model, hardware)

    def forecast_changed(changed: Settings) -> Forecast:
        sections = ("model", "adapter", "data")  # the model's sizes depend on these
        is_same = all(getattr(changed.config, name) == getattr(settings.config, name) for name in sections)
        changed_model = model if is_same else _read_model(changed)
        resolved = resolve_auto_micro_batch(changed, changed_model, hardware)
        return forecast(resolved, changed_model, hardware)

    may_fit = estimate.fits is not False
    if may_fit:
        return estimate, []
    changes = sort_by_memory_gain(price_changes(settings, estimate, forecast_changed), estimate)
    if estimate.lacking.startswith("host memory"):  # memory saved on a GPU frees no host memory
        changes = [change for change in changes if change.fits]
    enough = [change for change in changes if change.fits is not False]
    return estimate, (enough or changes)[:MAX_CHANGES]


def format_changes(
    settings: Settings, estimate: Forecast, changes: Sequence[ConfigChange]
) -> tuple[str, list[str]]:
    """Return a title and lines that say what to change about a run that does not fit.

    Args:
        settings: Settings of the run.
        estimate: Forecast of the run.
        changes: Changes that `plan_run` found.
    """
    lines = [f"  {change}" for change in changes]
    if any(change.fits is not False for change in changes):
        return "Changes that help: append one to the command", lines
    title = "Changes that help, but none alone is enough" if changes else "No change alone is enough"
    try:
        suggest_split(settings, estimate.model, estimate.hardware)
    except NoSplitFitsError as error:
        return f"No change is enough: {str(error).removeprefix('--suggest: ')}", []
    except PipelineError:  # the search cannot answer, such as for a model whose activations are not known
        return title, lines
    return f"{title}; --suggest finds a combination", lines


def format_command(settings: Settings, hardware: PlannedHardware, suggestion: SearchResult) -> str:
    """Return the command that trains with the suggested split.

    It keeps the overrides that the user typed, except those of the JSON, which the suggested JSON replaces.
    """
    typed = [override for override in settings.overrides if not override.startswith("ds.")]
    json_option = suggestion.words[:2]  # --deepspeed FILE
    overrides = suggestion.words[2:]
    # The last override of a key wins, so the suggested ones follow those that the user typed.
    words: tuple[Word, ...] = ("--config", settings.recipe_path, *json_option, *typed, *overrides)
    if hardware.nodes > 1:
        return format_shell_line(LAUNCH / "multi_node.sh", "HOSTFILE", *words)
    return format_train_command(hardware.per_node, *words)


def find_limits(
    settings: Settings, model: ModelSpec, hardware: PlannedHardware, longest: bool
) -> dict[str, SearchResult]:
    """Return the largest runs that fit, by what is largest in them.

    Args:
        settings: Settings of the run.
        model: Sizes of the model.
        hardware: Hardware of the run.
        longest: Whether to find the longest sequence; otherwise the largest micro-batch and model.
    """
    if longest:
        return {"longest sequence": find_longest_sequence(settings, model, hardware)}
    return {
        "largest micro-batch": find_largest_micro_batch(settings, model, hardware),
        "largest model": find_largest_model(settings, model, hardware),
    }


def _convert_limit(limit: SearchResult) -> dict[str, Any]:
    """Return the largest run as a JSON object."""
    return {
        "overrides": limit.words,
        "stops": limit.stop_reason,
        "plan": None if limit.forecast is None else convert_to_json(limit.forecast),
    }


def _format_limit(limit: SearchResult, hardware: PlannedHardware) -> str:
    """Return the words for the largest run, with its sizes and what ends the search if not memory."""
    estimate = limit.forecast
    if estimate is None:
        return f"none fits on {hardware}" if limit.stop_reason == "memory" else f"none: {limit.stop_reason}"
    size = f"{estimate.model.numel:,} parameters, {estimate.peak / GIB:.1f} GiB"
    stop_reason = "" if limit.stop_reason == "memory" else f"; {limit.stop_reason}"
    return f"{shlex.join(limit.words)}   ({size}{stop_reason})"
