"""python -m pipeline sync [RUN ...] [--upload]: what Weights & Biases has not got yet."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.inputs import reading_a_run
from pipeline.config.command_lines import own_command
from pipeline.config.optional_packages import require
from pipeline.errors import PipelineError
from pipeline.files import is_held

if TYPE_CHECKING:
    from pipeline.monitoring.trackers.weights_and_biases import WandbFile

HELP = "list what runs kept for Weights & Biases while offline, and upload it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = HELP
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories; default: runs/*")
    parser.add_argument("--upload", action="store_true", help="send them, with the key that wandb finds")


@reading_a_run()
def run(arguments: argparse.Namespace) -> None:
    """Raises a PipelineError where a run is none, or something was not uploaded."""
    require("wandb", own_command("sync"))
    from pipeline.cli.screen import Screen
    from pipeline.monitoring.trackers.weights_and_biases import files_to_upload

    for directory in arguments.runs:
        if not (directory / "wandb").is_dir():
            raise PipelineError(f"{directory} holds nothing of Weights & Biases; expected a run directory")
    directories = arguments.runs or sorted(path.parent for path in Path("runs").glob("*/wandb"))
    found = {directory: files_to_upload(directory) for directory in directories}
    rows = [
        [str(file.folder), f"{file.num_rows:,}", _steps(file), _state(file, directory)]
        for directory, files in found.items()
        for file in files
    ]
    if not rows:
        print("nothing to upload: no run was offline")
        return
    Screen(no_color=False).table(["file", "rows", "steps", "state"], rows, words=["file", "state"])
    left = {
        directory: [file for file in files if _state(file, directory) == "to upload"]
        for directory, files in found.items()
    }
    left = {directory: files for directory, files in left.items() if files}
    if arguments.upload and left:
        _upload(left)
    elif left:
        print("to upload: the same command with --upload")


def _upload(left: dict[Path, list[WandbFile]]) -> None:
    from pipeline.monitoring.trackers.weights_and_biases import check_server, upload

    server = check_server()
    for directory, files in left.items():
        upload(files)
        print(f"{directory}: {sum(file.num_rows for file in files):,} rows uploaded to {server}", flush=True)


def _steps(file: WandbFile) -> str:
    return "" if file.steps is None else f"{file.steps[0]:,} to {file.steps[1]:,}"


def _state(file: WandbFile, directory: Path) -> str:
    if file.is_uploaded:
        return "uploaded"
    if file.steps is None:
        return "empty"
    return "in training" if is_held(directory) else "to upload"
