"""python -m pipeline doctor [--hostfile FILE]: the machines of a job, examined before it starts."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

from pipeline.doctor.examination import Wanted, examine, this_machine
from pipeline.doctor.rows import Row, is_red
from pipeline.doctor.slurm import examine_step, in_step
from pipeline.errors import LaunchError, report_errors
from pipeline.launching.devices import Selection, choose_devices
from pipeline.launching.hostfile import read_hostfile

HELP = "examine the machines of a job: ssh, versions, devices, disks, network, a real all-reduce"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = (
        f"{HELP}. Without --hostfile: under srun each task's machine, else this one. Exit code 2: a fault."
    )
    parser.add_argument(
        "--hostfile", "-H", type=Path, metavar="FILE", help="the machines, as the launcher has them"
    )
    parser.add_argument(
        "--include", "-i", default="", metavar="NAME:0,1@NAME", help="only these of the hostfile"
    )
    parser.add_argument("--exclude", "-e", default="", metavar="NAME:0,1@NAME", help="all but these")
    parser.add_argument("--num_nodes", type=int, metavar="N", help="only the first N machines")
    parser.add_argument("--num_gpus", type=int, metavar="N", help="only the first N devices of each")
    parser.add_argument(
        "--force_multi", action="store_true", help="the launcher will use ssh for one machine too"
    )
    parser.add_argument("--quick", action="store_true", help="no all-reduce: torch is not loaded")
    parser.add_argument(
        "--runs-dir", default="runs", metavar="DIR", help="of the recipe (default: %(default)s)"
    )
    parser.add_argument(
        "--cache-dir",
        default="~/.cache/deepspeed-pipeline",
        metavar="DIR",
        help="data.cache_dir of the recipe (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0 all is well or only warned of, 2 a fault was found or bad input, 130 interrupted."""
    return report_errors(lambda: _examine(arguments))


def _examine(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    rows = _rows(arguments)
    if rows is None:
        return 0
    from pipeline.doctor.table import show  # rich: slow to load

    show(rows, time.monotonic() - started)
    return 2 if is_red(rows) else 0


def _rows(arguments: argparse.Namespace) -> list[Row] | None:
    """None: another task of srun shows the table."""
    wanted = Wanted(
        devices={},
        quick=arguments.quick,
        folders=(arguments.runs_dir, arguments.cache_dir),
        force_multi=arguments.force_multi,
    )
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
    if in_step(os.environ):
        return examine_step(os.environ, wanted)
    if "SLURM_JOB_ID" in os.environ:
        print("only this machine; all of the job: srun --ntasks-per-node=1 python -m pipeline doctor")
    return examine(this_machine(wanted))
