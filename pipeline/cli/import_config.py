"""python -m pipeline import THEIRS.yaml: a recipe and a DeepSpeed JSON of another trainer's configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.import_configs.trl import TRAINERS
from pipeline.cli.import_configs.writing import JSON, RECIPE, TOOLS, draft_of, lines_left, write
from pipeline.cli.inputs import reading_a_run
from pipeline.config.command_lines import train_command
from pipeline.errors import PipelineError, shown

HELP = "make a recipe of a configuration of LLaMA-Factory, Axolotl, TRL, the Trainer or accelerate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = HELP
    add = parser.add_argument
    add("theirs", type=Path, metavar="THEIRS.yaml", help="their configuration")
    add("-o", "--output", type=Path, metavar="FOLDER", help="default: beside theirs, without .yaml")
    add(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="how many theirs ran on: the batch is theirs a GPU (default: 1)",
    )
    choices = [*TOOLS, *(f"trl-{name}" for name in TRAINERS)]
    add(
        "--from",
        dest="origin",
        choices=choices,
        metavar="TOOL",
        help=f"{', '.join(choices)}; default: by its keys",
    )
    add("--force", action="store_true", help="write over what is in the folder")


@reading_a_run()
def run(arguments: argparse.Namespace) -> None:
    """Raises a PipelineError where theirs is none of these, or there is no room for ours."""
    theirs: Path = arguments.theirs
    folder: Path = arguments.output or theirs.with_suffix("")
    if arguments.gpus < 1:
        raise PipelineError(f"--gpus {arguments.gpus}: expected a positive number")
    draft = draft_of(theirs, arguments.origin, arguments.gpus, folder.absolute())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not arguments.force:
        raise PipelineError(f"{folder} exists and is not empty; choose another folder (--output), or --force")
    origin, refused = write(draft)
    folder = draft.folder
    said = [f"{folder / RECIPE}: {draft.tool.title}'s {theirs.name}"] if draft.has_recipe else []
    said += [f"{folder / JSON}: {origin}", *(f"{path}: for the recipe" for path in draft.files)]
    batch = "batch.global_batch_size"
    said += [f"{batch}: {draft.recipe[batch]} = {draft.remarks[batch]}"] if batch in draft.recipe else []
    said += lines_left(draft)
    said += [f"to change: {refused}"] if refused else []
    for line in said:
        print(shown(line))
    recipe = folder / RECIPE if draft.has_recipe else "RECIPE.yaml"
    print(shown(f"train by: {train_command(draft.gpus, '--deepspeed', folder / JSON, '--config', recipe)}"))
