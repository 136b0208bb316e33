"""Implements launch/multi_gpu.sh: `python -m pipeline.distributed.launch.multi_gpu ...`.

It runs the deepspeed launcher on this machine only, with a free port, and returns the exit code of the ranks.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.shipped import LAUNCH
from pipeline.config.split import Device
from pipeline.distributed.launch.environment import split_arguments
from pipeline.distributed.launch.hostfile import Selection, choose_devices
from pipeline.distributed.launch.multi_node import TRAIN, find_program
from pipeline.distributed.launch.ssh import local_command
from pipeline.distributed.launch.supervise import Supervisor
from pipeline.distributed.ranks import ENVIRONMENT_FILE, is_port
from pipeline.errors import CommandLineParser, LaunchError, report_errors


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this machine, and return the exit code of the run; bad input has code 2."""
    options, arguments = split_arguments(sys.argv[1:] if argv is None else argv)
    folder = Path(tempfile.gettempdir()) / f"pipeline-{secrets.token_hex(8)}"
    # The ranks inherit the environment of this shell. The arguments travel in a file, because deepspeed
    # prints its command line when a rank fails, and other users can read it in the list of processes.
    document = {"folder": str(folder), "environment": {}, "arguments": arguments}
    guards = {"this machine": local_command("pipeline.distributed.launch.node_guard")}

    def start(master: Mapping[str, Any]) -> list[str]:
        # The same options, if the user gave them, come later on the command line and therefore win.
        defaults = [f"--master_port={master['port']}", "--log_level=warning"]
        return [find_program("deepspeed"), *defaults, *options, str(TRAIN)]

    def run() -> int:
        check_options(options, os.environ)
        environment = os.environ | {ENVIRONMENT_FILE: str(folder / "environment.json")}
        return asyncio.run(Supervisor(guards, document, {}).run(start, environment))

    return report_errors(run)


def check_options(options: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check the launcher's options that deepspeed would misread or answer with a traceback.

    Args:
        options: Options for the deepspeed launcher.
        environment: Environment of this shell; CUDA_VISIBLE_DEVICES in it selects devices, too.

    Raises:
        LaunchError: A device does not exist, the options ask for several machines, an option is misspelled,
            or a number is out of range.
    """
    parser = CommandLineParser(prog="launch/multi_gpu.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("-H", "--hostfile")
    parser.add_argument("--num_nodes", type=int)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int)
    parser.add_argument("--master_port")
    given, unknown = parser.parse_known_args(options)
    for option in unknown:
        name = option.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        if name in ("--include", "--exclude", "--num_nodes", "--num_gpus", "--master_port"):
            raise LaunchError(f"{option}: unknown option; did you mean {name}?")
    if given.hostfile is not None or (given.num_nodes or 1) != 1:
        raise LaunchError(
            "multi_gpu.sh trains on this machine only, without --hostfile or --num_nodes; for several "
            f"machines use {LAUNCH / 'multi_node.sh'} HOSTFILE"
        )
    if given.num_gpus is not None and given.num_gpus < 1:
        raise LaunchError(f"--num_gpus {given.num_gpus}: give 1 or more")
    if given.master_port is not None and not is_port(given.master_port):
        raise LaunchError(
            f"--master_port {given.master_port}: expected a whole number from 1 to 65535; leave the option "
            "out to use a free port"
        )
    has_gpus = Device.probe().kind == "cuda"
    visible = environment.get("CUDA_VISIBLE_DEVICES") if has_gpus else None
    # On CPUs --num_gpus is a number of processes, which has no limit.
    num_gpus = given.num_gpus if has_gpus or given.include or given.exclude else None
    if given.include or given.exclude or num_gpus or visible:
        choose_devices(
            {"localhost": _count_devices(environment)},
            Selection(
                include=given.include,
                exclude=given.exclude,
                num_nodes=None,
                num_gpus=num_gpus,
                visible=visible,
                source="this machine",
            ),
        )


def _count_devices(environment: Mapping[str, str]) -> int:
    """Return the number of devices that deepspeed will find on this machine.

    A separate process asks deepspeed itself, which on CPUs counts what numactl reports.

    Raises:
        LaunchError: deepspeed fails to count them.
    """
    program = "from deepspeed.accelerator import get_accelerator as a; print('devices', a().device_count())"
    # With CUDA_VISIBLE_DEVICES set, deepspeed would count only the devices that it lists.
    variables = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False
    )
    match = re.search(r"^devices (\d+)$", done.stdout, re.MULTILINE)
    if match is None:
        raise LaunchError(
            f"deepspeed failed to count the devices of this machine: {done.stderr.strip()[-200:]}; check the "
            f"installation: {format_pipeline_command('doctor')}"
        )
    return int(match[1])


if __name__ == "__main__":
    sys.exit(main())
