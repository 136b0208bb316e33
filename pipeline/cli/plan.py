"""`python -m pipeline plan`: what a run would take, before it starts and without a GPU."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.cli.inputs import add_overrides
from pipeline.config.command_lines import Word, own_command
from pipeline.config.settings import Settings, load_settings
from pipeline.config.shipped import DEFAULT_RECIPE
from pipeline.errors import ConfigError
from pipeline.files import GIB
from pipeline.planner.forecast import Forecast, forecast, largest_that_fits
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
from pipeline.planner.telling import as_json, change_rows, memory_rows, scaling_rows, summary, time_rows

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
        arguments.gpus,
        arguments.nodes,
        arguments.network,
        arguments.host_memory,
        history,
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
    from pipeline.cli.inspection.screen import Screen

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
