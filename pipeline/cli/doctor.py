"""python -m pipeline doctor [--hostfile FILE]: the machines of a job, examined before it starts."""

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
from pipeline.distributed.launch.hostfile import Selection, choose_devices, read_hostfile
from pipeline.distributed.op_builds import needed_ops
from pipeline.errors import LaunchError

HELP = "examine the machines of a job: ssh, versions, devices, disks, network, a real all-reduce"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        f"{HELP}. Without --hostfile: under srun each task's machine, else this one. Exit code 2: a fault."
    )
    parser.add_argument("--hostfile", "-H", type=Path, metavar="FILE", help="the machines of the launcher")
    parser.add_argument("--include", "-i", default="", metavar="NAME:0,1@NAME", help="only these of the file")
    parser.add_argument("--exclude", "-e", default="", metavar="NAME:0,1@NAME", help="all but these")
    parser.add_argument("--num_nodes", type=int, metavar="N", help="only the first N machines")
    parser.add_argument("--num_gpus", type=int, metavar="N", help="only the first N devices of each")
    parser.add_argument(
        "--force_multi", action="store_true", help="as the launcher's: ssh for one machine too"
    )
    parser.add_argument("--quick", action="store_true", help="no all-reduce: torch is not loaded")
    parser.add_argument(
        "--deepspeed", type=Path, metavar="FILE.json", help="the run's: what it needs is asked"
    )
    parser.add_argument(
        "--config", type=Path, metavar="RECIPE.yaml", help="the run's: its folders are asked for"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="the run's")
    parser.add_argument("--no-import-paths", action="store_true", help="the run's")
    # Launchers hand over the run's arguments as they are; these change nothing here.
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--world-size", help=argparse.SUPPRESS)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--log-level", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code: 0 if all is well or only warned of, 2 if a fault was found."""
    started = time.monotonic()
    rows = _rows(arguments)
    if rows is None:
        return 0
    print_rows(rows, time.monotonic() - started)
    return 2 if has_failure(rows) else 0


def _wanted(arguments: argparse.Namespace) -> ExaminationSettings:
    """Return what to examine, for no machine yet: of a run that is given its folders and native ops."""
    wanted = ExaminationSettings(devices={}, quick=arguments.quick, force_multi=arguments.force_multi)
    if not (arguments.deepspeed or arguments.config or arguments.overrides):
        return wanted
    settings = load_settings(
        arguments.config,
        arguments.deepspeed,
        arguments.overrides,
        import_paths=not arguments.no_import_paths,
    )
    documents = settings.config.data.documents
    cache = wanted.folders[1] if documents is None else str(documents.cache_dir)
    ops = needed_ops(settings.deepspeed or {})
    return replace(wanted, folders=(str(settings.config.runs_dir), cache), ops=ops)


def _rows(arguments: argparse.Namespace) -> list[CheckRow] | None:
    """Return the rows; None if another task of srun shows the table."""
    wanted = _wanted(arguments)
    selection = Selection(
        arguments.include,
        arguments.exclude,
        arguments.num_nodes,
        arguments.num_gpus,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if arguments.hostfile is not None:
        chosen = choose_devices(read_hostfile(arguments.hostfile), selection)
        return examine(replace(wanted, devices=chosen))
    if selection != Selection(visible=selection.visible):
        raise LaunchError(
            "--include, --exclude, --num_nodes and --num_gpus choose from a hostfile; give --hostfile FILE"
        )
    if is_slurm_task(os.environ):
        return examine_step(os.environ, wanted)
    if "SLURM_JOB_ID" in os.environ:
        print(
            f"only this machine; all of the job: srun --ntasks-per-node=1 {format_pipeline_command('doctor')}"
        )
    return examine(restrict_to_this_machine(wanted))
