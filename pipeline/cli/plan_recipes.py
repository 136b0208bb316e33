"""Table of `plan --recipes`: memory and time of each shipped recipe on a few machines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.settings import load_settings
from pipeline.config.shipped import RECIPES, find_recipe
from pipeline.errors import ConfigError, ModelError
from pipeline.files import GIB
from pipeline.planner.changes import SearchResult, suggest_split
from pipeline.planner.forecast import Forecast, forecast, resolve_auto_micro_batch
from pipeline.planner.hardware import PlannedHardware, resolve_hardware
from pipeline.planner.shapes import find_unread_tokenizer, read_model_spec
from pipeline.planner.timing import TIME_TOLERANCE

DEFAULT_MACHINES = (("rtx 4090", 1), ("h100", 1), ("h100", 8))
"""GPU and number of GPUs of each column if the command line names no machine."""
LEGEND = f"""\
A cell: memory of the fullest GPU, and time of the run, or its speed if it counts epochs.
Time and speed may be off by {TIME_TOLERANCE:.0%}. Positions count prompts and padding, unlike a run's tok/s.
`use SPLIT`: the recipe fits with this split, but not as it is. plan --suggest prints the command."""


@dataclass(frozen=True)
class RecipePlan:
    """Plans of one recipe, one for each machine."""

    name: str
    parameters: int | None = None
    """Number of parameters of the model; `None` if something is missing."""
    results: Sequence[SearchResult] = ()
    """A result without words is the recipe as it is; another one is the first split that fits."""
    missing: str = ""
    """Words for a file that has to exist before the model is known; `results` is empty then."""


def choose_machines(arguments: argparse.Namespace) -> list[PlannedHardware]:
    """Return the machine that the command line names, or the default machines.

    Raises:
        ConfigError: There is no such GPU, or a number is out of range.
    """
    names_one = arguments.gpu or arguments.gpu_memory or arguments.gpus * arguments.nodes > 1
    machines = [(arguments.gpu, arguments.gpus)] if names_one else DEFAULT_MACHINES
    return [
        resolve_hardware(
            name,
            arguments.gpu_memory,
            per_node=per_node,
            nodes=arguments.nodes,
            network=arguments.network,
            host_memory_gib=arguments.host_memory,
            document_tokens=arguments.document_tokens,
        )
        for name, per_node in machines
    ]


def plan_recipe(
    recipe: Path, arguments: argparse.Namespace, machines: Sequence[PlannedHardware]
) -> RecipePlan:
    """Return the plans of a recipe, with the JSON and the overrides of the command line.

    Raises:
        ConfigError: The recipe, the JSON or an override is invalid.
        ModelError: `--config` names the recipe, and its model cannot be read.
    """
    import_paths = not arguments.no_import_paths
    settings = load_settings(recipe, arguments.deepspeed, arguments.overrides, import_paths=import_paths)
    try:
        model = read_model_spec(settings.config)
    except ModelError:
        pretrained = settings.config.model.pretrained_from
        if arguments.config is not None or pretrained is None:
            raise
        return RecipePlan(recipe.stem, missing=f"needs {pretrained}")
    if model is None:
        return RecipePlan(recipe.stem, missing="needs torch to build its model")
    tokenizer = find_unread_tokenizer(settings.config)
    if tokenizer is not None:
        return RecipePlan(recipe.stem, missing=f"needs {tokenizer}")
    results = []
    for machine in machines:
        try:
            estimate = forecast(resolve_auto_micro_batch(settings, model, machine), model, machine)
            result = SearchResult(estimate, ())
        except (ConfigError, ModelError) as error:  # such as a global batch that the GPUs do not divide
            result = SearchResult(None, (), str(error))
        if result.forecast is not None and result.forecast.fits is False:
            try:
                result = suggest_split(settings, model, machine)
            except ConfigError:
                result = SearchResult(None, ())
        results.append(result)
    return RecipePlan(recipe.stem, model.numel, results)


def count_tokens(estimate: Forecast) -> int | None:
    """Return the number of tokens in all rows of a run; `None` if it counts epochs."""
    steps = estimate.config.max_steps
    tokens_per_row = estimate.config.data.tokens_per_row or 0
    return None if steps is None else steps * estimate.resolved.batch_plan.global_batch_size * tokens_per_row


def format_tokens(results: Sequence[SearchResult]) -> str:
    """Return the tokens of a run, as a range if they depend on the number of GPUs, or its epochs."""
    estimates = [result.forecast for result in results if result.forecast is not None]
    tokens = [number for number in map(count_tokens, estimates) if number is not None]
    if tokens:
        millions = dict.fromkeys(f"{number / 1e6:,.1f}" for number in (min(tokens), max(tokens)))
        return f"{' to '.join(millions)} M"
    return f"{estimates[0].config.max_epochs:g} epochs" if estimates else ""


def format_cell(result: SearchResult) -> str:
    """Return memory and time of a recipe on a machine, after the split if it needs another one."""
    estimate = result.forecast
    if estimate is None:
        return "does not fit" if result.stop_reason == "memory" else "cannot run, see below"
    time = "time unknown"
    if estimate.hours is not None:
        minutes = estimate.hours * 60
        time = f"{minutes:,.0f} min" if minutes >= 1 else "under 1 min"
    elif estimate.time is not None:
        time = f"{estimate.time.tokens_per_second:,.0f} positions/s"
    split = f"use {result.words[1]}: " if result.words else ""
    least = "" if estimate.memory.is_complete else "more than "
    return f"{split}{least}{estimate.peak / GIB:.1f} GiB, {time}"


def run(arguments: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        ConfigError, ModelError: A recipe, the JSON, an override or an option is invalid.
    """
    from pipeline.cli.screen import Screen  # imports rich

    if arguments.json:
        raise ConfigError(
            "--recipes prints a table only; for numbers as JSON: plan --config RECIPE.yaml --json"
        )
    machines = choose_machines(arguments)
    recipes = sorted(RECIPES.glob("*.yaml")) if arguments.config is None else [find_recipe(arguments.config)]
    plans = []
    for recipe in recipes:
        try:
            plans.append(plan_recipe(recipe, arguments, machines))
        except ConfigError as error:
            hint = "; name a recipe by --config" if arguments.config is None else ""
            raise ConfigError(f"{recipe.stem}: {error}{hint}") from None
    names = [f"{machine.ranks} x {machine.gpu.name}" for machine in machines]
    table = []
    for plan in plans:
        size = "" if plan.parameters is None else f"{plan.parameters / 1e6:,.1f} M"
        missing = [plan.missing] + [""] * (len(machines) - 1)
        cells = [format_cell(result) for result in plan.results]
        table.append([plan.name, size, format_tokens(plan.results), *(cells or missing)])
    screen = Screen(arguments.no_color)
    screen.table(["recipe", "parameters", "tokens", *names], table, text_columns=names)
    for line in ("", *LEGEND.splitlines()):
        screen.line(line)
    for plan in plans:
        for name, result in zip(names, plan.results, strict=False):
            if result.forecast is None and result.stop_reason != "memory":
                screen.line(f"{plan.name} on {name}: {result.stop_reason}")
