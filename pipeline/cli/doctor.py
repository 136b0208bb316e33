"""Command `python -m pipeline doctor [--hostfile FILE]`: examines the machines of a job before it starts."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.settings import load_settings
from pipeline.distributed.doctor.examination import (
    ExaminationSettings,
    examine,
    examine_step,
    is_slurm_task,
    restrict_to_this_machine,
)
from pipeline.distributed.doctor.rows import CheckRow, has_failure, print_rows
from pipeline.distributed.launch.hostfile import (
    Selection,
    advise_on_one_machine,
    choose_devices,
    read_hostfile,
)
from pipeline.distributed.op_builds import needed_ops
from pipeline.errors import LaunchError

HELP = "examine the machines of a job: ssh, versions, devices, disks, network, a real all-reduce"
DESCRIPTION = """\
Examine the machines of a job before it starts: ssh, versions, devices, disks, network, and a real all-reduce.
Without --hostfile, examine the machine of each task under srun, otherwise this machine. The exit code is 2 if
a check failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--hostfile", "-H", type=Path, metavar="FILE", help="file with a line `NAME slots=N` for each machine"
    )
    devices = "NAME:0,1@NAME"
    parser.add_argument(
        "--include",
        "-i",
        default="",
        metavar=devices,
        help="only these machines of the hostfile; with numbers, only these devices of a machine",
    )
    parser.add_argument(
        "--exclude",
        "-e",
        default="",
        metavar=devices,
        help="all but these machines or devices of the hostfile",
    )
    parser.add_argument("--num_nodes", type=int, metavar="N", help="only the first N machines")
    parser.add_argument("--num_gpus", type=int, metavar="N", help="only the first N devices of each machine")
    parser.add_argument(
        "--force_multi",
        action="store_true",
        help="use ssh even if there is only one machine, as the launcher's option of this name does",
    )
    parser.add_argument("--quick", action="store_true", help="skip the all-reduce, and do not load torch")
    parser.add_argument(
        "--deepspeed",
        type=Path,
        metavar="FILE.json",
        help="the run's JSON, to check the native ops that it needs",
    )
    parser.add_argument(
        "--config", type=Path, metavar="RECIPE.yaml", help="the run's recipe, to check its folders"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="the run's overrides")
    parser.add_argument(
        "--no-import-paths", action="store_true", help="refuse a recipe that names code to run"
    )
    # Launchers start the doctor with all arguments of the run. These have no effect here.
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--world-size", help=argparse.SUPPRESS)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--log-level", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code: 2 if a check failed, 0 if all passed or only warned.

    Raises:
        PipelineError: The hostfile, the options or the run's configuration is invalid.
    """
    started = time.monotonic()
    rows = _examine_machines(arguments)
    if rows is None:
        return 0
    print_rows(rows, time.monotonic() - started)
    return 2 if has_failure(rows) else 0


def _read_settings(arguments: argparse.Namespace) -> ExaminationSettings:
    """Return the settings of the examination, still without machines.

    If the command line has a recipe, a JSON or overrides, the folders and native ops that this run needs are
    examined; otherwise the default folders.
    """
    examination = ExaminationSettings(devices={}, quick=arguments.quick, force_multi=arguments.force_multi)
    if arguments.hostfile is None:
        for word in arguments.overrides:
            if "=" not in word:
                raise LaunchError(
                    f"{word!r} is not an override; write section.key=value, or give a hostfile as "
                    f"--hostfile {word}"
                )
    if not (arguments.deepspeed or arguments.config or arguments.overrides):
        return examination
    settings = load_settings(
        arguments.config,
        arguments.deepspeed,
        arguments.overrides,
        import_paths=not arguments.no_import_paths,
    )
    documents = settings.config.data.documents
    _, default_cache = examination.folders
    cache = default_cache if documents is None else str(documents.cache_dir)
    return replace(
        examination,
        folders=(str(settings.config.runs_dir), cache),
        ops=needed_ops(settings.deepspeed or {}),
    )


def _examine_machines(arguments: argparse.Namespace) -> list[CheckRow] | None:
    """Examine the machines and return the rows of the table, or `None` if another task of srun prints it."""
    examination = _read_settings(arguments)
    selection = Selection(
        include=arguments.include,
        exclude=arguments.exclude,
        num_nodes=arguments.num_nodes,
        num_gpus=arguments.num_gpus,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if arguments.hostfile is not None:
        devices = choose_devices(read_hostfile(arguments.hostfile), selection)
        advice = "" if arguments.force_multi else advise_on_one_machine(devices)
        if advice:
            print(advice)
        return examine(replace(examination, devices=devices, is_remote=not advice))
    has_options = selection != Selection(visible=selection.visible)
    if has_options:
        raise LaunchError(
            "--include, --exclude, --num_nodes and --num_gpus choose from a hostfile; add --hostfile FILE"
        )
    if is_slurm_task(os.environ):
        return examine_step(os.environ, examination)
    if "SLURM_JOB_ID" in os.environ:
        print(
            "checking this machine only; for all machines of the job: "
            f"srun --ntasks-per-node=1 {format_pipeline_command('doctor')}"
        )
    return examine(restrict_to_this_machine(examination))
